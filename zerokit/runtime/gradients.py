"""Gradients on their way from autograd into flat buckets, over the ranks, and into shards.

    stage 0, 1   one whole bucket a unit, kept; the sum over ranks is in this rank's piece of it (and, at
                 stage 0, is gathered to all pieces)
    stage 2, 3   one shard a unit, kept; buckets are lent by a small pool while a unit's gradients arrive

A unit's gradients wait until all have arrived, and are moved into a bucket together. On hosts they are multiplied by
1/N meanwhile (the gradient of a unit of one unpadded parameter is the bucket), and N ranks' buckets are summed in rank
order. Where the host runs ahead of a device, the reduction divides. For a bf16 `wire` the bucket is rounded as it is
sent, and the pieces of all ranks are added in fp32.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zerokit.errors import ScheduleError, UsageError
from zerokit.formulas import Pool
from zerokit.layout import Layout
from zerokit.placement import AnyPlacement
from zerokit.runtime.buckets import BucketPool, Phase, UnitGradients
from zerokit.runtime.changes import checksums, differing, exchange
from zerokit.runtime.collectives import Collectives, Work
from zerokit.runtime.guard import drop_gradients, hooked
from zerokit.runtime.hooks import profiled
from zerokit.runtime.loss import Loss
from zerokit.runtime.precision import Precision
from zerokit.runtime.torch_internals import take_gradient, will_reach, without_torch_function
from zerokit.runtime.unit import UnitState
from zerokit.runtime.wires import Draws, make_wire

MOST_IN_FLIGHT = 3
"""Reductions at a time on hosts, where no pool limits them: each has memory for what arrives."""


class Gradients:
    """The gradients of all trainable units."""

    def __init__(
        self,
        units: Sequence[UnitState],
        collectives: Collectives,
        precision: Precision,
        layout: Layout,
        placement: AnyPlacement,
    ) -> None:
        self._collectives = collectives
        dtype, pool = precision.reduce, Pool.of(layout, placement)
        self.pool = BucketPool(pool.buckets, pool.numel, dtype, collectives.device)
        self.draws = Draws(collectives.rank)  # by which an int8 or int4 wire rounds
        self.units = {
            u.index: UnitGradients(u, dtype, make_wire(precision, self.draws, u.index), self.pool)
            for u in units
            if u.unit.trainable
        }
        mean = 1.0 / collectives.world
        self._fill_factor = 1.0 if collectives.runs_ahead else mean
        self._reduce_factor = mean if collectives.runs_ahead and not collectives.averages else 1.0
        self._most_in_flight = pool.most or (len(self.units) if collectives.runs_ahead else MOST_IN_FLIGHT)
        self.loss: Loss | None = None
        """What the gradients held now come from; None where no backward pass of this rank has brought any."""
        self.finite: Tensor | None = None
        """Whether the gradients held now are finite, 0-d: as a norm has shown, or before the user changed them."""
        self.accumulating = False  # gradients stay on this rank for now
        self.received = False  # a backward pass has brought some since the last `forget`
        self.mixed = False  # a failed backward pass has left sums of earlier ones mixed with its own
        self.shown = False  # whole gradients are shown to the user, who may change them
        self.transient = 0
        """The most bytes that buckets of units' own have had in flight at once since the last `forget`."""
        self._cleared: set[tuple[int, int]] = set()
        self._shared: set[tuple[int, int]] = set()
        """The parameters, by unit and position, of which this rank updates elements."""
        self.take_cut()
        self._nodes: dict[tuple[int, int], Any] = {}
        """Autograd's accumulating nodes of the parameters, each asked for once; on hosts only."""
        self._keeps_nodes = collectives.device.type == "cpu" and not collectives.runs_ahead
        self._reductions: deque[tuple[UnitGradients, Work]] = deque()

    def take_cut(self) -> None:
        """Note which part of the units is this rank's, as they are cut now."""
        self._shared.clear()
        self._shared.update(
            (index, position)
            for index, unit in self.units.items()
            for position, part in enumerate(unit.unit.slices)
            if part.memory.intersection(unit.state.updated).numel
        )

    # ---- as they come

    def reached(self) -> Iterator[int]:
        """The units in which the backward pass under way accumulates gradients."""
        for index, unit in sorted(self.units.items(), reverse=True):
            for position, parameter in enumerate(unit.state.parameters):
                if position in unit.state.stopped:
                    continue
                node = self._nodes.get((index, position))
                if node is None:
                    with without_torch_function():
                        node = torch.autograd.graph.get_gradient_edge(parameter).node
                    if self._keeps_nodes:
                        # On a device it accumulates on the stream of the forward that it was made in, for as long as
                        # anybody holds it: later passes on other streams would have to wait for that one.
                        self._nodes[index, position] = node
                try:
                    if will_reach(node):
                        yield index
                        break
                except RuntimeError:  # autograd.grad with respect to this parameter
                    return

    def note_loss(self, *, scaled: bool) -> None:
        """Start a pass that brings gradients: of which loss, whichever optimizer ran `backward`.

        Raises `UsageError` where it is to be `scaled` and is not, or where gradients held now are of a loss with
        another scale, or means where these are sums.
        """
        given = Loss.current or Loss()
        if scaled and given.scale is None:
            raise UsageError(
                "fp16 gradients underflow without loss scaling: call optimizer.backward(loss), not loss.backward()"
            )
        self.finite = None
        self.loss = given if self.loss is None else given.added_to(self.loss)

    def accept(self, index: int, position: int, parameter: nn.Parameter) -> bool:
        """Take `parameter.grad`, which has just become ready. Returns whether its unit can be reduced now."""
        if self.shown:
            raise UsageError("backward() inside gathered_gradients(): leave the context first")
        unit = self.units[index]
        if unit.state.guarded:
            unit.state.unguard()
        name = unit.unit.parameters[position].name
        if position in unit.received and hooked(parameter):
            raise UsageError(
                f"a hook of {name} (register_post_accumulate_grad_hook) would see this "
                "backward's gradient alone, and not the sum of those since zero_grad(): run one backward a step, or "
                "read whole sums inside `with optimizer.gathered_gradients():`"
            )
        gradient = take_gradient(parameter)
        if gradient is None:
            return False  # a hook of the user's has taken it, or the parameter was frozen after its forward
        if gradient.requires_grad:
            gradient = gradient.detach()  # backward(create_graph=True) gives it a graph
        if unit.phase >= Phase.COMPLETE and not self.accumulating:
            raise ScheduleError(
                f"a gradient for {name} came after its unit had been reduced in this backward pass. Reentrant "
                "activation checkpointing does that: use torch.utils.checkpoint with use_reentrant=False. So does a "
                "module that this rank uses at another place than rank 0 did first: name it in units="
            )
        if gradient.layout != torch.strided:
            raise ScheduleError(
                f"the gradient of {name} is {gradient.layout}, but buckets are dense: build it with sparse=False"
            )
        self.received = True
        self._cleared.clear()
        if position in unit.waiting:  # reentrant checkpointing brings one for each use
            self._fill(unit)
        unit.note(position, gradient)
        if self.accumulating and unit.phase is Phase.COMPLETE:
            self._fill(unit)
        return unit.phase is Phase.COMPLETE and not self.accumulating

    def _take_bucket(self, unit: UnitGradients) -> None:
        if unit.cut and self.accumulating:
            unit.take_own_bucket()
        if unit.cut and unit.unit.numel > self.pool.numel and unit.bucket is None:
            self._make_room()  # its memory is not the pool's, which would otherwise say when there is no more
        while not unit.take_bucket():
            if self._reductions:
                self._finish_oldest()
            else:
                # Both buckets wait for a unit that comes earlier in the order: this one needs memory of its own.
                unit.take_own_bucket()

    def _fill(self, unit: UnitGradients) -> None:
        if self.accumulating or not unit.adopt(self._fill_factor):
            self._take_bucket(unit)
            unit.fill(self._fill_factor)

    def _make_room(self) -> None:
        while len(self._reductions) >= self._most_in_flight:
            self._finish_oldest()

    def note_untrained(self) -> None:
        """Note, in a forward pass with gradients, the parameters that are frozen now."""
        for unit in self.units.values():
            unit.note_untrained()

    # ---- over ranks

    def reduce(self, index: int) -> None:
        """Start the reduction of a unit, with zeros for missing gradients."""
        unit = self.units[index]
        self._fill(unit)
        self._make_room()
        with profiled("reduce", unit.unit):
            self._reductions.append((unit, unit.reduce(self._reduce_factor)))
        if unit.cut and unit.unit.numel > self.pool.numel:
            buckets = [
                one.bucket for one, _ in self._reductions if one.cut and one.unit.numel > self.pool.numel
            ]
            self.transient = max(self.transient, sum(one.memory.nbytes for one in buckets if one is not None))

    def _finish_oldest(self) -> None:
        unit, work = self._reductions[0]
        with profiled("wait for the reduction of", unit.unit):
            work.wait()
        unit.finish()
        self._reductions.popleft()  # at the end: an exception leaves it to be waited for

    def end_backward(self) -> None:
        """Wait for all reductions of the pass; unreduced gradients go into their buckets."""
        if not self.accumulating:
            while self._reductions:
                self._finish_oldest()
            self._collectives.wait_for_readers()
        self.pool.release()
        for unit in self.units.values():
            if unit.waiting:
                self._fill(unit)
            unit.begin_pass()

    @property
    def unreduced(self) -> bool:
        """Whether some gradients are not summed over ranks: after `accumulate()`, or without a backward."""
        return any(unit.filled or not unit.summed for unit in self.units.values())

    @property
    def partial(self) -> bool:
        """Whether some gradients are this rank's alone so far."""
        return any(unit.filled or unit.waiting for unit in self.units.values())

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """A context in which gradients add up on this rank and are not reduced."""
        before = self.accumulating
        try:
            self.accumulating = True
            yield
        finally:
            self.accumulating = before

    @contextmanager
    def show(self, source: int | None) -> Iterator[None]:
        """A context in which every trainable `.grad` is whole and summed; this rank's part of changes is kept.

        They are those of rank `source`, if it is one, or made alike on all ranks: others raise `UsageError` on all, and
        none is kept. Nor is any after an exception.
        """
        if not self._collectives.any(self.received, "gathered_gradients()"):
            yield  # as in torch, there are no gradients to see
            return
        shown = [(unit, unit.show()) for unit in self.units.values()]
        self._collectives.wait_for_readers()
        self.shown = True
        try:
            yield
            mine = {unit.unit.index: checksums(unit.shown()) for unit, _ in shown}
            records = exchange(self._collectives, source, mine, "end of gathered_gradients()")
            apart = differing(records)
            if apart and source is None:
                raise UsageError(
                    "ranks left gathered_gradients() with different gradients in "
                    f"{', '.join(self.units[index].unit.name for index in apart[:4])}{' …' if len(apart) > 4 else ''}, "
                    "and no change was kept: change them alike on all ranks, or let one rank say, "
                    "`with optimizer.gathered_gradients(source=0):`"
                )
            for index in apart:
                there = [total is not None for total in records[source or 0][index]]
                self.units[index].show_those_of(source or 0, there)
            for unit, before in shown:
                unit.take_back(before)
        finally:
            self.shown = False
            for unit, _ in shown:
                drop_gradients(unit.state.parameters)

    def forget(self, *, mixed: bool = False) -> None:
        """Wait for collectives in flight and drop all gradients; `mixed` if the user must repeat the step."""
        in_flight = list(self._reductions)
        for _, work in in_flight:
            work.wait()
        self._reductions.clear()
        if in_flight or not self._collectives.runs_ahead:
            # On hosts the user may change parameters from here on, which other ranks still read. On a device whatever
            # changes them waits for their gather, which goes on behind the next forward.
            self._collectives.wait_for_readers()
        for unit in self.units.values():
            unit.forget()
        self.pool.reclaim()
        self.transient, self.received, self.mixed = 0, False, mixed
        self.loss = self.finite = None
        self._cleared.clear()

    def clear(self, index: int, position: int) -> None:
        """Clear the gradient of one parameter; what ranks issue must not depend on what one of them clears."""
        if index not in self.units or (index, position) in self._cleared:
            return
        self.units[index].clear(position)
        self.finite = None
        self._cleared.add((index, position))
        self.units[index].received.discard(position)
        if self._cleared >= self._shared:  # all that this rank updates
            self.received, self.loss = False, None

    @property
    def count(self) -> float | Tensor | None:
        """How many samples or tokens the losses are sums over; None where they are means."""
        return None if self.loss is None else self.loss.count

    def holds(self, index: int, position: int) -> bool:
        """Whether this rank knows of a gradient of this parameter."""
        known = index in self.units and (index, position) not in self._cleared
        return known and (self.received or self.partial)

    def shards(self) -> list[Tensor]:
        """This rank's piece of every unit's gradient, in line order."""
        return [unit.shard for unit in self.units.values()]

    def require_reduced(self, call: str, *, scaled: bool) -> None:
        """Raise `UsageError` where `call` would not find sums over ranks; `scaled` if this optimizer scales losses."""
        factor = 1.0 if self.loss is None else self.loss.factor
        if not scaled and self.received and factor != 1.0:
            raise UsageError(
                f"{call}: another optimizer's backward() has brought gradients of a loss scaled by {factor:g} "
                "for fp16: call zero_grad() before this optimizer's own backward(), or give both precision='fp16'"
            )
        if self.shown:
            raise UsageError(
                f"{call} inside gathered_gradients(): its changes take effect at its end, so leave the context first"
            )
        if self.accumulating:
            raise UsageError(
                f"{call} inside accumulate() would see the gradients of this rank alone: leave the context first"
            )

    def scale(self, factor: float | Tensor, finite: Tensor | None = None) -> None:
        """Multiply all gradients by `factor` (0-d), which is not read on a route that runs ahead.

        It takes in what is known of the loss: they are gradients of the plain mean then. `finite` is what is known of
        them.
        """
        self.loss, self.finite = Loss(), finite
        if not self._collectives.runs_ahead:
            factor = float(factor)
        if isinstance(factor, float) and factor == 1.0:
            return
        gradients = [unit.held.at(unit.state.updated) for unit in self.units.values()]
        if isinstance(factor, float):
            torch._foreach_mul_(gradients, factor)
            return
        # A tensor of another dtype would be multiplied one by one, and rounded to theirs: 1 / 65536 to 8 bits of fp16.
        wide = [gradient.float() for gradient in gradients]
        torch._foreach_mul_(wide, factor.float())
        if wide[0] is not gradients[0]:
            torch._foreach_copy_(gradients, wide)
