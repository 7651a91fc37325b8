"""Reading what other ranks offer: the same bits as through sockets, an error where a rank ended, never a wrong byte."""

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
from tests.support.recording import plain_unit
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
from zerokit.placement import Axis
from zerokit.runtime.collectives import Collectives, make_collectives, memory
from zerokit.runtime.collectives.memory import MemoryRoute
from zerokit.runtime.collectives.node import SWITCH, Neighbours, meet


@pytest.fixture(autouse=True)
def _memory_route() -> None:
    require_memory_route()


def _collectives(units: int = 1) -> Collectives:
    group = dist.group.WORLD
    assert group is not None
    return make_collectives(group, torch.device("cpu"), None, units=units)


def _route_where(switched: dict[int, str]) -> str:
    os.environ[SWITCH] = switched.get(dist.get_rank(), "1")
    collectives = _collectives()
    return collectives.route


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_read_each_other_or_none_does(world: int) -> None:
    assert set(run_ranks(world, _route_where, {})) == {"memory"}
    for one in range(world):
        assert set(run_ranks(world, _route_where, {one: "0"})) == {"sockets"}


def test_the_switch_knows_two_values() -> None:
    for outcome in run_ranks_expecting_errors(2, _route_where, {0: "2", 1: "2"}):
        assert outcome.raised("UsageError"), outcome.describe()
        assert "ZEROKIT_CMA='2': 0 stands for sockets" in outcome.error


def _meet_a_stranger() -> bool:
    """Rank 1 gives a process number under which others find somebody else, as in a container of its own."""
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() == 1:
        pid = os.getppid()
        os.getpid = lambda: pid
    return meet(group, 1) is None


def test_a_process_with_another_name_is_not_read() -> None:
    assert run_ranks(2, _meet_a_stranger) == [True, True]


def _by_every_route(name: str, runs: dict[str, Run]) -> list[dict[str, Trajectory]]:
    found = []
    for switch in ("1", "0"):
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
    for read, sent in run_ranks(world, _by_every_route, name, runs):
        for label in runs:
            assert read[label].bits() == sent[label].bits(), label


def _sums(numels: list[int], dtype: torch.dtype) -> None:
    """Every way of `reduce_scatter`, with pieces around the size of a chunk, against sums by hand."""
    memory._CHUNK_BYTES = 256
    collectives, rank, world = _collectives(len(numels)), dist.get_rank(), dist.get_world_size()
    for unit, numel in enumerate(numels):
        everyone = [_numbers(unit, peer, numel * world).to(dtype) for peer in range(world)]
        layout = plain_unit(unit, numel * world, world)
        expected = everyone[0]
        for other in everyone[1:]:
            expected = expected + other
        piece = expected.view(world, -1)[rank]
        for aside in (True, False):
            bucket = everyone[rank].clone()
            out = torch.full((numel,), 7.0, dtype=dtype) if aside else bucket.view(world, -1)[rank]
            collectives.reduce_scatter(layout, bucket, out, add=False).wait()
            assert torch.equal(out, piece)
        earlier = _numbers(unit, 99, numel).to(dtype)
        out = earlier.clone()
        collectives.reduce_scatter(layout, everyone[rank].clone(), out, add=True).wait()
        assert torch.equal(out, earlier + piece)

        whole = torch.zeros(numel * world, dtype=dtype)
        whole.view(world, -1)[rank] = everyone[0].view(world, -1)[rank]
        collectives.all_gather(layout, whole).wait()
        assert torch.equal(whole, everyone[0])
        collectives.wait_for_readers()


def _numbers(unit: int, who: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * unit + who))


@pytest.mark.parametrize(("world", "dtype"), [(2, torch.float32), (3, torch.bfloat16), (4, torch.float32)])
def test_sums_and_gathers_of_any_size(world: int, dtype: torch.dtype) -> None:
    run_ranks(world, _sums, [1, 63, 64, 65, 127, 128, 129, 1000], dtype)


def _at_different_paces(stage: int) -> list[list[str]]:
    """What a rank has changed must never be what a slow one reads."""
    return train_at_two_paces(stage)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_slow_ranks_read_what_quick_ones_offered(stage: int) -> None:
    for quick, slow in run_ranks(3, _at_different_paces, stage):
        assert quick == slow


def _one_leaves_first(stage: int) -> float:
    """Rank 0 drops everything after its last forward, while rank 1 has hardly begun its own."""
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


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_leaves_has_been_read(stage: int) -> None:
    first, second = run_ranks(2, _one_leaves_first, stage)
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


def _dies(how: str) -> None:
    collectives = _collectives()
    whole = torch.zeros(4)
    collectives.all_gather(plain_unit(0, 4, 2), whole).wait()
    collectives.wait_for_readers()
    if dist.get_rank() == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    with _stays_until_the_first_is_done():
        if dist.get_rank() == 0:
            collectives.all_gather(plain_unit(0, 4, 2), whole).wait()


def test_a_rank_that_ends_is_named_at_once() -> None:
    waiting, _ = run_ranks_expecting_errors(2, _dies, "killed", **AT_ONCE)
    assert waiting.raised("ScheduleError"), waiting.describe()
    assert "rank 1 (process" in waiting.error


_PR_SET_DUMPABLE = 4


def _closes_its_memory() -> None:
    """Rank 1 may be read when the ranks meet, and not afterwards: the kernel refuses, as for another user's process."""
    collectives = _collectives()
    whole = torch.zeros(4)
    collectives.all_gather(plain_unit(0, 4, 2), whole).wait()
    collectives.wait_for_readers()
    if dist.get_rank() == 1:
        assert ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
    else:
        _drop_capabilities()
    dist.barrier()
    with _stays_until_the_first_is_done():
        collectives.all_gather(plain_unit(0, 4, 2), whole).wait()


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

    monkeypatch.setattr("zerokit.runtime.collectives.node._read", refuse)
    with pytest.raises(RuntimeError, match=r"rank 3 \(process 77\) cannot be read") as caught:
        Neighbours.read(cast(Neighbours, SimpleNamespace(_pids={3: 77})), 3, 0, torch.zeros(1))
    assert said in str(caught.value)


def test_a_rank_that_does_not_come_ends_in_a_time_out() -> None:
    waiting, _ = run_ranks_expecting_errors(2, _dies, "stays away", timeout=2.0)
    assert waiting.raised("ScheduleError"), waiting.describe()
    assert "all-gather of unit 0" in waiting.error
    assert "timed out after 2 s" in waiting.error


def _unread_at_each_stage() -> list[dict[str, Any]]:
    return [_unread(stage) for stage in range(4)]


def _unread(stage: int) -> dict[str, Any]:
    """What is left on the books, and in the window, after a backward pass."""
    case, run = CASES["unit_unused_on_rank_1"], Run(stage=stage)
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    for step in range(3):
        one_step(model, optimizer, case, run, step, Trajectory())
    collectives = optimizer.runtime.collectives
    route = collectives.routes[Axis.INNER]
    assert isinstance(route, MemoryRoute)
    with torch.no_grad():
        case.loss(model, case.batch(0, 1, dist.get_rank()))  # stages 1 and 2 gather after the step
    return {
        "unread": len(route.progress.pending),
        "offered": len(route._offered),
    }


def test_a_step_leaves_nothing_unread() -> None:
    for found in run_ranks(2, _unread_at_each_stage):
        assert found == [{"unread": 0, "offered": 0}] * 4


def test_all_that_have_ended_are_named() -> None:
    """Those that failed for want of the first are gone as well, perhaps before this rank looks."""
    alive = [False, False, True, True]
    mine = SimpleNamespace(
        rank=2,
        peers=[0, 1, 3],
        _pids=[10, 11, 12, 13],
        _is_alive=alive.__getitem__,
    )
    both = re.escape("rank 0 (process 10) and rank 1 (process 11) have ended, or dropped their models")
    with pytest.raises(RuntimeError, match=both):
        Neighbours.require_alive(cast(Neighbours, mine))
    alive[1] = True
    with pytest.raises(RuntimeError, match=re.escape("rank 0 (process 10) has ended, or dropped its model")):
        Neighbours.require_alive(cast(Neighbours, mine))
