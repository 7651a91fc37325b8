"""Saves under bad conditions: a full disk, directories that are not ours or not shared, ranks that do not come."""

from __future__ import annotations

import ctypes
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch.distributed as dist

import zerokit
from tests.support import mounts
from tests.support.crashes import Observed, Unsynced
from tests.support.distributed import run_ranks, run_ranks_expecting_errors
from tests.support.saving import newest_step, small_optimizer, train
from zerokit import files
from zerokit.checkpoint.save import save
from zerokit.checkpoint.staging import leftovers

T = TypeVar("T")
PAGE = os.sysconf("SC_PAGE_SIZE")


def _require_mounts() -> None:
    if (reason := mounts.refusal()) is not None:
        pytest.skip(reason)


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


SIZES = 25


def _on_small_disks(folder: str) -> tuple[list[str], list[int | None]]:
    """What saves said on disks of ever more pages, and which step was the newest then."""
    mounts.leave()
    disk, optimizer = Path(folder), small_optimizer(256)
    run = disk / "run"
    mounts.mount_tmpfs(disk, 1 << 24)
    save(run, optimizer, step=1)
    used, latest = _used(disk), (run / "latest").read_bytes()
    save(run, optimizer, step=2)
    needed = _used(disk) - used
    said, newest = [], []
    # The last sizes hold the step, and the file that takes the place of `latest`.
    for spare in range(needed - SIZES + 4, needed + 4):
        files.remove_tree(run / "step-00000002")
        (run / "latest").write_bytes(latest)
        mounts.mount_tmpfs(disk, (used + spare) * PAGE, again=True)
        said.append(_attempt(run, optimizer, 2, blocking=spare % 2 == 0))
        newest.append(_newest(run))
        assert not list(run.glob(".*"))  # nothing half done takes space
        train(optimizer)
        mounts.mount_tmpfs(disk, 1 << 24, again=True)
        save(run, optimizer, step=2, overwrite=True)
        assert _newest(run) == 2
    return said, newest


def _used(disk: Path) -> int:
    found = os.statvfs(disk)
    return (found.f_blocks - found.f_bfree) * found.f_frsize // PAGE


def test_a_full_disk_at_every_size(tmp_path: Path) -> None:
    _require_mounts()
    ((said, newest),) = run_ranks(1, _on_small_disks, str(tmp_path))
    assert len(said) == SIZES
    assert not said[-1]
    assert newest[-1] == 2
    for message, step in zip(said, newest, strict=True):
        assert not message or "No space left on device" in message
        assert step == 2 if not message or "latest: cannot be written" in message else step == 1
    # One of them ends exactly there.
    assert sum("latest: cannot be written" in message for message in said) == 1


class OrdinaryUser(Observed):
    """Root may write everywhere: each change of this thread is made without root's rights."""

    def around(self, name: str, call: Callable[[], T], *arguments: Any) -> T:
        libc = ctypes.CDLL(None)
        libc.setfsuid(65534)
        try:
            return call()
        finally:
            libc.setfsuid(os.geteuid())


def _into_a_directory_of_others(folder: str) -> list[str]:
    rank, optimizer, said = dist.get_rank(), small_optimizer(), []
    run = Path(folder, "run")
    save(run, optimizer, step=1)
    if rank == 0:
        run.chmod(0o555)
    dist.barrier()
    for blocking in (True, False):
        with files.replaced(OrdinaryUser()):
            said.append(_attempt(run, optimizer, 2, blocking))
        train(optimizer)
        assert _newest(run) == 1
    dist.barrier()
    if rank == 0:
        run.chmod(0o777)
    dist.barrier()
    with files.replaced(OrdinaryUser()):
        save(run, optimizer, step=2)
    assert _newest(run) == 2
    said.append(_attempt(None if rank == 1 else run, optimizer, 3, True))
    return said


def test_a_directory_of_others_or_none_is_told_on_every_rank() -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        first, second = run_ranks(2, _into_a_directory_of_others, folder)
    assert first == second
    assert first.pop().startswith("CheckpointError: rank 1: TypeError: ")
    for message in first:
        assert message.startswith("CheckpointError: ")
        assert "cannot be created: Permission denied: check its permissions and its owner" in message


def _not_shared(folder: str) -> list[str]:
    rank, optimizer, said = dist.get_rank(), small_optimizer(), []
    run = Path(folder, "run")
    save(run, optimizer, step=1)
    if rank == 1:
        mounts.leave()
        mounts.mount_tmpfs(Path(folder), 1 << 24)
        run.mkdir(exist_ok=True)
    dist.barrier()
    for blocking in (True, False):
        said.append(_attempt(run, optimizer, 2, blocking))
        train(optimizer)
    with pytest.raises(zerokit.CheckpointError):
        zerokit.load(run, optimizer)
    if rank == 0:
        assert _newest(run) == 1
        assert not list(run.glob(".*"))
    dist.barrier()
    elsewhere = Path("/dev/shm", f"zerokit-{Path(folder).name}-{os.getppid()}")
    try:
        save(elsewhere, optimizer, step=2)
        assert _newest(elsewhere) == 2
        dist.barrier()
    finally:
        if rank == 0:
            files.remove_tree(elsewhere)
    return said


def test_a_directory_that_is_not_shared_is_told_on_every_rank(tmp_path: Path) -> None:
    _require_mounts()
    first, second = run_ranks(2, _not_shared, str(tmp_path))
    assert first == second
    for message in first:
        assert message.startswith("CheckpointError: rank 1: ")
        assert "the run directory is not shared between the nodes" in message


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
    return said


def test_a_rank_that_dies_in_a_save_is_told_by_those_that_live(tmp_path: Path) -> None:
    first, second, third = run_ranks_expecting_errors(3, _dies, str(tmp_path))
    assert second.exitcode == -signal.SIGKILL
    for rank in (first, third):
        assert rank.ok, rank.describe()
        assert rank.value[0].startswith("ScheduleError"), rank.value
    run_ranks(2, _goes_on, str(tmp_path))


def _goes_on(folder: str) -> None:
    run, optimizer = Path(folder, "run"), small_optimizer()
    zerokit.load(run, optimizer)
    save(run, optimizer, step=2)
    assert _newest(run) == 2
    assert not [left.path for left in leftovers(run)]
