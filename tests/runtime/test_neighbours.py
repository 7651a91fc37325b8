"""Reading what other ranks offer: by all or by none, an error where a rank ended, never a wrong byte."""

from __future__ import annotations

import gc
import os
import re
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.support.distributed import run_each, run_ranks
from tests.support.on_ranks import on_ranks
from tests.support.recording import Group
from tests.support.training import Run, Trajectory, one_step, require_memory_route, trained
from zerokit.errors import UsageError
from zerokit.placement import Axis
from zerokit.runtime.collectives import Collectives, Kind, make_collectives
from zerokit.runtime.collectives.host.memory import MemoryRoute
from zerokit.runtime.collectives.host.node import SWITCH, Neighbours, meet
from zerokit.runtime.collectives.host.progress import HostWork, Progress
from zerokit.runtime.collectives.stalls import StallReporter


@pytest.fixture(autouse=True)
def _memory_route() -> None:
    require_memory_route()


def _collectives(units: int = 1) -> Collectives:
    group = dist.group.WORLD
    assert group is not None
    return make_collectives(group, torch.device("cpu"), None, units=units)


def _routes_where(world: int) -> list[str]:
    """The route where all ranks allow it, and where one of them does not."""
    found = []
    for one in range(-1, world):
        os.environ[SWITCH] = str(int(one != dist.get_rank()))
        found.append(_collectives().route)
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_read_each_other_or_none_does(world: int) -> None:
    assert run_ranks(world, _routes_where, world) == [["memory", *["sockets"] * world]] * world


@on_ranks(2)
def test_the_switch_knows_two_values() -> None:
    os.environ[SWITCH] = "2"
    with pytest.raises(UsageError, match="ZEROKIT_CMA='2': 0 stands for sockets"):
        _collectives()


@on_ranks(2)
def test_a_process_with_another_name_is_not_read() -> None:
    """Rank 1 gives a process number under which others find somebody else, as in a container of its own."""
    group = dist.group.WORLD
    assert group is not None
    if dist.get_rank() == 1:
        pid = os.getppid()
        os.getpid = lambda: pid
    held = os.listdir("/proc/self/fd")
    assert meet(group, 1) is None
    assert os.listdir("/proc/self/fd") == held


def _dawdle(generator: torch.Generator, *_: object) -> None:
    time.sleep(0.004 * float(torch.rand((), generator=generator) ** 4))


def _dawdle_in_backward(generator: torch.Generator, module: object, inputs: object, output: object) -> None:
    if isinstance(output, Tensor) and output.requires_grad:
        output.register_hook(partial(_dawdle, generator))


@on_ranks(3, (0, 1, 2, 3))
def test_slow_ranks_read_what_quick_ones_offered(stage: int) -> None:
    """In the second of two trainings each rank dawdles in other places, forward and backward.

    What a rank has changed must never be what a slow one reads.
    """
    bits = []
    for slow in (False, True):
        case, model, optimizer = trained("gpt", Run(stage=stage))
        if slow:
            dawdle = torch.Generator().manual_seed(dist.get_rank())
            for module in model.modules():
                module.register_forward_pre_hook(partial(_dawdle, dawdle))
                module.register_forward_hook(partial(_dawdle_in_backward, dawdle))
        trajectory = Trajectory()
        for step in range(3):
            one_step(model, optimizer, case, Run(), step, trajectory)
        bits.append(trajectory.bits())
    assert bits[0] == bits[1]


def _one_leaves_first(stage: int) -> float:
    """Rank 0 drops everything after its last forward, while rank 1 has hardly begun its own."""
    case, model, optimizer = trained("gpt", Run(stage=stage), 1)
    if dist.get_rank() == 1:
        time.sleep(0.5)
    with torch.no_grad():
        loss = float(case.loss(model, case.batch(0, 1, 0)))
    if dist.get_rank() == 0:
        del model, optimizer
        gc.collect()
        torch.full((1 << 20,), float("nan"))  # whatever was freed holds something else now
    return loss


def test_a_rank_that_leaves_has_been_read() -> None:
    for first, second in run_each(2, _one_leaves_first, (1, 3)):
        assert first == second


@on_ranks(2, (0, 1, 2, 3))
def test_a_step_leaves_nothing_unread(stage: int) -> None:
    """On the books, and in the window, after a backward pass."""
    case, model, optimizer = trained("unit_unused_on_rank_1", Run(stage=stage), 3)
    route = optimizer.runtime.collectives.routes[Axis.INNER]
    assert isinstance(route, MemoryRoute)
    with torch.no_grad():
        case.loss(model, case.batch(0, 1, dist.get_rank()))  # stages 1 and 2 gather after the step
    assert (len(route.progress.pending), len(route._offered)) == (0, 0)


class _Board:
    """What one of two ranks sees of the other, whose counts are set by hand."""

    rank, peers = 0, (1,)

    def __init__(self) -> None:
        self.cells = [0] * 6  # by rank: offers, the address of the last, offers taken

    def cell(self, peer: int, kind: object, unit: int) -> int:
        return 3 * peer


class _SecondHop:
    """A hop that begins while its rank waits: the peer takes the first offer, and another one follows."""

    def __init__(self, board: _Board, offer: Callable[[], object]) -> None:
        self.board, self.offer = board, offer

    def attempt(self) -> bool:
        if not self.board.cells[5]:
            self.board.cells[5] = 1
            self.offer()
        return True


def test_an_offer_made_while_waiting_for_the_last_one_is_waited_for_too() -> None:
    board, group = _Board(), Group(0, 2)
    progress = Progress(10.0, StallReporter(Group(0, 1)))
    route = MemoryRoute(group, progress, cast(Neighbours, board))
    pieces = list(torch.zeros(2, 4))
    offer = partial(route._gather, pieces, 0, lambda: None)
    first = offer()
    progress.pending.append(cast(HostWork, _SecondHop(board, offer)))
    route.wait_for_readers()
    assert first.taken()
    assert not route._offered[Kind.ALL_GATHER, 0].taken()


def test_all_that_have_ended_are_named() -> None:
    """Those that failed for want of the first are gone as well, perhaps before this rank looks."""
    alive = [False, False, True, True]
    mine = SimpleNamespace(rank=2, peers=[0, 1, 3], _pids=[10, 11, 12, 13], _is_alive=alive.__getitem__)
    both = re.escape("rank 0 (process 10) and rank 1 (process 11) ended, or dropped the model")
    with pytest.raises(RuntimeError, match=both):
        Neighbours.require_alive(cast(Neighbours, mine))
    alive[1] = True
    with pytest.raises(RuntimeError, match=re.escape("rank 0 (process 10) ended, or dropped the model")):
        Neighbours.require_alive(cast(Neighbours, mine))
