"""Windows: the route of ranks that may not read each other's memory. What it holds, returns and leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import platform
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import AT_ONCE, run_alone, run_ranks, run_ranks_expecting_errors
from tests.support.machine import may_read
from tests.support.models import CASES
from tests.support.training import SMALL, Run, Trajectory, build_seeded, one_step, train_all, wrap
from zerokit.runtime.collectives import foreign, windows
from zerokit.runtime.collectives.board import Board, Kind, new_board
from zerokit.runtime.collectives.foreign import SWITCH
from zerokit.runtime.collectives.passing import Door, close_all, join
from zerokit.runtime.collectives.windows import Windows, new_window

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="ranks share memory on Linux, x86-64"
)

NOBODY = 65534
_PR_SET_DUMPABLE = 4


def _become_unreadable() -> None:
    """An ordinary user's process that no other may read, as under Yama or in a sandbox. The store goes along."""
    if os.geteuid() == 0:
        store: Any = dist.distributed_c10d._get_default_store()
        while hasattr(store, "underlying_store"):
            store = store.underlying_store
        path = Path(store.path)
        path.parent.chmod(0o777)
        path.chmod(0o666)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    assert ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0


def _may_read_the_other() -> bool:
    cell = torch.tensor([float(dist.get_rank())])
    places = [torch.zeros(2, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(places, torch.tensor([os.getpid(), cell.data_ptr()]))
    other = 1 - dist.get_rank()
    pid, address = places[other].tolist()
    allowed = may_read(pid, address, numel=1) == [float(other)]
    dist.barrier()
    return allowed


def _unreadable(name: str, runs: dict[str, Run]) -> tuple[str, list[dict[str, Trajectory]]]:
    _become_unreadable()
    assert not _may_read_the_other()
    case = CASES[name]
    route = wrap(build_seeded(case, 0), case, Run()).parts.collectives.route
    found = [train_all(name, runs)]
    os.environ[SWITCH] = "0"
    return route, [*found, train_all(name, runs)]


def test_unreadable_ranks_share_memory_with_the_same_bits() -> None:
    runs = {f"stage {stage}": Run(stage=stage, bucket_mb=SMALL, micro=2, steps=3) for stage in range(4)}
    for route, (shared, sockets) in run_ranks(2, _unreadable, "gpt", runs):
        assert route == "shared memory"
        for label in runs:
            assert shared[label].bits() == sockets[label].bits(), label


def _is_killed_in_mid_step(stage: int) -> None:
    _become_unreadable()
    case, run = CASES["gpt"], Run(stage=stage, bucket_mb=SMALL)
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    assert optimizer.parts.collectives.route == "shared memory"
    one_step(model, optimizer, case, run, 0, Trajectory())
    if dist.get_rank() == 1:
        middle = list(model.parameters())[len(list(model.parameters())) // 2]
        middle.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    for step in range(1, 4):
        one_step(model, optimizer, case, run, step, Trajectory())


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_rank_killed_in_mid_step_is_named_and_leaves_nothing_behind(stage: int) -> None:
    before = set(os.listdir("/dev/shm"))
    first, killed, third = run_ranks_expecting_errors(3, _is_killed_in_mid_step, stage, **AT_ONCE)
    assert killed.exitcode == -signal.SIGKILL
    for outcome in (first, third):
        assert outcome.raised("ScheduleError"), outcome.describe()
        assert "rank 1 (process" in outcome.error
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "zerokit" in name]


def _files() -> list[str]:
    """Boards and windows that this process has open or mapped."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    found += Path("/proc/self/maps").read_text().splitlines()
    return [line for line in found if "zerokit-board" in line or "zerokit-window" in line]


def _drops_its_optimizer(switch: str) -> tuple[int, list[str]]:
    os.environ[SWITCH] = switch
    case, run = CASES["gpt"], Run(stage=3)
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    one_step(model, optimizer, case, run, 0, Trajectory())
    held = len(_files())
    dist.barrier()
    del model, optimizer
    gc.collect()
    return held, _files()


@pytest.mark.parametrize("switch", ["1", "shared"])
def test_a_dropped_optimizer_leaves_no_file_open(switch: str) -> None:
    for held, left in run_ranks(2, _drops_its_optimizer, switch):
        assert held > 0
        assert left == []


def _resident_bytes(numel: int) -> list[int]:
    """What the window holds after each of three gathers whose readers are done, in turn with `trim`."""
    own = Windows(0, {0: new_window()})
    pieces = torch.ones(4, numel)
    found = []
    for _ in range(3):
        place = own.lend(pieces, [1, 2, 3])
        found.append(own.held_bytes)
        own.take_back(place, pieces.numel() * 4)
        found.append(own.held_bytes)
    own.trim()
    return [*found, own.held_bytes]


def test_a_window_holds_what_is_lent_and_nothing_after() -> None:
    page = mmap.PAGESIZE
    # Row 0, this rank's own, is not copied: its pages never exist.
    lent = 3 * page * 4
    assert _resident_bytes(4 * page // 4) == [lent] * 6 + [0]


def test_a_window_keeps_few_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_KEPT_BYTES", mmap.PAGESIZE)
    lent = 3 * mmap.PAGESIZE
    assert _resident_bytes(mmap.PAGESIZE // 4) == [lent, 0] * 3 + [0]


def test_what_is_lent_at_one_time_lies_apart() -> None:
    """Offers of any size, some taken back: what a peer reads is what was lent."""
    descriptor = new_window()
    lender = Windows(0, {0: os.dup(descriptor)})
    reader = Windows(1, {0: descriptor, 1: new_window()})
    generator = torch.Generator().manual_seed(0)
    lent: list[tuple[int, torch.Tensor]] = []
    for _ in range(200):
        numel = int(torch.randint(1, 5000, (), generator=generator))
        tensor = torch.randn(1, numel, generator=generator)
        lent.append((lender.lend(tensor, [0]), tensor))
        while len(lent) > 8:
            choice = int(torch.randint(len(lent), (), generator=generator))
            number, tensor = lent.pop(choice)
            assert torch.equal(reader.look_at(0, number, tensor[0]), tensor[0])
            lender.take_back(number, tensor.numel() * 4)
    for number, tensor in lent:
        into = torch.empty_like(tensor[0])
        reader.read(0, number, into)
        assert torch.equal(into, tensor[0])


def test_a_window_grows_under_its_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "_GROWTH_BYTES", mmap.PAGESIZE)
    descriptor = new_window()
    lender = Windows(0, {0: os.dup(descriptor)})
    reader = Windows(1, {0: descriptor, 1: new_window()})
    seen = []
    for value in range(4):
        tensor = torch.full((1, 3000), float(value))
        seen.append(reader.look_at(0, lender.lend(tensor, [0]), tensor[0]))
    assert [float(tensor.unique()) for tensor in seen] == [0.0, 1.0, 2.0, 3.0]


def _lives_of_a_board() -> list[bool]:
    """Whether rank 1 counts as alive: while it lives, and when only a child of it does."""
    descriptor = new_board(2, 1)
    mine = Board(os.dup(descriptor), 0, 2, 1)
    ready, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork with threads: the children only wait
        rank = os.fork()
        if rank == 0:
            board = Board(descriptor, 1, 2, 1)
            board.offer(Kind.GATHER, 0, 7)
            heir = os.fork()
            if heir:
                os.write(tell, heir.to_bytes(4, "little"))
            signal.pause()
    heir = int.from_bytes(os.read(ready, 4), "little")
    assert mine.offered(Kind.GATHER, 0, 1) == [0, 7]
    found = [mine.is_alive(1)]
    os.kill(rank, signal.SIGKILL)
    os.waitpid(rank, 0)
    found.append(mine.is_alive(1))
    os.kill(heir, signal.SIGKILL)  # raises if it was not there
    return found


def test_a_board_knows_who_is_alive() -> None:
    """The lock goes with the process, even if a child of it, such as a loader of data, lives on."""
    assert run_alone(_lives_of_a_board) == [True, False]


def test_descriptors_are_for_processes_of_the_same_user_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerokit.runtime.collectives.passing._PATIENCE_S", 0.5)
    board, own = new_board(2, 1), new_window()
    with Door() as door:
        guest = threading.Thread(target=_knock, args=(door.number,))
        guest.start()
        with monkeypatch.context() as patch:
            patch.setattr(os, "geteuid", lambda: 12345)
            with pytest.raises(TimeoutError):
                door.collect(2, board, os.dup(own))
        guest.join()
    close_all([board, own])


def _knock(number: int) -> None:
    window = new_window()
    with contextlib.suppress(OSError):
        join(number, 1, 2, window)
    os.close(window)


@pytest.mark.parametrize(
    ("scope", "parents", "named"),
    [
        ("1\n", "ours", True),
        ("1\n", "another", False),
        ("0\n", "ours", False),
        ("2\n", "ours", False),
        (None, "ours", False),
    ],
)
def test_yama_hears_of_the_launcher_only(
    scope: str | None, parents: str, named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked of the kernel; whether it agrees can only be seen where Yama runs."""
    asked: list[int] = []

    class Library:
        def prctl(self, option: int, launcher: ctypes.c_ulong, *_: int) -> int:
            assert option == 0x59616D61
            asked.append(launcher.value)
            return 0

    file = tmp_path / "ptrace_scope"
    if scope is not None:
        file.write_text(scope)
    monkeypatch.setattr(foreign, "_YAMA", file)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_: Library())
    launcher = os.getppid()
    everyone = [launcher, launcher if parents == "ours" else launcher + 1]
    assert foreign.let_siblings_in(everyone) is named
    assert asked == ([launcher] if named else [])
