"""Saves beside the training, and those that ranks do not come to: each is whole, or fails on all ranks alike."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zerokit
from tests.support.crashes import Unsynced, read_tree
from tests.support.distributed import run_ranks, run_ranks_expecting_errors
from tests.support.models import CASES
from tests.support.on_ranks import on_ranks
from tests.support.saving import Held, in_turn, newest_step, small_optimizer, train
from tests.support.training import Run, Trajectory, build_seeded, one_step, wrap
from zerokit import files
from zerokit.checkpoint import together
from zerokit.checkpoint.load import load
from zerokit.checkpoint.run import list_steps
from zerokit.checkpoint.save import save
from zerokit.checkpoint.staging import leftovers
from zerokit.checkpoint.together import Saving

CASE = CASES["gpt_groups"]


class Full(files.System):
    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(28, "No space left on device")


def _trained(directory: str, stage: int, precision: str) -> None:
    """Two saves of one state, one beside the next training steps, which must not be in it."""
    run, rank = Run(stage=stage, precision=precision), dist.get_rank()
    model = build_seeded(CASE, 0)
    zero = wrap(model, CASE, run)
    one_step(model, zero, CASE, run, 0, Trajectory())
    extra = {"table": torch.arange(3)}
    save(f"{directory}/blocking", zero, step=1, extra=extra)
    assert zero.memory().host_copy == 0
    disk = Held()
    with files.replaced(disk):
        saving = save(f"{directory}/background", zero, step=1, extra=extra, blocking=False)
        extra["table"] += 1
        zero.param_groups[0]["lr"] *= 0.5
        for step in (1, 2):
            one_step(model, zero, CASE, run, step, Trajectory())
        torch.rand(1)
        assert not saving.done()
        with pytest.raises(TimeoutError):
            saving.wait(timeout=0.01)
        disk.open.set()
        assert saving.wait() == Path(directory, "background", "step-00000001")
        assert saving.done()
        assert saving.exception() is None
    assert zero.memory().host_copy >= 4 * 3 * sum(
        unit.payload_within(unit.shard(rank)) for unit in zero.layout.units if unit.trainable
    )
    buffer = zero.host_copy
    assert buffer is not None
    # Used again, and waited for by the next save and by a load.
    save(f"{directory}/background", zero, step=3, blocking=False)
    save(f"{directory}/background", zero, step=4, blocking=False)
    assert zero.host_copy is not None
    assert zero.host_copy.memory.data_ptr() == buffer.memory.data_ptr()
    # Weights alone need less: the buffer stays.
    save(f"{directory}/weights", zero, step=4, weights_only=True, blocking=False)
    load(f"{directory}/background", zero)
    assert zero.host_copy.memory.data_ptr() == buffer.memory.data_ptr()
    assert list_steps(Path(directory, "background")) == [1, 3, 4]


@pytest.mark.full(default="2-3-bf16")
@pytest.mark.parametrize(("world", "stage", "precision"), [(2, 3, "bf16"), (3, 2, "fp32")])
def test_it_holds_the_state_of_the_moment_byte_for_byte(
    tmp_path: Path, world: int, stage: int, precision: str
) -> None:
    run_ranks(world, _trained, str(tmp_path), stage, precision)
    one, other = (read_tree(tmp_path / run / "step-00000001") for run in ("blocking", "background"))
    assert one == other
    for step in (1, 3, 4):
        assert zerokit.verify(tmp_path / "background" / f"step-{step:08d}").intact


@on_ranks(2)
def test_a_failure_surfaces_on_every_rank(tmp_path: Path) -> None:
    """At `wait`, and once at the next save of those that did not wait."""
    rank, directory = dist.get_rank(), tmp_path / "run"
    zero = wrap(build_seeded(CASE, 0), CASE, Run(stage=2))

    def begin(step: Any, **more: Any) -> Saving:
        if rank == 1:
            with files.replaced(Full()):
                saving = save(directory, zero, step=step, blocking=False, **more)
                while not saving.done():
                    time.sleep(0.01)
                return saving
        return save(directory, zero, step=step, blocking=False, **more)

    with pytest.raises(zerokit.CheckpointError, match=r"rank 1: .*No space left on device"):
        begin(1).wait()
    save(directory, zero, step=2)  # the error has been raised on all ranks
    begin(3)
    with pytest.raises(zerokit.CheckpointError, match="background save before this one failed"):
        save(directory, zero, step=4)
    failed = begin(4)
    if rank == 0:
        with pytest.raises(zerokit.CheckpointError):
            failed.wait()
    # By the call itself: whoever looks at no `Saving` would lose every later step, too.
    with pytest.raises(zerokit.CheckpointError, match="background save before this one failed"):
        save(directory, zero, step=5, blocking=False)
    save(directory, zero, step=6, blocking=False)
    told = save(directory, zero, step=7 + rank, blocking=False).exception()
    assert "step differs between ranks: 7 on rank 0; 8 on rank 1" in str(told)
    save(directory, zero, step=9)
    assert list_steps(directory) == [2, 6, 9]
    assert len(list(directory.iterdir())) == 4  # nothing beside the steps and `latest`


def _interrupted(directory: str) -> None:
    """Control-C while a save waits for the one before it; then the program saves all the same."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    zero = wrap(build_seeded(CASE, 0), CASE, Run(stage=2))
    disk = Held()
    with files.replaced(disk):
        first = save(directory, zero, step=1, blocking=False)
        signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            save(directory, zero, step=2, blocking=False)
        assert not first.done()
        threading.Timer(0.1, disk.open.set).start()
        save(directory, zero, step=3, blocking=False).wait()
        assert first.done()
        first.wait()
    for step in (1, 3):
        assert zerokit.verify(f"{directory}/step-{step:08d}").intact


def _nobody_asks(directory: str) -> None:
    """The program reports a failure that nobody waited for when it ends."""
    zero = wrap(build_seeded(CASE, 0), CASE, Run(stage=2))
    with files.replaced(Full()):
        saving = save(directory, zero, step=1, blocking=False)
        while not saving.done():
            time.sleep(0.01)
    with pytest.warns(zerokit.ZerokitWarning, match=r"without a wait\(\): .*No space left on device"):
        together.warn_of_failures()
    with pytest.raises(zerokit.CheckpointError):
        saving.wait()
    together.warn_of_failures()


def _of_two_optimizers(directory: str) -> None:
    """Into one run: neither takes the other's unfinished files for leftovers."""
    one, other = (wrap(build_seeded(CASE, 0), CASE, Run(stage=2)) for _ in range(2))
    disk = Held()
    with files.replaced(disk):
        saving = save(directory, one, step=1, blocking=False)
        disk.asked.wait()  # it has its directory, and writes nothing yet
        with files.replaced(files.System()):
            save(directory, other, step=1)
        disk.open.set()
        with pytest.raises(zerokit.CheckpointError, match="step-00000001: exists"):
            saving.wait()
    assert zerokit.verify(directory).intact
    assert sorted(os.listdir(directory)) == ["latest", "step-00000001"]


def test_saves_that_meet_others_interrupts_and_the_end_of_the_program(tmp_path: Path) -> None:
    run_ranks(1, in_turn, [_interrupted, _nobody_asks, _of_two_optimizers], str(tmp_path))


def _attempt(run: Any, optimizer: zerokit.ZeroOptimizer, step: int, blocking: bool) -> str:
    try:
        saving: Any = save(run, optimizer, step=step, blocking=blocking)  # type: ignore[call-overload]
        if not blocking:
            saving.wait()
    except zerokit.ZerokitError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _newest(run: Path) -> int | None:
    found = newest_step(run)
    return None if found is None else found[0]


class Meets(files.System):
    """Calls `at` when this rank creates its first file of a step."""

    def __init__(self, at: Callable[[], None]) -> None:
        self._at: list[Callable[[], None]] = [at]

    def create(self, path: Path) -> int:
        if self._at and path.name.startswith("rank-"):
            self._at.pop()()
        return super().create(path)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _absent(folder: str, way: str, blocking: bool) -> list[str]:
    """Rank 1 is not there for one save; then both train, and save again."""
    rank, run = dist.get_rank(), Path(folder, "run")
    optimizer = small_optimizer(timeout=20)
    assert not _attempt(run, optimizer, 1, blocking)
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    said = []
    if rank == 1 and way == "stopped":
        with files.replaced(Meets(_stop)):
            said.append(_attempt(run, optimizer, 2, blocking))
    elif rank == 0 or way != "skipped":
        said.append(_attempt(run, optimizer, 2, blocking))
        if rank == 0 and way == "stopped":
            os.kill(pids[1], signal.SIGCONT)
    dist.barrier()
    if rank == 0:
        assert _newest(run) == 1
    train(optimizer)
    said.append(_attempt(run, optimizer, 3, blocking))
    if not said[-1]:
        assert _newest(run) == 3
    dist.barrier()
    assert not [left.path for left in leftovers(run) if left.gone]
    return said


@pytest.mark.full(default="skipped-True")
@pytest.mark.parametrize(("way", "blocking"), [("skipped", True), ("stopped", False)])
def test_after_a_save_without_all_ranks_the_next_one_works(tmp_path: Path, way: str, blocking: bool) -> None:
    first, second = run_ranks(2, _absent, str(tmp_path), way, blocking)
    assert first[0].startswith("ScheduleError")
    assert "rank 1" in first[0]
    assert first[1:] == [""]
    assert second[-1] == ""


def _dies(folder: str) -> list[str]:
    rank, run, said = dist.get_rank(), Path(folder, "run"), []
    optimizer = small_optimizer(timeout=20)
    assert not _attempt(run, optimizer, 1, False)
    dist.barrier()
    disk = Meets(lambda: os.kill(os.getpid(), signal.SIGKILL)) if rank == 1 else Unsynced()
    with files.replaced(disk):
        said.append(_attempt(run, optimizer, 2, False))
    assert _newest(run) == 1
    said.append(_attempt(run, optimizer, 2, True))
    return said


def test_a_rank_that_dies_in_a_save_is_told_by_those_that_live(tmp_path: Path) -> None:
    first, second, third = run_ranks_expecting_errors(3, _dies, str(tmp_path))
    assert second.exitcode == -signal.SIGKILL
    for rank in (first, third):
        assert rank.ok, rank.describe()
        assert all(said.startswith("ScheduleError") and "1" in said for said in rank.value), rank.value
    run_ranks(2, _goes_on, str(tmp_path))


def _goes_on(folder: str) -> None:
    run, optimizer = Path(folder, "run"), small_optimizer()
    zerokit.load(run, optimizer)
    save(run, optimizer, step=2)
    assert _newest(run) == 2
    assert not [left.path for left in leftovers(run)]
