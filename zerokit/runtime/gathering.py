"""Gathers, reduces and frees units as the model uses them, in the one order of `schedule`.

At stages 0 to 2 parameters stay whole. At stages 1 and 2 every rank gathers them right after the step, and waits for
each unit in the next forward, or when a parameter is read. At stage 3 units are gathered before use and freed after.

[Note: freeing in backward] A unit is freed when the backward pass enters another one, or ends; never at its last
gradient, because a frozen weight is needed after that. Autograd runs nodes in reverse order of creation: when the
output of an earlier unit receives its gradient, all nodes of later units have run. Where no hook shows it (outputs that
are no tensors to us, torch.func, weights used by other modules) units are held until backward ends, and where backward
builds a graph of its own, until the next plain backward or `step()`.

[Note: leaving the order] A pass may use a unit again that it has freed, though the recorded pass did not (a loop with
more rounds). All ranks must then do the same, or time out; the order is recorded again at the end of that pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from zerokit.errors import ScheduleError
from zerokit.runtime.changes import Changes
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.guard import refuse_reading
from zerokit.runtime.memory import Heap
from zerokit.runtime.schedule import ForwardPass, Operation, Order, Passes, Reductions, Schedule, reduction
from zerokit.runtime.unit import UnitState
from zerokit.runtime.use import State


class Gathering:
    """Issues gathers, `prefetch` of them ahead of the unit that computes, and tracks which units are in memory."""

    def __init__(
        self, units: Sequence[UnitState], gradients: Gradients, collectives: Collectives, prefetch: int = 1
    ) -> None:
        self.units, self.gradients, self._collectives = units, gradients, collectives
        self._placement, self._prefetch = units[0].placement, prefetch
        self.passes = Passes()
        self.order = Order(units, collectives, prefetch)
        self.deviated = False  # whether this forward pass left the recorded order
        self._forward, self._backward = Schedule(), Schedule()
        self.reductions = Reductions(gradients, self.passes, self.order)
        self._round: ForwardPass | None = None  # whose gathers backward follows now
        self._present: set[int] = set()  # units that come and go and have memory now
        self._last_stays = False  # whether the unit that backward begins with is still there from forward
        self.graph_kept = False
        """Whether backward makes a graph of its own, which reads weights again: all of them stay until `drop`."""
        self.is_open = 0  # how often, one context inside the other
        self.changes = Changes(units, collectives)
        self._heap = Heap(collectives.device, settles=not self._placement.cuts_parameters)

    def gather_updated(self) -> None:
        """Start gathering updated parameters; inside `gathered()`, gather all of them."""
        for index in dict.fromkeys(self.order.forward) if self._placement.update else ():
            if self.units[index].unit.trainable:
                self.units[index].gather_from_owners(self._placement.update)
        if self.is_open and self._present:
            for index in sorted(self._present):
                self.units[index].gather()
                self.units[index].complete()
            self._collectives.wait_for_readers()

    def finish_updates(self) -> None:
        """Finish updates in flight when the optimizer is deleted, maybe amid collectives of another."""
        self._collectives.wait_at_most(2.0)  # seconds: others read this rank's part as soon as they wait
        with suppress(ScheduleError):
            self.make_current()

    def make_current(self) -> None:
        """Bring this rank's kept parameters up to date, and let other ranks change theirs."""
        for unit in self.units:
            unit.complete()
        self._collectives.wait_for_readers()

    def read(self, index: int, name: str, *, in_forward: bool, in_backward: bool) -> None:
        """Prepare parameter `name` of unit `index` for a use outside the modules that announce it.

        Raises `UsageError` where this rank alone cannot have its value (stage 3, outside the model's forward).
        """
        unit = self.units[index]
        if not unit.comes_and_goes:
            unit.complete()
        elif not self.is_open and unit.state is not State.HELD:
            if in_backward:
                self._use(unit)
            elif in_forward:
                self.passes.current.read_early.add(index)
                self.enter(unit)
                unit.guard()  # what is done to its other parameters is to be noticed, too
            else:
                raise refuse_reading(name)
            self.hold(unit)
        if in_forward or in_backward:
            self.passes.unwatched.add(index)

    # ---- forward

    def begin_forward(self, *, training: bool) -> None:
        self.passes.begin(training=training)
        self._begin_pass()
        self._forward = Schedule(self.order.forward if self._placement.cuts_parameters else ())
        self.deviated = self._last_stays = False
        for unit in self.units:
            unit.rest()
            if self._stays(unit):
                if unit.in_flight is None or unit.index not in self.order.lazy:
                    unit.ready()
            elif not unit.unit.scopes and unit.index not in self.order.lazy:
                self._go_to(unit)

    def enter(self, unit: UnitState) -> None:
        """A module of `unit` is about to run in forward."""
        trace = self.passes.current.trace
        if trace[-1:] != [unit.index]:
            trace.append(unit.index)
        self._go_to(unit)

    def enter_aside(self, unit: UnitState) -> None:
        """Prepare `unit` for a call of its module outside the model's forward."""
        if not self._stays(unit):
            self._free_idle({unit.index, self.order.last if self._last_stays else None})
        self._use(unit)

    def at_work(self) -> list[UnitState]:
        """The units whose modules are at work."""
        if self._placement.cuts_parameters and not self.is_open:
            return [unit for index in self._present if (unit := self.units[index]).active]
        return [unit for unit in self.units if unit.active]

    def leave(self, unit: UnitState) -> bool:
        """Note a return from a module of `unit`. True if it was the outermost one, and backward may need the unit."""
        if not unit.leave() or not unit.comes_and_goes:
            return False
        unit.guard()  # reads of its weights from here on are noticed, though they may still be there
        return True

    def gather_kept(self, units: Iterable[int]) -> None:
        """Gather `units` that backward finds in memory, on every rank: a gather is everybody's."""
        for index in units:
            self.units[index].gather()
            self._use(self.units[index])

    def leave_aside(self) -> None:
        """Note the end of a call outside the model's forward, after which the model may be deleted."""
        self._collectives.wait_for_readers()

    def hold(self, unit: UnitState) -> None:
        """Keep `unit` gathered until backward ends, because no hook will show when it is read."""
        self.passes.unwatched.add(unit.index)
        if unit.comes_and_goes:
            unit.hold()

    def keep_graph(self) -> None:
        """Note that backward makes a graph of its own."""
        self.graph_kept = True

    def drop(self) -> None:
        """Free all that is present: no graph reads it again, or it is about to be updated."""
        self.graph_kept = False
        if self._present:
            self.free_all()

    def end_forward(self, *, training: bool) -> None:
        """End a use by all ranks, which may now change the parameters."""
        if self._placement.cuts_parameters and not self.is_open:
            if not self.deviated:
                self._leave_out(self._forward, len(self._forward.operations), ending=True)
            self._last_stays = training and self.order.recorded and not self.deviated
            for index in list(self._present):
                unit = self.units[index]
                stays = index in self.order.kept or unit.state is State.HELD
                if not training or not (stays or (self._last_stays and index == self.order.last)):
                    self._free(unit)
        self._rest()
        if training:
            self._heap.note_forward()

    # ---- backward

    def begin_backward(self, *, accumulates: bool) -> None:
        """Start a backward pass; `accumulates` if it brings gradients."""
        self._round = None
        self._begin_pass(accumulates=accumulates)
        self._backward = Schedule()
        for unit in self.units:
            if self._stays(unit):
                unit.unguard()
            elif unit.index in self.order.kept:
                self._use(unit)
        if self.is_open or not self._placement.cuts_parameters:
            self.reductions.waiting.extend(self.order.reductions)

    def enter_backward(
        self, units: Sequence[UnitState], current: ForwardPass | None = None, uses: int | None = None
    ) -> None:
        """The gradient of an output of `units` is there, which was made in `current` after so many `uses`.

        Without `current` a checkpoint is about to run their forward again.
        """
        if not self._placement.cuts_parameters:
            return
        if current is not None:
            gathered = any(unit.index not in self.order.kept for unit in units)
            self.reductions.note_output(current, uses, gathered=gathered)
            if current not in (self.passes.aside, self._round) and not self.is_open:
                self._begin_round(current)
        for unit in units:
            position = None if self._stays(unit) else self._backward.find(unit.index)
            if position is None:
                self._use(unit)
                continue
            also = {other.index for other in units}
            self._advance(self._backward, unit, position, moves=current is not None, also=also)
            if current is not None and unit.index in (self.order.last, self.order.first):
                # What came after the units (logits) is free by now, or else all activations are, but they
                # leave holes too small for the large gradients of the rest of the model (embeddings).
                self._heap.return_freed_memory()

    def end_backward(self) -> None:
        """Issue the collectives that only other ranks needed, and wait for all sums."""
        self.reductions.note_last_gradient()
        if self._placement.cuts_parameters and not self.is_open:
            if self._round is None and self.passes.latest is not None:
                self._begin_round(self.passes.latest)
            self._leave_out(self._backward, len(self._backward.operations), ending=True)
        self.reductions.end()
        self._backward = Schedule()

    def free_all(self) -> None:
        """End the pass, complete or abandoned."""
        if self._present and not self.is_open and not self.graph_kept:
            self._last_stays = False
            for index in sorted(self._present):
                self._free(self.units[index])
        self._rest()
        self._forward = Schedule(self._forward.operations)

    def _rest(self) -> None:
        """The model does not run: what stays whole is complete and guarded, and others have read this rank's pieces."""
        for unit in self.units:
            unit.rest()
            if self._stays(unit):
                unit.complete()
                unit.guard()
        self._collectives.wait_for_readers()

    def _begin_round(self, current: ForwardPass) -> None:
        """Backward goes on with another forward pass, or begins."""
        if self._round is not None:
            self._leave_out(self._backward, len(self._backward.operations), ending=True)
        self._round = current
        self._backward = Schedule(self.reductions.remaining())
        self._perform(self._backward.issue_ahead(-1, 0))  # without gathers, nothing is waited for

    # ---- whole parameters, for their user

    def open(self, source: int | None = None) -> None:
        """Gather every parameter and keep it gathered until `close`; with a `source` changes are that rank's."""
        self.take_changes()
        self.is_open += 1
        if self.is_open == 1:
            for unit in self.units:
                self._use(unit)
                unit.guard()
            self._collectives.wait_for_readers()
            self.changes.begin()
        if source is not None:
            self.changes.wait_for(source)

    def close(self, source: int | None = None, *, agree: bool = False) -> None:
        """Copy in-place changes to shards and masters, once all ranks `agree` on them.

        They do so at the end of the outermost context and of one with a `source`; inside, a rank may have its own.
        """
        try:
            if source is not None or self.is_open == 1:
                self.changes.agree() if agree else self.changes.end_alone()
            self.take_changes()
        finally:
            self.is_open -= 1
            self.free_all()

    @contextmanager
    def opened(self, source: int | None = None, *, agree: bool = False) -> Iterator[None]:
        self.open(source)
        try:
            yield
        except BaseException:  # which other ranks may not have met
            self.close(source)
            raise
        self.close(source, agree=agree)

    def take_changes(self) -> None:
        """Take over the user's in-place changes since the last pass, or since `gathered()` was entered."""
        if self.changes.source is not None:
            return
        if self.is_open:
            self.changes.note()
        for unit in self.units:
            # Units that come and go can be changed while they are shown, and nowhere else.
            if unit.state is not State.FREED and (self.is_open if unit.comes_and_goes else unit.separate):
                unit.complete()
                unit.take_changes()

    def _stays(self, unit: UnitState) -> bool:
        """Whether `unit` is whole now, and stays so, whatever uses it."""
        return not unit.comes_and_goes or self.is_open > 0

    # ---- issuing

    def _begin_pass(self, *, accumulates: bool = False) -> None:
        self.reductions.begin(accumulates=accumulates)
        for index in self._present:
            self.units[index].begin_pass()

    def _go_to(self, unit: UnitState) -> None:
        if self._stays(unit):
            unit.ready()
            return
        index = unit.index
        position = self._forward.find(index)
        if position is None or self.deviated:
            self.deviated |= unit.state is State.FREED and index not in self.order.kept
            if self.deviated:
                self._free_idle({index})
            self._use(unit)
        else:
            # A unit before a kept one may be used again after it.
            self._advance(self._forward, unit, position, moves=index not in self.order.kept)

    def _advance(
        self, schedule: Schedule, unit: UnitState, position: int, *, moves: bool, also: Collection[int] = ()
    ) -> None:
        """Issue all up to the gather of `unit` at `position`, and the next; where the pass `moves`, free others."""
        if moves:
            self._leave_out(schedule, position)
            schedule.move_to(position)
            self._release(schedule, also)
        self._perform(schedule.issue(position + 1))
        self._use(unit)  # freed again, where forward itself has run a backward
        self._perform(schedule.issue_ahead(position, self._prefetch))

    def _perform(self, operations: Iterable[Operation]) -> None:
        for operation in operations:
            self.reductions.issue(due=operation >= 0)
            if operation < 0:
                self.reductions.waiting.append(reduction(operation))
                continue
            unit = self.units[operation]
            # What backward begins with is there from forward, or this rank does not use it and has freed it.
            is_there = self._last_stays and operation == self.order.last
            # Else it is gathered also where this rank still has the unit (held, or its modules at work): others may
            # have freed it, and a gather is everybody's.
            stays = operation in self.order.kept or self.graph_kept
            if not is_there and (unit.state is State.FREED or not stays):
                self._present.add(operation)  # before: what an exception leaves gathered is to be freed
                unit.gather()
            self._last_stays = False
        self.reductions.issue(due=False)

    def _leave_out(self, schedule: Schedule, stop: int, *, ending: bool = False) -> None:
        """Issue the operations up to `stop`, which this rank does not use, and hold one unit at a time."""
        while schedule.issued < stop:
            schedule.move_to(max(schedule.cursor, schedule.issued))
            self._release(schedule, ending=ending)
            self._perform(schedule.issue(schedule.issued + 1))

    # ---- memory

    def _use(self, unit: UnitState) -> None:
        """Gather `unit` for use, whatever the order."""
        if unit.comes_and_goes:
            self._present.add(unit.index)
        if unit.state is State.FREED:
            unit.gather()
        unit.ready()

    def _release(self, schedule: Schedule, also: Collection[int] = (), *, ending: bool = False) -> None:
        """Free what the pass has left behind it, but not `also`; all of it, where the pass is `ending`."""
        for index in self._present - self.order.kept:
            unit = self.units[index]
            if unit.active or index in also or unit.state is State.HELD or schedule.needs(index):
                continue
            unused = unit.state is State.GATHERING
            if schedule is self._backward:
                if self._round is not None and index in self._round.watched and unused and not ending:
                    continue  # this rank used it earlier than others did: its turn will come
            elif index == self.order.last and index not in schedule.operations[schedule.cursor + 1 :]:
                continue  # backward begins with it
            elif unused and not self.order.recorded:
                continue  # the order is a guess, and it may come yet
            self._free(unit)

    def _free_idle(self, stay: Collection[int | None]) -> None:
        """Free units that come and go, but not those that `stay`, are at work or are held."""
        for index in self._present - self.order.kept - set(stay):
            if not self.units[index].active and self.units[index].state is not State.HELD:
                self._free(self.units[index])

    def _free(self, unit: UnitState) -> None:
        if not self.graph_kept:
            unit.free()
            self._present.discard(unit.index)
