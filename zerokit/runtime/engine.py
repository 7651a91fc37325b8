"""Gathers, reduces and frees units as the model uses them, along the plans of `schedule`.

At stages 0 to 2 parameters stay whole. At stages 1 and 2 every rank gathers them right after the step, and waits for
each unit in the next forward, or when a parameter is read. At stage 3 units are gathered before use and freed after.

[Note: two rules for memory] What a plan gathers, it frees. What is used out of the plan is gathered as it comes, and
all ranks must do the same or time out: in forward it is freed when the next such unit comes or forward ends, and the
order is recorded again; in backward it stays until that ends. Plans free a unit when the pass comes to another one,
never at its last gradient, because a frozen weight is needed after that. Autograd runs nodes in reverse order of
creation: when the output of an earlier unit receives its gradient, all nodes of later units have run. Where no hook
shows it (outputs that are no tensors to us, torch.func, weights used by other modules) units are held until backward
ends, and where backward builds a graph of its own, until the next plain backward or `step()`.
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
from zerokit.runtime.passes import ForwardPass, Passes
from zerokit.runtime.recording import Recording
from zerokit.runtime.reductions import Reductions
from zerokit.runtime.unit import UnitState
from zerokit.runtime.use import State
from zerokit.schedule import Cursor, Kind, Operation, Order, Plan

_NOTHING = Plan()


class Engine:
    """Moves units along the plans of an order, `prefetch` stops ahead of the unit that computes."""

    def __init__(
        self, units: Sequence[UnitState], gradients: Gradients, collectives: Collectives, prefetch: int = 1
    ) -> None:
        self.units, self.gradients, self._collectives = units, gradients, collectives
        self._cuts = any(unit.comes_and_goes for unit in units)
        self.passes = Passes()
        whole = frozenset(unit.index for unit in units if self._cuts and not unit.comes_and_goes)
        line = [unit.unit for unit in units]
        self.recording = Recording(line, collectives, prefetch if self._cuts else None, whole)
        self.reductions = Reductions(gradients, self.passes)  # of this pass
        self._forward, self._backward = Cursor(_NOTHING), Cursor(_NOTHING)
        self._next = _NOTHING  # the plan that backward begins with
        self._deviated = False  # whether this forward pass has left its plan
        self._round: ForwardPass | None = None  # whose plan backward follows now
        self._present: set[int] = set()  # units that come and go and have memory now
        self.graph_kept = False
        """Whether backward makes a graph of its own, which reads weights again: all of them stay until `drop`."""
        self.is_open = 0  # how often, one context inside the other
        self.changes = Changes(units, collectives)
        self._heap = Heap(collectives.device, settles=not self._cuts)

    @property
    def order(self) -> Order:
        """The order in force."""
        return self.recording.order

    def gather_updated(self) -> None:
        """Start gathering updated parameters; inside `gathered()`, gather all of them."""
        for unit in map(self.units.__getitem__, self.order.units):
            if unit.unit.trainable and unit.placement.update:
                unit.gather_from_owners(unit.placement.update)
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
                self.enter([unit])
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
        self._forward, self._deviated = Cursor(self.order.forward), False
        self._next = self.order.backward_afresh
        # Where some come and go, uses of the others count, too: they are unguarded while their modules are at work.
        ready = self.is_open or not self._cuts
        for unit in self.units:
            unit.rest()
            if ready and (unit.in_flight is None or unit.index not in self.recording.lazy):
                unit.ready()
        if self._cuts and not self.is_open:
            for index in self.order.first:
                self._go_to(self.units[index])

    def enter(self, units: Sequence[UnitState]) -> None:
        """A module that uses `units` is about to run in forward."""
        stop = {unit.index for unit in units}
        if self._cuts and not self.is_open:  # the modules around this one need theirs after it
            stop.update(index for index in self._present if self.units[index].active)
        self.passes.current.come_to(tuple(sorted(stop)))
        for unit in units:
            self._go_to(unit)

    def enter_aside(self, unit: UnitState) -> None:
        """Prepare `unit` for a call of its module outside the model's forward."""
        if not self._stays(unit):
            self._free_idle({unit.index, *(self.order.last if self._next is self.order.backward else ())})
        self._use(unit)

    def _go_to(self, unit: UnitState) -> None:
        if self.is_open or not self._cuts:
            unit.ready()
            return
        use = self._forward.find(unit.index)
        if use is not None:
            self._come_to(self._forward, unit, use)
            return
        if unit.state is State.FREED:
            self._deviated = True
            self._free_idle({unit.index})
        self._use(unit)

    def leave(self, unit: UnitState) -> bool:
        """Note a return from a module of `unit`. True if it was the outermost one, and backward may need the unit."""
        if not unit.leave() or not self._cuts:
            return False
        unit.guard()  # reads of its weights from here on are noticed, though they may still be there
        return True

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

    @property
    def records(self) -> bool:
        """Whether the order is recorded at the end of this forward pass."""
        return self._deviated or not self.order.from_forward

    def end_forward(self, *, training: bool, lazy: Collection[int]) -> None:
        """End a use by all ranks, which may now change the parameters. A pass that `records` says which are `lazy`."""
        records = self.records
        if self._cuts and not self.is_open:
            self._perform(self._forward, self._forward.finish())
            stay = self.order.kept if records else self.order.kept.union(self.order.last)
            for index in sorted(self._present):
                unit = self.units[index]
                if not training or not (index in stay or unit.state is State.HELD):
                    self._free(unit)
        self._rest()
        if training:
            self._heap.note_forward()
        if records:
            self._next = self.recording.record_forward(self.passes.current, lazy)
        elif training:
            self._next = self.order.backward

    # ---- backward

    def begin_backward(self, *, accumulates: bool) -> None:
        """Start a backward pass; `accumulates` if it brings gradients."""
        self._round = None
        self._begin_pass(accumulates=accumulates)
        self._backward = Cursor(_NOTHING)
        for unit in self.units:
            if self._stays(unit):
                unit.unguard()
            elif unit.index in self._next.kept:
                self._use(unit)
        if self.is_open or not self._cuts:
            for index in self.order.backward.units(Kind.REDUCE):
                self.reductions.add(index)

    def enter_backward(
        self, units: Sequence[UnitState], current: ForwardPass | None = None, uses: int | None = None
    ) -> None:
        """The gradient of an output of `units` is there, which was made in `current` after so many `uses`.

        Without `current` a checkpoint is about to run their forward again.
        """
        if not self._cuts:
            return
        if current is not None:
            self.reductions.note_output(current, uses)
            if current not in (self.passes.aside, self._round) and not self.is_open:
                self._begin_round(current)
        for unit in units:
            use = None if self.is_open else self._backward.find(unit.index)
            if use is None:
                planned = unit.state is not State.FREED
                self._use(unit)
                if not planned:
                    unit.hold()
                continue
            self._come_to(self._backward, unit, use, leaves=current is not None)
            if current is not None and unit.index in self._backward.plan.ends:
                # What came after the units (logits) is free by now, or else all activations are, but they
                # leave holes too small for the large gradients of the rest of the model (embeddings).
                self._heap.return_freed_memory()

    def end_backward(self) -> None:
        """Issue the collectives that only other ranks needed, and wait for all sums."""
        self.reductions.note_last_gradient()
        if self._cuts and not self.is_open:
            if self._round is None and self.passes.latest is not None:
                self._begin_round(self.passes.latest)
            self._perform(self._backward, self._backward.finish(), ending=True)
        if self.reductions.end(self.order.backward.units(Kind.REDUCE)):
            self.recording.record_reductions(self.reductions.completed)
        self._backward = Cursor(_NOTHING)

    def free_all(self) -> None:
        """End the pass, complete or abandoned."""
        if self._present and not self.is_open and not self.graph_kept:
            self._next = self.order.backward_afresh
            for index in sorted(self._present):
                self._free(self.units[index])
        self._rest()
        self._forward = Cursor(self._forward.plan)

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
            self._perform(self._backward, self._backward.finish(), ending=True)
            self.reductions.clear()
        self._round = current
        self._backward, self._next = Cursor(self._next), self.order.backward_afresh

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
        finally:
            self.take_changes()
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

    # ---- along a plan

    def _begin_pass(self, *, accumulates: bool = False) -> None:
        self.reductions = Reductions(self.gradients, self.passes, accumulates=accumulates)
        for index in self._present:
            self.units[index].begin_pass()

    def _come_to(self, cursor: Cursor, unit: UnitState, use: int, *, leaves: bool = True) -> None:
        self._perform(cursor, cursor.come_to(use, leaves=leaves))
        self._use(unit)  # freed again, where forward itself has run a backward
        self._perform(cursor, cursor.go_ahead())

    def _perform(self, cursor: Cursor, operations: Iterable[Operation], *, ending: bool = False) -> None:
        for kind, index in operations:
            if kind is Kind.REDUCE:
                self.reductions.add(index)
                continue
            unit = self.units[index]
            if kind is Kind.FREE:
                if not (unit.active or unit.state is State.HELD or self._is_to_come(cursor, unit, ending)):
                    self._free(unit)
                continue
            if self.reductions.waiting:
                self.reductions.issue(due=True)
            # A gather is everybody's, also where this rank still has the unit (held, or its modules at work): others
            # may have freed it.
            if unit.state is State.FREED or not (index in cursor.plan.kept or self.graph_kept):
                self._present.add(index)  # before: what an exception leaves gathered is to be freed
                unit.gather()
        if self.reductions.waiting:
            self.reductions.issue(due=False)

    def _is_to_come(self, cursor: Cursor, unit: UnitState, ending: bool) -> bool:
        """Whether this rank will use a unit that others are done with."""
        if unit.state is not State.GATHERING or ending:
            return False
        if cursor is self._forward:
            return not self.order.from_forward  # the order is a guess
        return self._round is not None and unit.index in self._round.watched

    # ---- memory

    def _stays(self, unit: UnitState) -> bool:
        """Whether `unit` is whole now, and stays so, whatever uses it."""
        return not unit.comes_and_goes or self.is_open > 0

    def _use(self, unit: UnitState) -> None:
        """Gather `unit` for use, if it is not there."""
        if unit.comes_and_goes:
            self._present.add(unit.index)
        if unit.state is State.FREED:
            unit.gather()
        unit.ready()

    def _free_idle(self, stay: Collection[int]) -> None:
        """Free units that come and go, but not those that `stay`, are at work, are held or are on their way."""
        for index in self._present - self.order.kept - set(stay):
            unit = self.units[index]
            if not unit.active and unit.state is State.READY:
                self._free(unit)

    def _free(self, unit: UnitState) -> None:
        if not self.graph_kept:
            unit.free()
            self._present.discard(unit.index)
