"""States on a disk that fails: an error on all ranks, nothing that hangs, and a right run after a load."""

from __future__ import annotations

import errno
import gc
import mmap
import multiprocessing
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.support.distributed import AT_ONCE
from tests.support.on_ranks import on_ranks
from zerokit.errors import StorageError, UsageError, ZerokitError, ZerokitWarning
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
def test_a_disk_without_room_for_averages_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    model, optimizer = _optimizer(_home_of(tmp_path))
    average = zerokit.Ema(optimizer, 0.9)
    _step(model, optimizer, 0)
    zerokit.save(tmp_path / "run", optimizer, step=1)
    with pytest.raises(StorageError), _failing("posix_fallocate", 1, _full):
        average.update()
    with pytest.raises(UsageError, match="load a checkpoint"):
        _step(model, optimizer, 1)
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ZerokitWarning)  # the checkpoint has no average
        zerokit.load(tmp_path / "run", optimizer)
    twin, other = _optimizer("device")
    theirs = zerokit.Ema(other, 0.9)
    _step(twin, other, 0)
    for number in (1, 2):
        _step(model, optimizer, number)
        average.update()
        _step(twin, other, number)
        theirs.update()
    with average.applied(), theirs.applied():
        assert _same(_weights(optimizer), _weights(other))


class Raising(torch.optim.AdamW):
    """Raises in its third turn of a step on rank 1, once it is told to."""

    turns: int | None = None

    def step(self, closure: Any = None) -> Any:
        if Raising.turns is not None and dist.get_rank() == 1:
            Raising.turns += 1
            if Raising.turns == 3:
                raise RuntimeError("a class that fails")
        return super().step(closure)


@on_ranks(2, None, **AT_ONCE)
def test_a_class_that_raises_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    model, optimizer = _optimizer(_home_of(tmp_path), Raising)
    _step(model, optimizer, 0)
    zerokit.save(tmp_path / "run", optimizer, step=1)
    _step(model, optimizer, 1)
    right = _weights(optimizer)
    Raising.turns = 0
    kind, text = ((StorageError, "rank 1"), (RuntimeError, "a class that"))[dist.get_rank()]
    with pytest.raises(kind, match=text):
        _step(model, optimizer, 2)
    Raising.turns = None
    optimizer.zero_grad()
    zerokit.load(tmp_path / "run", optimizer)
    _step(model, optimizer, 1)
    assert _same(_weights(optimizer), right)


@on_ranks(2)
def test_without_unnamed_files_and_direct_reads_all_is_the_same(tmp_path: Path) -> None:
    home, real = _home_of(tmp_path), os.open

    def refusing(path: Any, flags: int, *mode: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE or flags & os.O_DIRECT:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *mode)

    with patch.object(os, "open", refusing):
        model, optimizer = _optimizer(home)
    assert os.listdir(home) == []
    twin, other = _optimizer("device")
    for number in range(3):
        _step(model, optimizer, number)
        _step(twin, other, number)
    assert _same(_weights(optimizer), _weights(other))


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
