"""Gradients: from autograd into flat buckets, over the ranks, into shards.

    stage 0, 1   one whole bucket a unit, kept; the sum over ranks is in this rank's piece of it (and, at
                 stage 0, is gathered to all pieces)
    stage 2, 3   one shard a unit, kept; buckets are lent by a small pool while a unit's gradients arrive

On hosts a gradient is multiplied by 1/N while it is copied into its bucket (that of a unit of one unpadded parameter,
made by autograd, is the bucket), and N ranks' buckets are then summed in rank order. Where the host runs ahead of a
device, each copy costs its launch: a unit's gradients wait until all have arrived, and are copied by one operation; the
reduction divides. With a bf16 `wire` the bucket, times 1/N by then, is rounded into memory of its own as it is sent,
and the rounded pieces of all ranks are added in fp32; stage 0 gathers the sums in fp32. Units are reduced in one order
on every rank. At stage 3 it is part of the order of gathers (see schedule's [Note: one order]); at the others it is
reversed line order in the first backward, in which rank 0 records the order in which its units became complete. A unit
that is incomplete at the end of backward is reduced with zeros for what is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerokit.errors import ScheduleError, UsageError
from zerokit.placement import Placement
from zerokit.runtime.buckets import BucketPool, Phase, UnitGradients
from zerokit.runtime.collectives import Collectives, Work
from zerokit.runtime.guard import hooked
from zerokit.runtime.hooks import profiled
from zerokit.runtime.storage import MasterSlice, UnitState

_MOST_IN_FLIGHT = 3
"""Reductions at a time on hosts, where no pool limits them: each has memory for what arrives."""


class Gradients:
    """All units' gradients and the one order in which they are reduced."""

    def __init__(
        self,
        storages: Sequence[UnitState],
        collectives: Collectives,
        dtype: torch.dtype,
        *,
        placement: Placement,
        fitting: Sequence[int],
        wire: torch.dtype | None = None,
    ) -> None:
        """Gradients are summed in `dtype`, and cross between ranks in `wire` where one is given."""
        self.units = {
            storage.unit.index: UnitGradients(storage, dtype, wire)
            for storage in storages
            if storage.unit.trainable
        }
        self._collectives = collectives
        mean = 1.0 / collectives.world
        self._fill_factor = 1.0 if collectives.runs_ahead else mean
        self._reduce_factor = mean if collectives.runs_ahead and not collectives.averages else 1.0
        count = placement.pooled_buckets
        self.pool = BucketPool(fitting if count else (), count, dtype, collectives.device)
        self._most_in_flight = count or (len(self.units) if collectives.runs_ahead else _MOST_IN_FLIGHT)
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
        """Whether a failed backward pass has left sums of earlier ones mixed with its own."""
        self.shown = False
        """Whether whole gradients are shown to the user, who may change them."""
        self._idle: set[tuple[int, int]] = set()
        """Parameters that were frozen in a forward pass since then."""
        self._cleared: set[tuple[int, int]] = set()
        self._nodes: dict[tuple[int, int], Any] = {}
        """Autograd's accumulating nodes of the parameters, each asked for once."""
        self._shared = {
            (index, position)
            for index, unit in self.units.items()
            for position, part in enumerate(unit.unit.slices)
            if part.memory.intersection(unit.storage.own).numel
        }
        self._completed: list[int] = []
        self._next = 0
        self.transient = 0
        """The most bytes that buckets of units' own have had in flight at once since the last `forget`."""
        self._reductions: deque[tuple[UnitGradients, Work]] = deque()
        self._gathers: list[Work] = []
        """Gathers of summed gradients in flight, at stage 0."""
        self.received = False
        """Whether a backward pass has brought any gradient since the last `forget`."""

    def will_arrive(self) -> bool:
        """Whether the backward pass under way accumulates a gradient in any parameter."""
        for index, unit in sorted(self.units.items(), reverse=True):
            for position, parameter in enumerate(unit.storage.parameters):
                if position in unit.storage.stopped:
                    continue
                node = self._nodes.get((index, position))
                if node is None:
                    with torch._C.DisableTorchFunctionSubclass():
                        node = torch.autograd.graph.get_gradient_edge(parameter).node
                    self._nodes[index, position] = node
                try:
                    if torch._C._will_engine_execute_node(node):
                        return True
                except RuntimeError:  # autograd.grad with respect to this parameter
                    return False
        return False

    def accept(self, index: int, position: int, parameter: nn.Parameter) -> None:
        """Take `parameter.grad`, which has just become ready, and reduce every unit that this completes."""
        if self.shown:
            raise UsageError("backward() inside gathered_gradients(): leave the context first")
        unit = self.units[index]
        if unit.storage.guarded:
            unit.storage.unguard()
        if position in unit.received and hooked(parameter):
            raise UsageError(
                f"a hook of {unit.unit.parameters[position].name} (register_post_accumulate_grad_hook) would see this "
                "backward's gradient alone, and not the sum of those since zero_grad(): run one backward a step, or "
                "look at whole sums inside `with optimizer.gathered_gradients():`"
            )
        unit.received.add(position)
        gradient, parameter.grad = parameter.grad, None
        if gradient is None:
            return  # a hook of the user's has taken it
        if gradient.requires_grad:
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
        if self.accumulating and unit.cut:
            unit.prepare_own()
        if unit.batches:
            unit.waiting[position] = gradient
            if self.accumulating and len(unit.waiting) == len(unit.storage.parameters):
                self._fill(unit)
        elif unit.may_steal(gradient) and not self.accumulating:
            unit.steal(gradient, self._fill_factor)
        else:
            self._prepare(unit)
            unit.fill(position, gradient, self._fill_factor)
        if self.accumulating:
            return
        unit.arrived.add(position)
        if len(unit.arrived) == len(unit.storage.parameters):
            self._complete(unit)

    def follow(self, order: Sequence[int]) -> None:
        """Reduce in this order in the backward pass that begins, as far as `allow` permits."""
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
            self._collectives.wait_for_readers()
        self._next = 0
        for unit in self.units.values():
            if unit.waiting:
                self._fill(unit)
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
        in_flight = bool(self._reductions or self._gathers)
        for _, work in self._reductions:
            work.wait()
        for gather in self._gathers:
            gather.wait()
        self._reductions.clear()
        self._gathers.clear()
        if in_flight or not self._collectives.runs_ahead:
            # On hosts the user may change parameters from here on, which other ranks still read. On a device whatever
            # changes them waits for their gather, which goes on behind the next forward.
            self._collectives.wait_for_readers()
        for unit in self.units.values():
            unit.forget(self.pool)
        self._next = self.transient = 0
        self.received = self.spoiled = False
        self._cleared.clear()
        self._idle.clear()

    def clear(self, index: int, position: int) -> None:
        """Forget the gradient of one parameter; there are none, once all that this rank has a share of are cleared.

        Nothing else changes: what ranks issue must not depend on what one of them clears.
        """
        self.units[index].clear(position)
        self._cleared.add((index, position))
        self.units[index].received.discard(position)
        if self._cleared >= self._shared:
            self.received = False

    def holds(self, index: int, position: int) -> bool:
        """Whether there is a gradient of this parameter, as far as this rank knows."""
        return self.received and index in self.units and (index, position) not in self._cleared

    def note_frozen(self, storage: UnitState) -> None:
        """A forward pass begins in which the unit's frozen parameters get no gradient."""
        self._idle.update((storage.unit.index, position) for position in storage.stopped)

    def skipped(self, storage: UnitState) -> set[int]:
        """Positions of parameters that have no gradient because they are, or were, frozen: they stay as they are."""
        if not storage.stopped and not self._idle:
            return set()
        index = storage.unit.index
        frozen = storage.stopped | {position for unit, position in self._idle if unit == index}
        return frozen - self.units[index].received if frozen else frozen

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

    def of(self, storage: UnitState, flat: MasterSlice) -> Tensor:
        """The gradient of what the optimizer updates."""
        return self.units[storage.unit.index].of(flat.interval)

    def scale(self, factor: float | Tensor) -> None:
        """Multiply all gradients by `factor`, which is 0-d and not looked at where the route runs ahead."""
        gradients = [unit.of(unit.updated) for unit in self.units.values()]
        if isinstance(factor, float) or not self._collectives.runs_ahead:
            factor = float(factor)
            if factor != 1.0:
                torch._foreach_mul_(gradients, factor)
            return
        # A tensor of another dtype would be multiplied one by one, and rounded to theirs: 1 / 65536 to 8 bits of fp16.
        wide = [gradient.float() for gradient in gradients]
        torch._foreach_mul_(wide, factor.float())
        if wide[0] is not gradients[0]:
            torch._foreach_copy_(gradients, wide)

    def clear_padding(self) -> None:
        """After a factor that is not finite: zero times it is nan, and whole buckets keep their padding."""
        for unit in self.units.values():
            if not unit.cut and unit.bucket is not None:
                for gap in unit.unit.gaps():
                    unit.bucket[gap.start : gap.stop].zero_()

    def _prepare(self, unit: UnitGradients) -> None:
        if unit.cut and unit.unit.numel > self.pool.numel and unit.bucket is None:
            # Its memory is not the pool's, which would otherwise say when there is no more.
            while len(self._reductions) >= self._most_in_flight:
                self._finish_oldest()
        while not unit.prepare(self.pool):
            if self._reductions:
                self._finish_oldest()
            else:
                # Both buckets wait for a unit that comes earlier in the order: this one needs memory of its own.
                unit.prepare_own()

    def _fill(self, unit: UnitGradients) -> None:
        self._prepare(unit)
        unit.fill_waiting(self._fill_factor)

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
        self._fill(unit)
        while len(self._reductions) >= self._most_in_flight:
            self._finish_oldest()
        with profiled("reduce", unit.unit):
            work = unit.reduce(self._collectives, self._reduce_factor)
            if self._chains(unit):
                self._gather(unit, after=work)
        self._reductions.append((unit, work))
        self._next += 1
        if unit.cut and unit.unit.numel > self.pool.numel:
            buckets = [one.bucket for one, _ in self._reductions if one.unit.numel > self.pool.numel]
            self.transient = max(self.transient, sum(one.nbytes for one in buckets if one is not None))

    def _finish_oldest(self) -> None:
        unit, work = self._reductions.popleft()
        chained = self._chains(unit)
        with profiled("wait for the reduction of", unit.unit):
            work.wait()
        unit.finish(self.pool)
        if unit.placement.sums and not chained:
            self._gather(unit)

    def _chains(self, unit: UnitGradients) -> bool:
        """Whether the sum of `unit` is gathered right behind its reduction, and nothing waits in between."""
        return bool(unit.placement.sums) and self._collectives.runs_ahead and unit.carry is None

    def _gather(self, unit: UnitGradients, after: Work | None = None) -> None:
        self._gathers.append(
            self._collectives.all_gather(unit.unit, unit.memory, axes=unit.placement.sums, after=after)
        )
