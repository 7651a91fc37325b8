"""One step of the torch optimizer over flats: what it sees, what it changes, and what it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.support.recording import RecordingRoute, flat_units
from tests.support.reductions import bring
from zerokit.placement import Placement
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.guard import FlatParameter
from zerokit.runtime.storage import FlatUnit
from zerokit.runtime.update import FlatUpdate

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
SIZES = [[(70,), (130,)], [(200,)]]


class Rank:
    """Units, their gradients and an optimizer over their flats."""

    def __init__(
        self, rank: int, stage: int, make: Callable[..., Optimizer], *, half: bool = False, **options: Any
    ) -> None:
        route = RecordingRoute(rank)
        dtype = torch.bfloat16 if half else torch.float32
        self.storages: list[FlatUnit] = flat_units(route, stage, SIZES, dtype=dtype)
        self.gradients = Gradients(
            self.storages, route, torch.float32, placement=Placement.of(stage, route.mesh), fitting=[256, 256]
        )
        flats = [flat.tensor for storage in self.storages for flat in storage.flats]
        self.inner = make(flats, **options)
        self.update = FlatUpdate(self.storages, self.gradients, self.inner)
        self.route = route

    def backward(self, *without: tuple[int, int]) -> None:
        for storage in self.storages:
            for position in range(len(storage.parameters)):
                if (storage.unit.index, position) not in without:
                    bring(self.gradients, storage.unit.index, position, value=2.0)
        for storage in self.storages:  # the other ranks' sums, which stage 0 gathers
            whole = torch.zeros(storage.unit.numel)
            for part in storage.unit.slices:
                whole[part.memory.start : part.memory.stop] = 2.0
            self.route.wholes[storage.unit.index] = whole
        self.gradients.end_backward()

    def masters(self, index: int, position: int) -> list[float]:
        """What this rank updates of one parameter."""
        storage = self.storages[index]
        part = storage.unit.slices[position]
        found: list[float] = []
        for flat in storage.flats:
            both = part.memory.intersection(flat.interval)
            found += flat.tensor[both.start - flat.interval.start : both.stop - flat.interval.start].tolist()
        return found


def expected(rank: Rank, index: int, position: int, change: float) -> list[float]:
    """Parameters hold 1, 2, 3, … in line order."""
    storage = rank.storages[index]
    first = [[1, 71], [201]][index][position]
    part = storage.unit.slices[position]
    both = part.memory.intersection(storage.placement.updated(storage.unit, rank.route.rank))
    return [first + change + place - part.offset for place in range(both.start, both.stop)]


@STAGES
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("half", [False, True])
def test_every_element_moves_against_its_gradient(stage: int, rank: int, half: bool) -> None:
    one = Rank(rank, stage, torch.optim.SGD, half=half, lr=0.5)
    one.backward()
    one.update.run()
    for index, position in ((0, 0), (0, 1), (1, 0)):
        assert one.masters(index, position) == expected(one, index, position, -1.0)
    for storage in one.storages:
        assert storage.separate is half
        for flat in storage.flats:
            kept = storage.slice_of(flat.interval)
            assert kept.dtype == (torch.bfloat16 if half else torch.float32)
            assert torch.equal(kept, flat.tensor.detach().to(kept.dtype))


@STAGES
def test_flats_have_no_gradient_before_and_after(stage: int) -> None:
    one = Rank(0, stage, torch.optim.SGD, lr=0.5)
    one.backward()
    one.update.run()
    for storage in one.storages:
        for flat in storage.flats:
            assert type(flat.tensor) is FlatParameter
            assert flat.tensor.grad is None


@STAGES
@pytest.mark.parametrize("rank", [0, 1])
def test_a_frozen_parameter_keeps_value_and_state_while_its_neighbour_moves(stage: int, rank: int) -> None:
    one = Rank(rank, stage, torch.optim.SGD, lr=0.5, momentum=0.5)
    one.backward()
    one.update.run()
    one.gradients.forget()
    one.storages[0].stopped = {0}
    one.backward((0, 0))
    one.update.run()
    assert one.masters(0, 0) == expected(one, 0, 0, -1.0)
    assert one.masters(0, 1) == expected(one, 0, 1, -2.5)
    assert one.masters(1, 0) == expected(one, 1, 0, -2.5)
    one.gradients.forget()
    one.storages[0].stopped = set()
    one.backward()
    one.update.run()
    assert one.masters(0, 0) == expected(one, 0, 0, -2.5)  # it goes on with its own momentum
    assert one.masters(0, 1) == expected(one, 0, 1, -4.25)


@STAGES
def test_graphs_from_before_the_update_cannot_be_differentiated(stage: int) -> None:
    one = Rank(0, stage, torch.optim.SGD, lr=0.5)
    storage = one.storages[1]
    if stage == 3:
        storage.gather()
    storage.ready()
    weight = storage.parameters[0]
    loss = (weight * weight).sum()
    if stage == 3:
        storage.free()
    one.backward()
    one.update.run()
    if stage == 3:
        storage.gather()
        storage.ready()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_take_the_masters_dtype() -> None:
    seen: list[tuple[torch.dtype, type]] = []

    class Seeing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.extend((p.grad.dtype, type(p)) for group in self.param_groups for p in group["params"])

    route = RecordingRoute()
    storages = flat_units(route, 2, [[(4,)]])
    gradients = Gradients(
        storages, route, torch.bfloat16, placement=Placement.of(2, route.mesh), fitting=[128]
    )
    inner = Seeing([flat.tensor for storage in storages for flat in storage.flats], lr=0.1)
    bring(gradients, 0)
    gradients.end_backward()
    FlatUpdate(storages, gradients, inner).run()
    assert seen == [(torch.float32, nn.Parameter)]
