"""A model's passes by hand: what `ModelWalk` tells gathering and gradients, without a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from tests.support.recording import Event, RecordingRoute, flat_units
from zerokit.placement import Placement
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.passes import ForwardPass, Passes
from zerokit.runtime.sharded import ShardedGathering
from zerokit.runtime.storage import FlatUnit

Look = Callable[[int], None]


class Walk:
    """One rank at stage 3, with a unit for each of `count`; those in `rest` belong to no module."""

    def __init__(
        self,
        count: int,
        *,
        prefetch: int = 1,
        rest: Sequence[int] = (),
        frozen: Sequence[int] = (),
        route: RecordingRoute | None = None,
    ) -> None:
        self.route = route or RecordingRoute()
        shapes = [[(4,)]] * count
        self.units = flat_units(self.route, 3, shapes, rest=rest, frozen=frozen)
        fitting = [storage.unit.numel for storage in self.units if storage.unit.trainable]
        placement = Placement.of(3, self.route.mesh)
        self.gradients = Gradients(
            self.units, self.route, torch.float32, placement=placement, fitting=fitting
        )
        self.gathering = ShardedGathering(
            self.units,
            self.route,
            placement,
            reduce_due=self.gradients.reduce_due,
            allow=self.gradients.allow,
            prefetch=prefetch,
        )
        self.passes = Passes()

    @property
    def resident(self) -> list[int]:
        return [unit.unit.index for unit in self.units if unit.resident]

    def forward(
        self,
        uses: Sequence[int],
        look: Look = lambda unit: None,
        *,
        training: bool = True,
        record: Sequence[int] | None = None,
    ) -> ForwardPass:
        """The model uses these units one after the other; `look` is called inside each.

        `record` is the order that rank 0 broadcasts where it is not this rank's own.
        """
        self.passes.begin(training=training)
        current = self.passes.current
        self.gathering.begin_forward(current)
        for index in uses:
            unit = self.units[index]
            current.use(index)
            self.gathering.enter(unit)
            self.gathering.activate(unit)
            self.require_current(unit)
            look(index)
            if self.gathering.leave(unit) and training:
                current.watched.add(index)
        self.gathering.end_forward(training=training)
        if not self.gathering.recorded or self.gathering.deviated:
            own, kept = self.gathering.trace(()), self.gathering.used_anywhere()
            self.gathering.adopt_order(own if record is None else record, (), kept)
            if current.plan is not None:
                current.plan = self.gathering.plan
        return current

    def backward(
        self,
        current: ForwardPass,
        uses: Sequence[int],
        look: Look = lambda unit: None,
        *,
        without: Collection[int] = (),
    ) -> None:
        """The uses again, the last first; a unit's gradient comes with its first use, but for those in `without`."""
        assert current.plan is not None
        self.gradients.follow(current.plan.reductions)
        self.gradients.over = lambda unit: False
        self.gathering.begin_backward()
        current.consumed = True
        for place, index in reversed(list(enumerate(uses))):
            unit = self.units[index]
            self.gradients.over = self.passes.when_over(current, place + 1, accumulates=True)
            self.gathering.enter_backward([unit], current)
            self.require_current(unit)
            look(index)
            if index in self.gradients.units and index not in without and index not in uses[:place]:
                self.bring(index)
        self.end_backward(current)

    def end_backward(self, current: ForwardPass) -> None:
        self.gradients.over = lambda unit: True
        self.gathering.end_backward(current)
        self.gradients.end_backward()
        self.gradients.recorded = True
        self.gathering.drop()
        self.gathering.free_all()
        self.passes.end_backward()

    def bring(self, index: int) -> None:
        parameter = self.units[index].parameters[0]
        parameter.grad = torch.full((4,), float(index + 1))
        self.gradients.accept(index, 0, parameter)

    def require_current(self, unit: FlatUnit, *, guarded: bool = False) -> None:
        """The unit's parameter holds its values, and its class is plain, or guarded."""
        assert unit.guarded == guarded
        first = 4.0 * unit.unit.index
        assert unit.parameters[0].tolist() == [first + 1, first + 2, first + 3, first + 4]

    def issued(self) -> list[Event]:
        return self.route.take("gather", "reduce")


def gathers(*units: int) -> list[Event]:
    return [("gather", unit) for unit in units]
