"""Gradients: from autograd into flat buckets, over the ranks, into shards.

    stage 0, 1   one whole bucket a unit, kept; the sum over ranks stands in this rank's piece of it (and, at
                 stage 0, is gathered to all pieces)
    stage 2, 3   one shard a unit, kept; buckets are lent by a small pool while a unit's gradients arrive

A gradient is multiplied by 1/N while it is copied into its bucket (that of a unit of one unpadded parameter, made by
autograd, is the bucket), and N ranks' buckets are then summed in rank order. Units are reduced in one order on every
rank. At stage 3 it is part of the order of gathers (see order's [Note: one order]); at the others it is reversed line
order in the first backward, in which rank 0 records the order in which its units became complete. A unit that is
incomplete at the end of backward is reduced with zeros in place of what is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from zerokit.errors import ScheduleError, UsageError
from zerokit.formulas import pooled_buckets
from zerokit.layout import Interval
from zerokit.runtime.buckets import BucketPool, Phase, UnitGradients
from zerokit.runtime.collectives import Collectives, Work
from zerokit.runtime.storage import Flat, FlatUnit

_MOST_IN_FLIGHT = 3
"""Reductions at a time where no pool limits them: each has memory for what arrives."""


class Gradients:
    """All units' gradients and the one order in which they are reduced."""

    def __init__(
        self,
        storages: Sequence[FlatUnit],
        collectives: Collectives,
        dtype: torch.dtype,
        *,
        stage: int,
        fitting: Sequence[int],
    ) -> None:
        self.units = {
            storage.unit.index: UnitGradients(storage, dtype, whole=stage < 2, gather=stage == 0)
            for storage in storages
            if storage.unit.trainable
        }
        self._collectives = collectives
        self._factor = 1.0 / collectives.world
        count = pooled_buckets(stage)
        self.pool = BucketPool(fitting if count else (), count, dtype, collectives.device)
        self._most_in_flight = count or _MOST_IN_FLIGHT
        # Before it is recorded, units of the rest come last: where they are used is not known.
        self.order = sorted(
            self.units, key=lambda index: (bool(self.units[index].unit.scopes), index), reverse=True
        )
        self._allowed = len(self.order)
        self.over: Callable[[int], bool] = lambda index: False
        """Whether the current backward pass will bring no more gradients to a unit."""
        self.recorded = False
        self.accumulating = False
        self.spoiled = False
        """Whether a failed backward pass has left sums of earlier ones that nobody can separate from it."""
        self.shown = False
        """Whether whole gradients are shown to the user, who may change them."""
        self._arrived: set[tuple[int, int]] = set()
        """Parameters whose gradients this rank has received since the last `forget`."""
        self._idle: set[tuple[int, int]] = set()
        """Parameters that were frozen in a forward pass since then."""
        self._cleared: set[tuple[int, int]] = set()
        self._shared = {
            (index, position)
            for index, unit in self.units.items()
            for position, part in enumerate(unit.unit.slices)
            if part.memory.intersection(unit.storage.own).numel
        }
        self._completed: list[int] = []
        self._next = 0
        self._reductions: deque[tuple[UnitGradients, Work]] = deque()
        self._gathers: list[Work] = []
        self.received = False
        """Whether a backward pass has brought any gradient since the last `forget`."""

    def accept(self, index: int, position: int, parameter: nn.Parameter) -> None:
        """Take `parameter.grad`, which has just become ready, and reduce every unit that this completes."""
        if self.shown:
            raise UsageError("backward() inside gathered_gradients(): leave the context first")
        unit = self.units[index]
        unit.storage.unguard()
        self._arrived.add((index, position))
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return  # a hook of the user's has taken it
        gradient = gradient.detach()  # backward(create_graph=True) gives it a graph
        if unit.phase in (Phase.COMPLETE, Phase.REDUCING):
            raise ScheduleError(
                f"a gradient for {unit.unit.parameters[position].name} came after its unit had been reduced in this "
                "backward pass. Reentrant activation checkpointing does that: use torch.utils.checkpoint with "
                "use_reentrant=False. So does a module that this rank uses elsewhere than rank 0 did first: name it "
                "in units="
            )
        if gradient.layout != torch.strided:
            raise ScheduleError(
                f"the gradient of {unit.unit.parameters[position].name} is "
                f"{gradient.layout}, but flat buckets are dense: "
                "build the embedding with sparse=False"
            )
        self.received = True
        if self._cleared:
            self._cleared.clear()
        unit.phase = Phase.FILLING
        if self.accumulating:
            if not unit.whole:
                unit.prepare_own()
            self._prepare(unit)
            unit.fill(position, gradient, self._factor)
            return
        if unit.may_steal(gradient):
            unit.steal(gradient, self._factor)
        else:
            self._prepare(unit)
            unit.fill(position, gradient, self._factor)
        unit.arrived.add(position)
        if len(unit.arrived) == len(unit.storage.parameters):
            self._complete(unit)

    def follow(self, order: Sequence[int]) -> None:
        """Reduce in this order in the backward pass that begins, as far as `allow` says."""
        if not self._next:
            self.order = list(order)
            self._allowed = 0

    def allow(self, count: int) -> None:
        """The first `count` reductions may be issued, once they are complete."""
        self._allowed = count
        if not self.accumulating:
            self._issue()

    def reduce_due(self, count: int) -> None:
        """Issue the first `count` reductions, with zeros for gradients that will not come any more.

        Without this a rank on which a gradient is missing would hold back its reductions until the end of backward,
        while others wait for them before they issue the gather that this rank waits for. Stops at a unit whose
        gradients may still come: then all ranks must do the same.
        """
        while not self.accumulating and self._next < min(count, len(self.order)):
            index = self.order[self._next]
            if self.units[index].phase is not Phase.COMPLETE and not self.over(index):
                return
            self._issue_next()

    def end_backward(self) -> None:
        """Reduce what is left, with zeros for what never came, and wait for everything."""
        if not self.accumulating:
            while self._next < len(self.order):
                self._issue_next()
            while self._reductions:
                self._finish_oldest()
            for gather in self._gathers:
                gather.wait()
            self._gathers.clear()
            self._collectives.settle()
        self._next = 0
        for unit in self.units.values():
            unit.begin_pass()

    @property
    def pending(self) -> bool:
        """Whether some gradients wait in whole buckets, not summed over ranks yet (after `accumulate()`)."""
        return any(unit.filled for unit in self.units.values())

    @property
    def summed(self) -> bool:
        """Whether the shards hold sums over ranks."""
        return all(unit.summed for unit in self.units.values())

    def forget(self) -> None:
        """Wait for what is in flight and drop all gradients."""
        while self._reductions:
            _, work = self._reductions.popleft()
            work.wait()
        for gather in self._gathers:
            gather.wait()
        self._gathers.clear()
        self._collectives.settle()
        for unit in self.units.values():
            unit.forget(self.pool)
        self._next = 0
        self.received = self.spoiled = False
        self._cleared.clear()
        self._arrived.clear()
        self._idle.clear()

    def clear(self, index: int, position: int) -> None:
        """Forget the gradient of one parameter; there are none, once all that this rank has a share of are cleared.

        Nothing else changes: what ranks issue must not depend on what one of them clears.
        """
        self.units[index].clear(position)
        self._cleared.add((index, position))
        self._arrived.discard((index, position))
        if self._cleared >= self._shared:
            self.received = False

    def holds(self, index: int, position: int) -> bool:
        """Whether there is a gradient of this parameter, as far as this rank knows."""
        return self.received and index in self.units and (index, position) not in self._cleared

    def note_frozen(self, storage: FlatUnit) -> None:
        """A forward pass begins in which the unit's frozen parameters get no gradient."""
        self._idle.update((storage.unit.index, position) for position in storage.stopped)

    def skipped(self, storage: FlatUnit) -> set[int]:
        """Positions of parameters that have no gradient because they are, or were, frozen: they stay as they are."""
        index = storage.unit.index
        frozen = {(index, position) for position in storage.stopped}
        frozen.update(one for one in self._idle if one[0] == index)
        return {position for _, position in frozen - self._arrived}

    def complete_units(self) -> list[int]:
        """Units whose gradients have all arrived in this backward pass."""
        return [i for i, unit in self.units.items() if unit.phase in (Phase.COMPLETE, Phase.REDUCING)]

    def completed_order(self) -> list[int]:
        """The order in which units became complete on this rank, every trainable unit once."""
        first = dict.fromkeys(self._completed)
        return [*first, *(index for index in self.order if index not in first)]

    def adopt_order(self, order: Sequence[int]) -> None:
        self.order = list(order)
        self.recorded = True
        self._completed.clear()

    def shards(self) -> list[Tensor]:
        """This rank's piece of every unit's gradient, in line order."""
        return [unit.of(unit.storage.own) for unit in self.units.values()]

    def of(self, storage: FlatUnit, flat: Flat) -> Tensor:
        """The gradient of what the optimizer updates."""
        return self.units[storage.unit.index].of(flat.interval)

    def scaled(self) -> list[Tensor]:
        """Every tensor that a common factor must be applied to."""
        return [
            unit.of(Interval(0, unit.unit.numel) if unit.gather else unit.storage.own)
            for unit in self.units.values()
        ]

    def clear_padding(self) -> None:
        """After a factor that is not finite: zero times it is nan, and whole buckets keep their padding."""
        for unit in self.units.values():
            if unit.whole and unit.bucket is not None:
                for gap in unit.unit.gaps():
                    unit.bucket[gap.start : gap.stop].zero_()

    def _prepare(self, unit: UnitGradients) -> None:
        while not unit.prepare(self.pool):
            if self._reductions:
                self._finish_oldest()
            else:
                # Both buckets wait for a unit that comes earlier in the order: this one needs memory of its own.
                unit.prepare_own()

    def _complete(self, unit: UnitGradients) -> None:
        unit.phase = Phase.COMPLETE
        if not self.recorded:
            self._completed.append(unit.unit.index)
        self._issue()

    def _issue(self) -> None:
        stop = min(self._allowed, len(self.order))
        while self._next < stop and self.units[self.order[self._next]].phase is Phase.COMPLETE:
            self._issue_next()

    def _issue_next(self) -> None:
        unit = self.units[self.order[self._next]]
        self._prepare(unit)
        while len(self._reductions) >= self._most_in_flight:
            self._finish_oldest()
        self._reductions.append((unit, unit.reduce(self._collectives)))
        self._next += 1

    def _finish_oldest(self) -> None:
        unit, work = self._reductions.popleft()
        work.wait()
        unit.finish(self.pool)
        if unit.gather:
            assert unit.bucket is not None
            self._gathers.append(
                self._collectives.all_gather(unit.bucket, unit.unit.index, unit.storage.payload)
            )
