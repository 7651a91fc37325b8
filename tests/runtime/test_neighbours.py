"""Reading what other ranks offer: the same bits as through sockets, an error where a rank ended, never a wrong byte.

Both ways are tested: out of the other processes' memory, and out of windows that the ranks share.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import errno
import gc
import os
import re
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.distributed import AT_ONCE, run_ranks, run_ranks_expecting_errors
from tests.support.models import CASES
from tests.support.pacing import train_at_two_paces
from tests.support.training import (
    SMALL,
    Run,
    Trajectory,
    build_seeded,
    one_step,
    require_memory_route,
    train_all,
    wrap,
)
from zerokit.runtime.collectives import Collectives, foreign, host, make_collectives
from zerokit.runtime.collectives.foreign import SWITCH, ForeignMemory
from zerokit.runtime.collectives.gloo import GlooCollectives
from zerokit.runtime.collectives.host import HostCollectives
from zerokit.runtime.collectives.neighbours import Neighbours, meet
from zerokit.runtime.collectives.windows import Windows

WAYS = {"memory": "1", "shared memory": "shared"}
"""What the switch says for each."""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """Both, one after the other; ranks are told by `choose`."""
    name: str = request.param
    return name


def choose(way: str) -> None:
    """On a rank, before its collectives are made."""
    os.environ[SWITCH] = WAYS[way]


@pytest.fixture(autouse=True)
def _memory_route() -> None:
    require_memory_route()


def _collectives(units: int = 1) -> Collectives:
    group = dist.group.WORLD
    assert group is not None
    return make_collectives(group, torch.device("cpu"), None, units=units)


def _route_where(switched: dict[int, str]) -> tuple[str, str]:
    os.environ[SWITCH] = switched.get(dist.get_rank(), "1")
    collectives = _collectives()
    return type(collectives).__name__, collectives.route


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_read_each_other_or_none_does(world: int) -> None:
    host, gloo = HostCollectives.__name__, GlooCollectives.__name__
    assert set(run_ranks(world, _route_where, {})) == {(host, "memory")}
    for one in range(world):
        assert set(run_ranks(world, _route_where, {one: "0"})) == {(gloo, "sockets")}
        assert set(run_ranks(world, _route_where, {one: "shared"})) == {(host, "shared memory")}


def test_the_switch_knows_three_values() -> None:
    for outcome in run_ranks_expecting_errors(2, _route_where, {0: "2", 1: "2"}):
        assert outcome.raised("UsageError"), outcome.describe()
        assert "ZEROKIT_CMA='2': 0 stands for sockets" in outcome.error


def _meet_a_stranger() -> str:
    """Rank 1 gives a process number under which others find somebody else, as in a container of its own."""
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() == 1:
        pid = os.getppid()
        os.getpid = lambda: pid
    found = meet(group, 1)
    assert found is not None
    return found.route


def test_a_process_with_another_name_is_not_read() -> None:
    assert run_ranks(2, _meet_a_stranger) == ["shared memory"] * 2


def _by_every_route(name: str, runs: dict[str, Run]) -> list[dict[str, Trajectory]]:
    found = []
    for switch in (*WAYS.values(), "0"):
        os.environ[SWITCH] = switch
        found.append(train_all(name, runs))
    return found


@pytest.mark.parametrize(
    ("name", "world", "ways"),
    [
        ("gpt", 2, [(0, "fp32"), (3, "fp32")]),
        ("gpt", 3, [(1, "bf16"), (2, "fp16")]),
        ("tiny_parameters", 4, [(2, "fp16"), (3, "fp32")]),
        ("bert", 3, [(0, "fp32"), (3, "fp32")]),
        ("lora", 2, [(1, "bf16"), (2, "fp16")]),
    ],
)
def test_every_route_gives_the_same_bits(name: str, world: int, ways: list[tuple[int, str]]) -> None:
    runs = {
        f"stage {stage}, {precision}": Run(
            stage=stage, precision=precision, bucket_mb=SMALL, micro=2, clip=0.5, steps=3
        )
        for stage, precision in ways
    }
    for memory, shared, sockets in run_ranks(world, _by_every_route, name, runs):
        for label in runs:
            assert memory[label].bits() == shared[label].bits() == sockets[label].bits(), label


def _sums(way: str, numels: list[int], dtype: torch.dtype) -> None:
    """Every way of `reduce_scatter`, with pieces around the size of a chunk, against sums by hand."""
    choose(way)
    host._CHUNK_BYTES = 256
    collectives, rank, world = _collectives(len(numels)), dist.get_rank(), dist.get_world_size()
    assert isinstance(collectives, HostCollectives)
    for unit, numel in enumerate(numels):
        everyone = [_numbers(unit, peer, numel * world).to(dtype) for peer in range(world)]
        payload = numel * world
        expected = everyone[0]
        for other in everyone[1:]:
            expected = expected + other
        piece = expected.view(world, -1)[rank]
        for aside in (True, False):
            bucket = everyone[rank].clone()
            out = torch.full((numel,), 7.0, dtype=dtype) if aside else bucket.view(world, -1)[rank]
            collectives.reduce_scatter(bucket, out, unit, payload, add=False).wait()
            assert torch.equal(out, piece)
        earlier = _numbers(unit, 99, numel).to(dtype)
        out = earlier.clone()
        collectives.reduce_scatter(everyone[rank].clone(), out, unit, payload, add=True).wait()
        assert torch.equal(out, earlier + piece)

        whole = torch.zeros(numel * world, dtype=dtype)
        whole.view(world, -1)[rank] = everyone[0].view(world, -1)[rank]
        collectives.all_gather(whole, unit, payload).wait()
        assert torch.equal(whole, everyone[0])
        collectives.wait_for_readers()


def _numbers(unit: int, who: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * unit + who))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_and_gathers_of_any_size(way: str, world: int, dtype: torch.dtype) -> None:
    run_ranks(world, _sums, way, [1, 63, 64, 65, 127, 128, 129, 1000], dtype)


def _at_different_paces(way: str, stage: int) -> list[list[str]]:
    """What a rank has changed must never be what a slow one reads."""
    choose(way)
    return train_at_two_paces(stage)


@pytest.mark.parametrize(
    ("way", "stage"),
    [("memory", 0), ("shared memory", 1), ("memory", 2), ("shared memory", 3), ("memory", 3)],
)
def test_slow_ranks_read_what_quick_ones_offered(way: str, stage: int) -> None:
    for quick, slow in run_ranks(3, _at_different_paces, way, stage):
        assert quick == slow


def _one_leaves_first(way: str, stage: int) -> float:
    """Rank 0 drops everything after its last forward, while rank 1 has hardly begun its own."""
    choose(way)
    case, run = CASES["gpt"], Run(stage=stage)
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    one_step(model, optimizer, case, run, 0, Trajectory())
    if dist.get_rank() == 1:
        time.sleep(0.5)
    with torch.no_grad():
        loss = float(case.loss(model, case.batch(0, 1, 0)))
    if dist.get_rank() == 0:
        del model, optimizer
        gc.collect()
        torch.full((1 << 20,), float("nan"))  # whatever was freed holds something else now
    return loss


@pytest.mark.parametrize(
    ("way", "stage"), [("memory", 1), ("shared memory", 2), ("memory", 3), ("shared memory", 3)]
)
def test_a_rank_that_leaves_has_been_read(way: str, stage: int) -> None:
    first, second = run_ranks(2, _one_leaves_first, way, stage)
    assert first == second


@contextlib.contextmanager
def _stays_until_the_first_is_done() -> Iterator[None]:
    """Rank 1 lives on until rank 0 is through with what it does here, or has failed in it."""
    store = dist.distributed_c10d._get_default_store()
    try:
        yield
    finally:
        if dist.get_rank() == 0:
            store.set("rank 0 is done", "")
        else:
            store.wait(["rank 0 is done"], datetime.timedelta(seconds=100))


def _dies(way: str, how: str) -> None:
    choose(way)
    collectives = _collectives()
    whole = torch.zeros(4)
    collectives.all_gather(whole, 0, 4).wait()
    collectives.wait_for_readers()
    if dist.get_rank() == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    with _stays_until_the_first_is_done():
        if dist.get_rank() == 0:
            collectives.all_gather(whole, 0, 4).wait()


def test_a_rank_that_ends_is_named_at_once(way: str) -> None:
    waiting, _ = run_ranks_expecting_errors(2, _dies, way, "killed", **AT_ONCE)
    assert waiting.raised("ScheduleError"), waiting.describe()
    assert "rank 1 (process" in waiting.error


_PR_SET_DUMPABLE = 4


def _closes_its_memory() -> None:
    """Rank 1 may be read when the ranks meet, and not afterwards: the kernel refuses, as for another user's process."""
    choose("memory")
    collectives = _collectives()
    whole = torch.zeros(4)
    collectives.all_gather(whole, 0, 4).wait()
    collectives.wait_for_readers()
    if dist.get_rank() == 1:
        assert ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
    else:
        _drop_capabilities()
    dist.barrier()
    with _stays_until_the_first_is_done():
        collectives.all_gather(whole, 0, 4).wait()


def _drop_capabilities() -> None:
    """Give up CAP_SYS_PTRACE, with which root reads everybody."""
    library = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # linux/capability.h: version 3, this thread
    assert library.capset(header, (ctypes.c_uint32 * 6)()) == 0


def test_a_read_that_is_refused_later_names_the_remedy() -> None:
    reader, _ = run_ranks_expecting_errors(2, _closes_its_memory, **AT_ONCE)
    assert reader.raised("ScheduleError"), reader.describe()
    assert "rank 1 (process" in reader.error
    assert "cannot be read: Operation not permitted" in reader.error
    assert "ZEROKIT_CMA=0" in reader.error
    assert "has ended" not in reader.error


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (errno.ESRCH, "it has ended, or dropped its model"),
        (errno.EFAULT, "it has ended, or dropped its model"),
        (errno.EPERM, "start the ranks with ZEROKIT_CMA=0"),
        (errno.ENOSYS, "start the ranks with ZEROKIT_CMA=0"),
    ],
)
def test_a_read_that_fails_says_what_it_means(code: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(foreign, "_read", refuse)
    with pytest.raises(RuntimeError, match=r"rank 3 \(process 77\) cannot be read") as caught:
        ForeignMemory({3: 77}).read(3, 0, torch.zeros(1))
    assert said in str(caught.value)


def test_a_rank_that_does_not_come_ends_in_a_time_out(way: str) -> None:
    waiting, _ = run_ranks_expecting_errors(2, _dies, way, "stays away", timeout=2.0)
    assert waiting.raised("ScheduleError"), waiting.describe()
    assert "all-gather of unit 0" in waiting.error
    assert "timed out after 2 s" in waiting.error


def _unread_at_each_stage(way: str) -> list[dict[str, Any]]:
    choose(way)
    return [_unread(stage) for stage in range(4)]


def _unread(stage: int) -> dict[str, Any]:
    """What is left on the books, and in the window, after a backward pass."""
    case, run = CASES["unit_unused_on_rank_1"], Run(stage=stage)
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    for step in range(3):
        one_step(model, optimizer, case, run, step, Trajectory())
    collectives = optimizer.parts.collectives
    assert isinstance(collectives, HostCollectives)
    access = collectives._neighbours._access
    with torch.no_grad():
        case.loss(model, case.batch(0, 1, dist.get_rank()))  # stages 1 and 2 gather after the step
    return {
        "unread": len(collectives._unread),
        "offered": len(collectives._offered),
        "window": access.held_bytes if isinstance(access, Windows) else 0,
        "lent": sum(map(len, collectives._neighbours._lent.values())),
    }


def test_a_step_leaves_nothing_unread(way: str) -> None:
    for found in run_ranks(2, _unread_at_each_stage, way):
        assert found == [{"unread": 0, "offered": 0, "window": 0, "lent": 0}] * 4


def test_all_that_have_ended_are_named() -> None:
    """Those that failed for want of the first are gone as well, perhaps before this rank looks."""
    alive = [False, False, True, True]
    mine = SimpleNamespace(
        rank=2,
        _ranks=range(4),
        _pids=[10, 11, 12, 13],
        _board=SimpleNamespace(is_alive=alive.__getitem__),
    )
    both = re.escape("rank 0 (process 10) and rank 1 (process 11) have ended, or dropped their models")
    with pytest.raises(RuntimeError, match=both):
        Neighbours.require_alive(cast(Neighbours, mine))
    alive[1] = True
    with pytest.raises(RuntimeError, match=re.escape("rank 0 (process 10) has ended, or dropped its model")):
        Neighbours.require_alive(cast(Neighbours, mine))
