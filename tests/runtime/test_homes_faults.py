"""States on a disk that fails: an error on all ranks, nothing that hangs, and a right run after a load."""

from __future__ import annotations

import errno
import gc
import mmap
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.support.distributed import AT_ONCE, run_ranks, run_ranks_expecting_errors
from tests.support.on_ranks import on_ranks
from zerokit.errors import StorageError, UsageError, ZerokitError
from zerokit.runtime.homes import disk
from zerokit.runtime.homes.disk import File


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(96, 96) for _ in range(4)))


def _optimizer(states: Any, cls: Any = torch.optim.AdamW, **given: Any) -> tuple[nn.Module, Any]:
    model = _model()
    options: dict[str, Any] = {"stage": 2, "precision": "bf16", "bucket_mb": 1e-6, "lr": 1e-2} | given
    return model, zerokit.ZeroOptimizer(model, cls, states=states, **options)


def _step(model: nn.Module, optimizer: Any, number: int) -> None:
    inputs = torch.randn(4, 96, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
    optimizer.backward(model(inputs.bfloat16()).float().square().mean())
    optimizer.step()
    optimizer.zero_grad()


def _weights(optimizer: Any) -> list[Tensor]:
    return [weight.clone() for _, weight in optimizer.weights(torch.float32)]


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def _home_of(directory: Path) -> str:
    """A directory that all ranks share."""
    home = directory / "states"
    home.mkdir(exist_ok=True)
    dist.barrier()
    return str(home)


@contextmanager
def _failing(call: str, at: int, answer: Callable[[], int]) -> Iterator[None]:
    """Call number `at` of one of `os` on rank 1 gives or raises what `answer` does, and so do those that follow."""
    real, calls = getattr(os, call), 0

    def counted(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        return answer() if calls >= at else real(*arguments)

    with patch.object(os, call, counted if dist.get_rank() == 1 else real):
        yield


def _broken() -> int:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _full() -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FAULTS = [
    *[("preadv", at, _broken, "cannot be read: Input/output error") for at in (2, 4)],
    ("preadv", 3, lambda: 0, "the file ends at byte"),
    *[("pwritev", at, _broken, "cannot be written: Input/output error") for at in (1, 3, 4)],
]


@on_ranks(2, cases=FAULTS, **AT_ONCE)
def test_a_disk_that_fails_in_a_step_is_an_error_on_all_ranks_until_a_load(
    fault: tuple[str, int, Callable[[], int], str], tmp_path: Path
) -> None:
    call, at, answer, text = fault
    model, optimizer = _optimizer(_home_of(tmp_path))
    run = tmp_path / f"{call}-{at}"
    for number in range(2):
        _step(model, optimizer, number)
    zerokit.save(run, optimizer, step=2)
    _step(model, optimizer, 2)
    right = _weights(optimizer)
    with pytest.raises(StorageError) as raised, _failing(call, at, answer):
        _step(model, optimizer, 3)
    assert (text if dist.get_rank() == 1 else "rank 1 could not read, update or write") in str(raised.value)
    optimizer.zero_grad()
    with pytest.raises(UsageError, match="load a checkpoint"):
        _step(model, optimizer, 3)
    with pytest.raises(ZerokitError, match="load a checkpoint"):
        zerokit.save(run, optimizer, step=3)
    optimizer.zero_grad()
    zerokit.load(run, optimizer)
    _step(model, optimizer, 2)
    assert _same(_weights(optimizer), right)
    assert os.listdir(tmp_path / "states") == []


@on_ranks(2, None, **AT_ONCE)
def test_a_read_error_before_the_first_unit_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = _optimizer(_home_of(tmp_path))
    _step(model, optimizer, 0)
    before = _weights(optimizer)
    with pytest.raises(StorageError), _failing("preadv", 1, _broken):
        _step(model, optimizer, 1)
    assert _same(_weights(optimizer), before)
    optimizer.zero_grad()
    _step(model, optimizer, 1)  # allowed: all ranks have their states
    _, other = twin = _optimizer("device")
    for number in range(2):
        _step(*twin, number)
    assert _same(_weights(optimizer), _weights(other))


@on_ranks(2, None, **AT_ONCE)
def test_a_full_disk_is_refused_when_the_optimizer_is_built(tmp_path: Path) -> None:
    home = _home_of(tmp_path)
    with (
        pytest.raises(UsageError, match=r"rank 1: states=.* MB more .*No space left"),
        _failing("posix_fallocate", 1, _full),
    ):
        _optimizer(home)
    with pytest.raises(UsageError, match="no file can be made there"):
        _optimizer(str(tmp_path / "nowhere"))
    _step(*_optimizer(home), 0)


@on_ranks(2, None, **AT_ONCE)
def test_an_average_without_room_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model, optimizer = _optimizer(_home_of(tmp_path))
    twin, other = _optimizer("device")
    for number in range(2):
        _step(model, optimizer, number)
        _step(twin, other, number)
    with pytest.raises(UsageError, match=r"rank 1: states=.* MB more"), _failing("posix_fallocate", 1, _full):
        zerokit.Ema(optimizer, 0.9)
    assert optimizer.ema is None
    mine, theirs = zerokit.Ema(optimizer, 0.9), zerokit.Ema(other, 0.9)
    with _failing("posix_fallocate", 1, _full):  # the room is had
        for number in range(2, 4):
            _step(model, optimizer, number)
            mine.update()
    for number in range(2, 4):
        _step(twin, other, number)
        theirs.update()
    with mine.applied(), theirs.applied():
        assert _same(_weights(optimizer), _weights(other))


@on_ranks(2)
def test_an_average_that_begins_again_and_again_needs_no_more_room(tmp_path: Path) -> None:
    model, optimizer = _optimizer(_home_of(tmp_path))
    average, sizes = zerokit.Ema(optimizer, 0.5), []
    for number in range(5):
        _step(model, optimizer, number)
        average.update()
        sizes.append(optimizer.runtime.home.file.size)
        average.restart()
    assert len(set(sizes)) == 1


@on_ranks(2, None, **AT_ONCE)
def test_a_disk_that_fails_for_an_average_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    model, optimizer = _optimizer(_home_of(tmp_path))
    average = zerokit.Ema(optimizer, 0.9)
    _step(model, optimizer, 0)
    average.update()
    zerokit.save(tmp_path / "run", optimizer, step=1)
    _step(model, optimizer, 1)
    right = _weights(optimizer)
    with pytest.raises(StorageError), _failing("pwritev", 2, _broken):
        average.update()
    with pytest.raises(UsageError, match="load a checkpoint"):
        _step(model, optimizer, 1)
    zerokit.load(tmp_path / "run", optimizer)
    _step(model, optimizer, 1)
    assert _same(_weights(optimizer), right)


@on_ranks(1)
def test_states_that_a_failed_write_has_spoilt_are_never_read(tmp_path: Path) -> None:
    """Masters follow weights that were changed in place before the next pass, outside of any step."""
    model, optimizer = _optimizer(_home_of(tmp_path))
    _step(model, optimizer, 0)
    zerokit.save(tmp_path / "run", optimizer, step=1)
    kept = optimizer.state_dict()
    _step(model, optimizer, 1)
    right = _weights(optimizer)

    def broken(*_: Any) -> int:
        return _broken()

    for load in (
        partial(zerokit.load, tmp_path / "run", optimizer),
        partial(optimizer.load_state_dict, kept),
    ):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        with pytest.raises(StorageError, match="cannot be written"), patch.object(os, "pwritev", broken):
            _step(model, optimizer, 2)
        optimizer.zero_grad()
        for use in (
            partial(_step, model, optimizer, 2),
            partial(zerokit.save, tmp_path / "run", optimizer, step=2),
        ):
            with pytest.raises(ZerokitError, match="incomplete: load a checkpoint"):
                use()
        load()
        _step(model, optimizer, 1)
        assert _same(_weights(optimizer), right)


@on_ranks(2, None, **AT_ONCE)
def test_a_load_that_finds_no_room_fails_on_all_ranks(tmp_path: Path) -> None:
    model, optimizer = _optimizer(_home_of(tmp_path))
    zerokit.Ema(optimizer, 0.9)
    _step(model, optimizer, 0)
    optimizer.ema.update()
    zerokit.save(tmp_path / "run", optimizer, step=1)
    _step(model, optimizer, 1)
    right = _weights(optimizer)
    with pytest.raises(ZerokitError, match=r"rank 1: .* cannot be written"), _failing("pwritev", 1, _broken):
        zerokit.load(tmp_path / "run", optimizer)
    with pytest.raises(UsageError, match="load again"):
        _step(model, optimizer, 1)
    zerokit.load(tmp_path / "run", optimizer)
    _step(model, optimizer, 1)
    assert _same(_weights(optimizer), right)


class Raising(torch.optim.AdamW):
    """Raises `error` on `ranks` when `step` has been called `left` times, if that is a number."""

    error: BaseException = RuntimeError("a class that fails")
    ranks: tuple[int, ...] = (1,)
    left: int | None = None

    def step(self, closure: Any = None) -> Any:
        if Raising.left is not None and dist.get_rank() in Raising.ranks:
            Raising.left -= 1
            if not Raising.left:
                raise Raising.error
        return super().step(closure)


def _mixed(model: nn.Module) -> Any:
    """Owners send what they have updated to others, which wait for it."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    return {torch.optim.Muon: matrices, Raising: [p for p in model.parameters() if p.dim() == 1]}


@on_ranks(2, [(turn, mixed) for turn in (1, 3, 4) for mixed in (False, True)], **AT_ONCE)
def test_a_class_that_raises_on_one_rank_is_an_error_on_all(case: tuple[int, bool], tmp_path: Path) -> None:
    turn, mixed = case
    home, model = _home_of(tmp_path), _model()
    optimizer = zerokit.ZeroOptimizer(
        model, _mixed(model) if mixed else Raising, states=home, stage=2, precision="bf16", bucket_mb=1e-6
    )
    _step(model, optimizer, 0)
    run = tmp_path / f"run-{turn}-{mixed}"
    zerokit.save(run, optimizer, step=1)
    _step(model, optimizer, 1)
    right = _weights(optimizer)
    Raising.left = turn
    kind, text = ((StorageError, "rank 1"), (RuntimeError, "a class that"))[dist.get_rank()]
    with pytest.raises(kind, match=text):
        _step(model, optimizer, 2)
    Raising.left = None
    optimizer.zero_grad()
    with pytest.raises(UsageError, match="load a checkpoint"):
        _step(model, optimizer, 2)
    optimizer.zero_grad()
    zerokit.load(run, optimizer)
    _step(model, optimizer, 1)
    assert _same(_weights(optimizer), right)


@on_ranks(2, [(RuntimeError("all"), 1), (KeyboardInterrupt(), 1), (KeyboardInterrupt(), 3)], **AT_ONCE)
def test_what_raises_on_all_ranks_is_what_they_raise(case: tuple[BaseException, int], tmp_path: Path) -> None:
    error, turn = case
    model, optimizer = _optimizer(_home_of(tmp_path), Raising)
    run = tmp_path / f"run-{type(error).__name__}-{turn}"
    _step(model, optimizer, 0)
    zerokit.save(run, optimizer, step=1)
    before = _weights(optimizer)
    _step(model, optimizer, 1)
    right = _weights(optimizer)
    zerokit.load(run, optimizer)
    Raising.error, Raising.ranks, Raising.left = error, (0, 1), turn
    with pytest.raises(type(error)):
        _step(model, optimizer, 1)
    Raising.left = None
    optimizer.zero_grad()
    if turn == 1:  # nothing had changed
        assert _same(_weights(optimizer), before)
    else:
        with pytest.raises(UsageError, match="load a checkpoint"):
            _step(model, optimizer, 1)
        optimizer.zero_grad()
        zerokit.load(run, optimizer)
    _step(model, optimizer, 1)
    assert _same(_weights(optimizer), right)


@on_ranks(2)
def test_however_the_file_is_made_and_read_all_is_the_same(tmp_path: Path) -> None:
    home, real = _home_of(tmp_path), os.open

    def refusing(flag: int) -> Callable[..., int]:
        def fake(path: Any, flags: int, *mode: int) -> int:
            if flags & flag == flag:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, *mode)

        return fake

    ways: dict[str, Any] = {
        "no unnamed files": patch.object(os, "open", refusing(os.O_TMPFILE)),
        "past the page cache": nullcontext(),
        "not past it": patch.object(os, "open", refusing(os.O_DIRECT)),
    }
    twin, other = _optimizer("device")
    trained = {}
    for way, patched in ways.items():
        with patched, patch.object(disk, "fits_the_cache", lambda nbytes, way=way: "unnamed" in way):
            trained[way] = _optimizer(home)
    assert os.listdir(home) == []
    for number in range(3):
        _step(twin, other, number)
        for model, optimizer in trained.values():
            _step(model, optimizer, number)
    for way, (_, optimizer) in trained.items():
        assert _same(_weights(optimizer), _weights(other)), way


@pytest.mark.parametrize("fault", [errno.EOPNOTSUPP, errno.EXDEV, 0])
def test_a_copy_has_the_bytes_where_the_system_copies_none(tmp_path: Path, fault: int) -> None:
    content = bytes(range(256)) * 64
    file, read = File(tmp_path), bytearray(len(content))
    file.grow(len(content))
    file.write(memoryview(content), 0)
    refused = (
        patch.object(os, "copy_file_range", side_effect=OSError(fault, "no")) if fault else nullcontext()
    )
    with refused:
        copy = file.copy()
    file.write(memoryview(bytes(len(content))), 0)
    copy.read(memoryview(read), 0)
    assert read == content


@on_ranks(1)
def test_files_and_threads_go_with_their_optimizers(tmp_path: Path) -> None:
    home, counts = _home_of(tmp_path), []
    for _ in range(4):
        _step(*_optimizer(home), 0)
        gc.collect()
        for thread in threading.enumerate():
            if thread.name.startswith("zerokit-states"):
                thread.join()
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert counts[1] == counts[-1]


@on_ranks(1)
def test_a_forked_process_ends_and_leaves_the_file_alone(tmp_path: Path) -> None:
    model, optimizer = _optimizer(_home_of(tmp_path))
    _step(model, optimizer, 0)
    before = _weights(optimizer)
    # A rank of these tests is a daemon, which may have no children.
    settings = patch.dict(vars(multiprocessing.current_process())["_config"], daemon=False)
    numbers: Any = torch.arange(8.0)
    loader: Any = torch.utils.data.DataLoader(numbers, num_workers=2, multiprocessing_context="fork")
    with settings:
        assert sum(batch.sum().item() for batch in loader) == 28
    assert _same(_weights(optimizer), before)


def test_a_file_has_the_bytes_that_were_written(tmp_path: Path) -> None:
    file = File(tmp_path)
    file.grow(3 << 12)
    content = memoryview(bytearray(range(256)) * 32)
    with pytest.raises(StorageError, match="cannot be read: the file ends at byte"):
        file.read(memoryview(bytearray(10)), 3 << 12)
    page = mmap.mmap(-1, 2 << 12)
    page[:] = content
    file.write(memoryview(page), 1 << 12)
    back = bytearray(100)
    file.copy().read(memoryview(back), (1 << 12) + 7)
    assert back == content[7:107]


def test_room_is_given_back_though_a_forked_process_has_the_file_open(tmp_path: Path) -> None:
    file = File(tmp_path)
    file.grow(1 << 20)
    if not (child := os.fork()):
        del file
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert file.size == 1 << 20  # which the child has left alone
    other = os.dup(file.fd)
    del file
    assert os.fstat(other).st_size == 0
    os.close(other)


def _killed_at(call: int, run: Path, home: Path) -> list[str]:
    """Go on from the last save, save each step, and be killed at a read or write of states or of a save."""
    model, optimizer = _optimizer(home)
    first = zerokit.list_steps(run)[-1] if run.exists() and zerokit.list_steps(run) else 0
    if first:
        zerokit.load(run, optimizer)
    done = 0

    def counted(real: Callable[..., int], *given: Any) -> int:
        nonlocal done
        done += 1
        if done == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given)

    with ExitStack() as stack:
        for name in ("preadv", "pwritev", "copy_file_range"):
            stack.enter_context(patch.object(os, name, partial(counted, getattr(os, name))))
        for number in range(first, 6):
            _step(model, optimizer, number)
            if number % 2:
                zerokit.save(run, optimizer, step=number + 1)
            else:
                zerokit.save(run, optimizer, step=number + 1, blocking=False).wait()
    return [float(weight.sum()).hex() for weight in _weights(optimizer)]


def test_a_run_that_is_killed_goes_on_from_its_checkpoint_with_the_right_bits(tmp_path: Path) -> None:
    (home := tmp_path / "states").mkdir()
    choose = random.Random(7)
    whole = run_ranks(2, _killed_at, 0, tmp_path / "whole", home)
    kills = 0
    for _ in range(5):
        call = choose.randrange(1, 60)
        outcomes = run_ranks_expecting_errors(2, _killed_at, call, tmp_path / "run", home)
        kills += sum(outcome.exitcode == -signal.SIGKILL for outcome in outcomes)
        assert os.listdir(home) == []
    assert kills >= 5
    assert run_ranks(2, _killed_at, 0, tmp_path / "run", home) == whole
