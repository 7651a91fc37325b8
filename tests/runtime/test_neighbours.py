"""Reading other ranks' memory: the same bits as through sockets, an error where a rank ended, never a wrong byte."""

from __future__ import annotations

import gc
import os
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.distributed import run_ranks, run_ranks_expecting_errors
from tests.support.models import CASES
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
from zerokit.runtime import backends
from zerokit.runtime.backends import GlooCollectives, HostCollectives, make_collectives
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.neighbours import SWITCH, meet


@pytest.fixture(autouse=True)
def _memory_route() -> None:
    require_memory_route()


def _collectives(units: int = 1) -> Collectives:
    group = dist.group.WORLD
    assert group is not None
    return make_collectives(group, torch.device("cpu"), None, units=units)


def _kind_where(switched_off: set[int]) -> str:
    if dist.get_rank() in switched_off:
        os.environ[SWITCH] = "0"
    return type(_collectives()).__name__


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_read_each_other_or_none_does(world: int) -> None:
    assert set(run_ranks(world, _kind_where, set())) == {HostCollectives.__name__}
    for off in range(world):
        assert set(run_ranks(world, _kind_where, {off})) == {GlooCollectives.__name__}


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


def _by_both_routes(name: str, runs: dict[str, Run]) -> list[dict[str, Trajectory]]:
    found = [train_all(name, runs)]
    os.environ[SWITCH] = "0"
    return [*found, train_all(name, runs)]


@pytest.mark.parametrize(
    ("name", "world"), [("gpt", 2), ("gpt", 3), ("tiny_parameters", 4), ("bert", 3), ("lora", 2)]
)
def test_both_routes_give_the_same_bits(name: str, world: int) -> None:
    runs = {
        f"stage {stage}, {precision}": Run(
            stage=stage, precision=precision, bucket_mb=SMALL, micro=2, clip=0.5, steps=3
        )
        for stage, precision in ((0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "fp32"))
    }
    for memory, sockets in run_ranks(world, _by_both_routes, name, runs):
        for label in runs:
            assert memory[label].bits() == sockets[label].bits(), label


def _sums(numels: list[int], dtype: torch.dtype) -> None:
    """Every way of `reduce_scatter`, with pieces around the size of a chunk, against sums by hand."""
    backends._CHUNK_BYTES = 256
    collectives, rank, world = _collectives(len(numels)), dist.get_rank(), dist.get_world_size()
    assert isinstance(collectives, HostCollectives)
    for unit, numel in enumerate(numels):
        everyone = [_numbers(unit, peer, numel * world).to(dtype) for peer in range(world)]
        payload = [numel] * world
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
        collectives.settle()


def _numbers(unit: int, who: int, numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1000 * unit + who))


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_and_gathers_of_any_size(world: int, dtype: torch.dtype) -> None:
    run_ranks(world, _sums, [1, 63, 64, 65, 127, 128, 129, 1000], dtype)


def _dawdle(generator: torch.Generator, *_: object) -> None:
    time.sleep(0.004 * float(torch.rand((), generator=generator) ** 4))


def _at_different_paces(stage: int) -> list[list[str]]:
    """Each rank dawdles in other places: what a rank has changed must never be what a slow one reads."""
    case, run = CASES["gpt"], Run(stage=stage, bucket_mb=SMALL)
    found = []
    for slow in (False, True):
        model = build_seeded(case, 0)
        optimizer = wrap(model, case, run)
        trajectory = Trajectory()
        if slow:
            dawdle = torch.Generator().manual_seed(dist.get_rank())
            for module in model.modules():
                module.register_forward_pre_hook(partial(_dawdle, dawdle))
        for step in range(4):
            one_step(model, optimizer, case, run, step, trajectory)
        found.append(trajectory.bits())
    return found


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


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_that_leaves_has_been_read(stage: int) -> None:
    first, second = run_ranks(2, _one_leaves_first, stage)
    assert first == second


def _dies(how: str) -> None:
    collectives = _collectives()
    whole = torch.zeros(4)
    collectives.all_gather(whole, 0, [2, 2]).wait()
    collectives.settle()
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(4.0)
        return
    collectives.all_gather(whole, 0, [2, 2]).wait()


def test_a_rank_that_ends_is_named_at_once() -> None:
    waiting, _ = run_ranks_expecting_errors(2, _dies, "killed", timeout=30.0)
    assert waiting.raised("ScheduleError"), waiting.describe()
    assert "rank 1 (process" in waiting.error
    assert waiting.seconds < 10.0


def test_a_rank_that_does_not_come_ends_in_a_time_out() -> None:
    waiting, _ = run_ranks_expecting_errors(2, _dies, "stays away", timeout=2.0)
    assert waiting.raised("ScheduleError"), waiting.describe()
    assert "all-gather of unit 0" in waiting.error
    assert "timed out after 2 s" in waiting.error


def _unread(stage: int) -> dict[str, Any]:
    """What is left on the board's books after a step."""
    case, run = CASES["unit_unused_on_rank_1"], Run(stage=stage)
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    for step in range(3):
        one_step(model, optimizer, case, run, step, Trajectory())
    collectives = optimizer.parts.collectives
    assert isinstance(collectives, HostCollectives)
    return {"unread": len(collectives._unread), "offered": len(collectives._offered)}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_leaves_nothing_unread(stage: int) -> None:
    for found in run_ranks(2, _unread, stage):
        assert found == {"unread": 0, "offered": 0}
