"""`Copies`: saves as part of `step()`, which never wait, and never end the training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import StepLR

import zerokit
from tests.support.crashes import read_tree
from tests.support.distributed import AT_ONCE, run_ranks
from tests.support.nodes import Kind, Training, joined, place, warned
from tests.support.saving import Held, in_turn
from zerokit import files
from zerokit.checkpoint.run import step_name


class Full(files.System):
    """A disk that takes nothing while `full`."""

    full = True

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(fd, buffers, offset)


def _copies(training: Training, folder: str, **options: Any) -> zerokit.Copies:
    return zerokit.Copies(training.optimizer, place(folder, dist.get_rank()), **options)


def _steps(folder: str) -> list[str]:
    return sorted(path.name for path in place(folder, dist.get_rank()).iterdir())


def _step(training: Training, copies: zerokit.Copies, number: int) -> None:
    """One step whose copy, if any, has ended."""
    training.step(number)
    copies.wait()


def _saved(copies: zerokit.Copies) -> int | None:
    return copies.saved


def _ended(copies: zerokit.Copies) -> None:
    """Wait on all ranks for the end of a copy, good or bad, without a look at it."""
    while copies._saving is not None and not copies._saving.done():
        time.sleep(0.001)
    dist.barrier()


def _steps_of(training: Training, copies: zerokit.Copies, first: int, last: int) -> None:
    for number in range(first, last):
        _step(training, copies, number)


def _every_so_many_steps(folder: str) -> None:
    training = Training()
    copies = _copies(training, folder, every=3, extra=lambda n: {"n": n, "own": dist.get_rank()})
    assert copies.wait() is None
    assert _saved(copies) is None
    for number in range(8):
        _step(training, copies, number)
        assert copies.step == number + 1
    assert _saved(copies) == 6
    assert copies.wait() == place(folder, dist.get_rank()) / step_name(6)
    assert _steps(folder) == ["latest", step_name(3), step_name(6)]
    training.train(8, 9)
    copies.wait()
    assert _steps(folder) == ["latest", step_name(6), step_name(9)]
    with pytest.raises(zerokit.UsageError, match="has copies already"):
        _copies(training, folder)
    copies.stop()
    copies.stop()
    training.train(9, 12)
    assert copies.step == 9
    assert _steps(folder) == ["latest", step_name(6), step_name(9)]
    other = Training()
    extra, said = other.load([place(folder, dist.get_rank())])
    assert (extra, said) == ({"n": 9, "own": dist.get_rank()}, [])
    again = _copies(other, folder, every=2, step=extra["n"])
    other.train(9, 11)
    again.wait()
    assert _steps(folder) == ["latest", step_name(9), step_name(10)]
    weak = [again]
    del other, again
    assert weak


def _as_a_save_of_that_step(folder: str) -> None:
    """Byte for byte, though the training goes on meanwhile; gradients that add up are no matter."""
    training = Training()
    disk = Held()
    copies = _copies(training, folder, every=2, extra=lambda n: {"step": n})
    with files.replaced(disk):
        training.train(0, 5)
        disk.open.set()
        copies.wait()
    plain = Training()
    plain.train(0, 2)
    plain.save(Path(folder, "shared"), 2)
    found = joined([place(folder, node) / step_name(2) for node in range(dist.get_world_size())])
    assert found == read_tree(Path(folder, "shared", step_name(2)))


def _a_slow_link_is_said(folder: str) -> None:
    training = Training()
    copies = _copies(training, folder, every=2)
    disk = Held()
    with files.replaced(disk):
        _, said = warned(lambda: training.train(0, 7))  # the copy of step 2 is under way
        assert said == []
        assert _saved(copies) is None
        disk.open.set()
        copies.wait()
        dist.barrier()
        _, said = warned(lambda: training.train(7, 8))  # that of step 8, for the one that was due at 4
        copies.wait()
    assert _saved(copies) == 8
    if dist.get_rank() == 0:
        (text,) = said
        assert "every=2 is too small: a copy is under way for up to 6 steps" in text
    else:
        assert said == []
    _, said = warned(lambda: _steps_of(training, copies, 8, 12))
    assert said == []
    assert _steps(folder) == ["latest", step_name(10), step_name(12)]


def _a_save_of_the_program_is_not_waited_for(folder: str) -> None:
    """Nor does it count as a slow link."""
    training = Training()
    copies = _copies(training, folder, every=2, extra=lambda n: {"n": n})
    disk = Held()
    with files.replaced(disk):
        saving = zerokit.save(f"{folder}/shared", training.optimizer, step=0, blocking=False)
        training.train(0, 5)
        assert _saved(copies) is None
        disk.open.set()
        saving.wait()
        dist.barrier()
        _, said = warned(lambda: _step(training, copies, 5))
        assert said == []
    assert _saved(copies) == 6
    # One that is begun while a copy is under way waits for it, and both are whole.
    training.train(6, 8)
    zerokit.save(f"{folder}/shared", training.optimizer, step=8)
    copies.wait()
    assert _saved(copies) == 8
    assert zerokit.list_steps(f"{folder}/shared") == [0, 8]
    # A load amid the training: the copies go on.
    training.train(8, 9)
    extra, _ = training.load([place(folder, dist.get_rank())])
    assert extra == {"n": 8}
    copies.step = extra["n"]
    training.train(8, 10)
    copies.wait()
    assert _saved(copies) == 10


def _failures_are_warnings(folder: str) -> None:
    """Also for the program's saves and loads after them; what was there before stays."""
    rank = dist.get_rank()
    training = Training()
    copies = _copies(training, folder, every=2, extra=lambda n: {"n": n})
    training.train(0, 2)
    copies.wait()
    disk = Full()
    with files.replaced(disk if rank == 1 else files.System()):
        training.train(2, 4)
        _ended(copies)
        disk.full = False
        zerokit.save(f"{folder}/shared", training.optimizer, step=4)
        disk.full = True
        _, said = warned(lambda: training.train(4, 6))
        _ended(copies)
    assert copies.step == 6
    if rank == 0:
        (text,) = said
        assert "step 4 has no copies: rank 1: " in text
        assert "No space left on device" in text
    with pytest.raises(zerokit.CheckpointError, match=r"rank 1: .*No space left"):
        copies.wait()
    other = Training()
    extra, said = other.load([place(folder, rank)])
    assert extra == {"n": 2}
    assert said == []
    training.load(f"{folder}/shared")
    _, said = warned(lambda: training.train(6, 8))  # of step 6 has been said, by wait()
    assert all("step 6 has no copies" in text for text in said)
    copies.wait()
    assert _saved(copies) == 8
    assert _steps(folder) == ["latest", step_name(2), step_name(8)]


def _a_wrong_extra_is_every_ranks_error(folder: str) -> None:
    def extra(step: int) -> Any:
        if dist.get_rank() == 1 and step == 2:
            raise KeyError("position")
        return object() if step == 4 and dist.get_rank() == 0 else step

    training = Training()
    copies = _copies(training, folder, every=2, extra=extra)
    training.train(0, 1)
    with pytest.raises(zerokit.CheckpointError, match="rank 1: KeyError: 'position'"):
        training.train(1, 2)
    training.optimizer.zero_grad()
    training.train(2, 4)
    _ended(copies)
    training.train(4, 5)
    assert _saved(copies) is None
    _, said = warned(lambda: training.train(5, 6))
    if dist.get_rank() == 0:
        assert "step 4 has no copies: rank 0: extra: a builtins.object cannot be written" in said[0]
    copies.wait()
    assert _saved(copies) == 6


def _schedulers_and_averages_go_on(folder: str) -> None:
    """A copy is what is there at the end of `step()`: what follows it in the loop is done after a load."""

    def build() -> tuple[Training, Any]:
        training = Training(Kind(ema=True))
        return training, StepLR(training.optimizer, 2, 0.5)

    def go_on(training: Training, scheduler: Any, first: int, last: int) -> None:
        for number in range(first, last):
            training.step(number)  # ends with ema.update()
            scheduler.step()

    training, scheduler = build()
    copies = _copies(training, folder, every=3, extra=lambda n: {"n": n, "scheduler": scheduler.state_dict()})
    go_on(training, scheduler, 0, 5)
    copies.wait()
    go_on(training, scheduler, 5, 8)
    training.save(Path(folder, "undisturbed"), 8, extra=scheduler.state_dict())
    copies.stop()
    dist.barrier()
    other, scheduler = build()
    # Step 6 is taken away, as if the training had been killed before it.
    run = place(folder, dist.get_rank())
    extra, _ = other.load([run / step_name(3)])
    scheduler.load_state_dict(extra["scheduler"])
    assert other.ema is not None
    other.ema.update()
    scheduler.step()
    go_on(other, scheduler, 3, 8)
    other.save(Path(folder, "resumed"), 8, extra=scheduler.state_dict())
    dist.barrier()
    assert read_tree(Path(folder, "undisturbed")) == read_tree(Path(folder, "resumed"))


def _steps_that_are_skipped_count(folder: str) -> None:
    training = Training(Kind(precision="fp16"))
    copies = _copies(training, folder, every=2, extra=lambda n: {"n": n})
    training.step(0)
    training.optimizer.backward(training.model(torch.full((2, 24), 1.0)).sum() * float("inf"))
    warned(training.optimizer.step)
    training.optimizer.zero_grad()
    assert copies.step == 2
    copies.wait()
    assert _saved(copies) == 2
    other = Training(Kind(precision="fp16"))
    assert other.load([place(folder, dist.get_rank())])[0] == {"n": 2}
    assert other.optimizer.skipped_steps == training.optimizer.skipped_steps >= 1
    with training.optimizer.accumulate():
        training.optimizer.backward(training.model(torch.ones(2, 24)).sum())
    assert copies.step == 2
    assert _saved(copies) == 2


def _what_is_refused(folder: str) -> None:
    training = Training()
    for options, text in (
        ({"every": 0}, "every=0: expected an integer, at least 1"),
        ({"copies": 0}, "copies=0"),
        ({"step": -1}, "step=-1"),
        ({"every": 2.0}, "every=2.0"),
        ({"extra": {"n": 1}}, "expected a function of the number of steps"),
        ({"frozen": "once"}, "frozen='once'"),
    ):
        with pytest.raises(zerokit.UsageError, match=text):
            _copies(training, folder, **options)
    with pytest.raises(zerokit.UsageError, match="pass the ZeroOptimizer"):
        zerokit.Copies(training.model, folder)  # type: ignore[arg-type]
    assert training.optimizer.copies is None


WORKS: list[Callable[[str], None]] = [
    _every_so_many_steps,
    _as_a_save_of_that_step,
    _a_slow_link_is_said,
    _a_save_of_the_program_is_not_waited_for,
    _failures_are_warnings,
    _a_wrong_extra_is_every_ranks_error,
    _schedulers_and_averages_go_on,
    _steps_that_are_skipped_count,
    _what_is_refused,
]


@pytest.mark.parametrize("work", WORKS)
def test_copies(tmp_path: Path, work: Any) -> None:
    run_ranks(2, in_turn, [work], str(tmp_path), **AT_ONCE)
