"""Several nodes, simulated on this machine: ranks of one node share memory, between nodes there are only sockets."""

from __future__ import annotations

import gc
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import AT_ONCE, run_ranks, run_ranks_expecting_errors
from tests.support.machine import bytes_received
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
from zerokit.runtime.collectives import Collectives, make_collectives
from zerokit.runtime.collectives import nodes as nodes_module
from zerokit.runtime.collectives.foreign import SWITCH
from zerokit.runtime.collectives.neighbours import Neighbours
from zerokit.runtime.collectives.nodes import NodesCollectives

AGENT = "GROUP_RANK"
"""What torchrun tells its ranks: the number of their agent, and so of their node."""


@pytest.fixture(autouse=True)
def _memory_route() -> None:
    require_memory_route()


def _settle(nodes: list[int], switch: str = "1") -> None:
    """Make this rank one of node `nodes[rank]`."""
    os.environ[AGENT] = str(nodes[dist.get_rank()])
    os.environ[SWITCH] = switch


def _collectives() -> Collectives:
    group = dist.group.WORLD
    assert group is not None
    return make_collectives(group, torch.device("cpu"), None, units=1)


def _route(nodes: list[int], switch: str) -> str:
    _settle(nodes, switch)
    return _collectives().route


@pytest.mark.parametrize(
    ("nodes", "switch", "route"),
    [
        ([0, 0], "1", "memory"),
        ([0, 1], "1", "sockets"),
        ([0, 0, 1], "1", "memory and sockets"),
        ([0, 1, 0, 1], "shared", "shared memory and sockets"),
        ([0, 0, 1], "0", "sockets"),
    ],
)
def test_all_ranks_know_the_route(nodes: list[int], switch: str, route: str) -> None:
    assert run_ranks(len(nodes), _route, nodes, switch) == [route] * len(nodes)


def _by_every_route(
    nodes: list[int], name: str, runs: dict[str, Run]
) -> tuple[list[dict[str, Trajectory]], list[str]]:
    found, routes = [], []
    here = [0] * len(nodes)
    for places, switch in ((nodes, "1"), (nodes, "shared"), (here, "1"), (here, "0")):
        _settle(places, switch)
        routes.append(_collectives().route)
        found.append(train_all(name, runs))
    return found, routes


@pytest.mark.parametrize(
    ("name", "nodes", "ways"),
    [
        ("gpt", [0, 0, 1, 1], [(1, "bf16"), (3, "fp32")]),
        ("gpt", [0, 1, 0], [(0, "fp32"), (2, "fp16")]),
        ("unit_unused_on_rank_1", [0, 0, 1, 1], [(2, "fp16"), (3, "fp32")]),
        ("lora", [1, 0, 0], [(0, "fp32"), (1, "bf16")]),
    ],
)
def test_every_route_gives_the_same_bits(name: str, nodes: list[int], ways: list[tuple[int, str]]) -> None:
    runs = {
        f"stage {stage}, {precision}": Run(
            stage=stage, precision=precision, bucket_mb=SMALL, micro=2, clip=0.5, steps=3
        )
        for stage, precision in ways
    }
    for found, routes in run_ranks(len(nodes), _by_every_route, nodes, name, runs):
        assert routes == ["memory and sockets", "shared memory and sockets", "memory", "sockets"]
        for label in runs:
            assert len({tuple(trajectories[label].bits()) for trajectories in found}) == 1, label


def _at_different_paces(nodes: list[int], stage: int, switch: str) -> list[list[str]]:
    """Ranks wait for each other in every way there is."""
    _settle(nodes, switch)
    return train_at_two_paces(stage)


@pytest.mark.parametrize(("switch", "stage"), [("1", 0), ("shared", 1), ("1", 2), ("shared", 3), ("1", 3)])
def test_ranks_of_different_paces_do_not_block_each_other(stage: int, switch: str) -> None:
    for quick, slow in run_ranks(4, _at_different_paces, [0, 0, 1, 1], stage, switch):
        assert quick == slow


def _received(nodes: list[int], stage: int) -> tuple[int, int]:
    """(bytes that arrived through sockets in a step, bytes that were read) on this rank."""
    _settle(nodes)
    read = [0]
    for name in ("read", "look_at"):
        original = getattr(Neighbours, name)

        def counting(self: Neighbours, peer: int, number: int, tensor: torch.Tensor, call=original):  # type: ignore[no-untyped-def]
            read[0] += tensor.numel() * tensor.element_size()
            return call(self, peer, number, tensor)

        setattr(Neighbours, name, counting)
    case, run = CASES["mlp_784_256_10"], Run(stage=stage)
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    for step in range(2):
        one_step(model, optimizer, case, run, step, Trajectory())
    with torch.no_grad():
        case.loss(model, case.batch(0, 0, 0))
    dist.barrier()
    before, read[0] = bytes_received(), 0
    one_step(model, optimizer, case, run, 2, Trajectory())
    with torch.no_grad():
        case.loss(model, case.batch(0, 0, 0))  # stages 1 and 2 gather after the step
    dist.barrier()
    return bytes_received() - before, read[0]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_only_ranks_of_one_node_read_each_other(stage: int) -> None:
    """Of its three peers a rank reads one and hears of two; alone on its node it reads nothing."""
    for arrived, read in run_ranks(4, _received, [0, 0, 1, 1], stage):
        assert read > 100_000
        assert 1.9 < arrived / read < 2.2
    first, second, alone = run_ranks(3, _received, [0, 0, 1], stage)
    assert alone[1] == 0
    assert 0.9 < alone[0] / (first[0] + first[1]) < 1.1
    assert 0.9 < second[0] / second[1] < 1.2


def _is_killed_in_mid_step(nodes: list[int], victim: int) -> None:
    _settle(nodes)
    collectives = _collectives()
    assert isinstance(collectives, NodesCollectives)
    whole = torch.zeros(4 * len(nodes))
    payload = 4 * len(nodes)
    collectives.all_gather(whole, 0, payload).wait()
    collectives.wait_for_readers()
    if dist.get_rank() == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    collectives.all_gather(whole, 0, payload).wait()


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_ends_is_noticed_on_every_node(victim: int) -> None:
    nodes = [0, 0, 1, 1]
    outcomes = run_ranks_expecting_errors(4, _is_killed_in_mid_step, nodes, victim, **AT_ONCE)
    for rank, outcome in enumerate(outcomes):
        if rank != victim:
            assert outcome.raised("ScheduleError"), outcome.describe()
            assert f"rank {victim}" in outcome.error
            if nodes[rank] == nodes[victim]:
                assert f"rank {victim} (process" in outcome.error


def _is_done_first(nodes: list[int], first: int, last: int) -> None:
    """Rank `first` takes a gather and drops its model, before messages from other nodes reach rank `last`."""
    _settle(nodes)
    collectives = _collectives()
    assert isinstance(collectives, NodesCollectives)
    if dist.get_rank() == last:
        real = nodes_module._wait_for_each

        def late(orders: Any) -> None:
            time.sleep(1.5)
            real(orders)

        nodes_module._wait_for_each = late
    work = collectives.all_gather(torch.zeros(4 * len(nodes)), 0, 4 * len(nodes))
    if dist.get_rank() == last:
        work.reading.attempt()  # type: ignore[attr-defined]
        collectives.until(work.reading.attempt)  # type: ignore[attr-defined]
    work.wait()
    if dist.get_rank() == first:
        collectives.wait_for_readers()
        del work, collectives
        gc.collect()


def test_a_rank_of_the_node_may_leave_before_messages_from_elsewhere_arrive() -> None:
    run_ranks(4, _is_done_first, [0, 0, 1, 1], 2, 3)
