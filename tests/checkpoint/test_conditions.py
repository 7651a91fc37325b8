"""Saves to which ranks do not come, or in which they die: the next one works."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import zerokit
from tests.support.crashes import Unsynced
from tests.support.distributed import run_ranks, run_ranks_expecting_errors
from tests.support.saving import newest_step, small_optimizer, train
from zerokit import files
from zerokit.checkpoint.save import save
from zerokit.checkpoint.staging import leftovers


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
    optimizer = small_optimizer(timeout=3)
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


@pytest.mark.parametrize(("way", "blocking"), [("skipped", True), ("stopped", False)])
def test_after_a_save_without_all_ranks_the_next_one_works(tmp_path: Path, way: str, blocking: bool) -> None:
    first, second = run_ranks(2, _absent, str(tmp_path), way, blocking)
    assert first[0].startswith("ScheduleError")
    assert "rank 1" in first[0]
    assert first[1:] == [""]
    assert second[-1] == ""


def _dies(folder: str) -> list[str]:
    rank, run, said = dist.get_rank(), Path(folder, "run"), []
    optimizer = small_optimizer(timeout=3)
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
