"""Stage 3: units are gathered before they are used and freed after, in one order; see schedule's [Note: one order].

[Note: freeing in backward] A unit is freed when the backward pass enters another one, or ends; never at its last
gradient, because a frozen weight is needed after that. It is safe because autograd runs nodes in reverse order of
creation: when the output of an earlier unit receives its gradient, all nodes of later units have run. Where no hook
shows it (outputs that are no tensors to us, torch.func, weights used by other modules) units stay until backward
ends, and where backward builds a graph of its own, all units do, until the next plain backward or `step()`.

[Note: leaving the order] A pass may use a unit again that it has freed, though the recorded pass did not (a loop with
more rounds). All ranks must then do the same: they agree on it before anything is sent, which costs a few
milliseconds, and the order is recorded again at the end of that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from zerokit.placement import Placement
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.gathering import Gathering, refuse_reading
from zerokit.runtime.schedule import BackwardPlan, ForwardPass, Order
from zerokit.runtime.storage import UnitState


class ShardedGathering(Gathering):
    """Gathers and frees units as the model walks through them.

    Args:
        units: all units in line order.
        collectives: what they are gathered by.
        reduce_due: called before each gather of backward with how many reductions come before it.
        allow: called after each gather of backward with how many reductions may be issued.
        prefetch: how many gathers are in flight ahead of the unit that computes.
    """

    def __init__(
        self,
        units: Sequence[UnitState],
        collectives: Collectives,
        placement: Placement,
        *,
        reduce_due: Callable[[int], None],
        allow: Callable[[int], None],
        prefetch: int = 1,
    ) -> None:
        super().__init__(units, collectives, placement)
        self._reduce_due, self._allow, self._prefetch = reduce_due, allow, prefetch
        self.early: tuple[int, ...] = ()
        """Trainable kept units whose gradients are complete before backward enters a unit: a head's."""
        self._forward = Order(self.forward_order)
        self._backward = Order(())
        self._round: ForwardPass | None = None
        self._out: set[int] = set()
        """Units that hold memory now, but for kept ones."""
        self._kept_now: set[int] = set()
        self._last_stays = False
        """Whether the unit that backward begins with is still there from forward."""
        self._entered: set[int] = set()
        self._pinned: set[int] = set()
        self._held = False
        self._deviated = False
        self.plan: BackwardPlan = self._make_plan()

    # ---- outside the model's forward

    def gather_updated(self) -> None:
        """Units are gathered when they are used. But inside `gathered()` all of them are shown."""
        super().gather_updated()
        if self._open:
            for unit in self._units:
                unit.gather()
                unit.complete()
            self._collectives.wait_for_readers()

    def make_current(self) -> None:
        """Let what is kept be current."""
        self._refresh()
        for unit in self._units:
            unit.complete()
        self._collectives.wait_for_readers()

    def read(self, index: int, name: str, *, in_forward: bool, in_backward: bool) -> None:
        unit = self._units[index]
        if self._open or (index in self._pinned and unit.resident):
            return
        if in_backward:
            self._use(unit)
        elif in_forward:
            self._read_early.add(index)
            self.enter(unit)
            unit.guard()  # what is done to its other parameters is to be noticed, too
        else:
            raise refuse_reading(name)
        self.pin(unit)

    def _gather_whole(self) -> None:
        for unit in self._units:
            self._use(unit)
            unit.guard()
        self._collectives.wait_for_readers()

    # ---- forward

    def begin_forward(self, current: ForwardPass) -> None:
        self._trace.clear()
        self._read_early.clear()
        self._active.clear()
        self._entered.clear()
        self._forward.restart()
        self._deviated = self._last_stays = False
        current.plan = self.plan
        if self._open:
            self._unguard_all()
            return
        for unit in self._units:
            if not unit.unit.scopes and unit.unit.index not in self.lazy:
                self._go_to(unit)

    def enter(self, unit: UnitState) -> None:
        self._note(unit.unit.index)
        self._go_to(unit)

    def _go_to(self, unit: UnitState) -> None:
        index = unit.unit.index
        if self._open:
            return
        position = self._forward.find(index)
        if position is None or self._deviated:
            self._enter_again(unit)
        else:
            if index not in self.kept:  # a unit before a kept one may be used again after it
                self._leave_out(self._forward, position, self._issue_forward)
                self._forward.cursor = position
                self._release(self._forward)
            self._issue_forward(position + 1)
            unit.ready()
            self._issue_forward(position + 1 + self._prefetch, ahead=True)
        self._entered.add(index)

    def _enter_again(self, unit: UnitState) -> None:
        index = unit.unit.index
        if not unit.resident and index not in self.kept and not self._deviated:
            names = ", ".join(unit.unit.scopes) or unit.unit.name
            self._collectives.agree(
                f"uses {names} again in one forward pass, which the recorded pass of rank 0 did not"
            )
            self._deviated = True
        if self._deviated:
            for other in self._out - {index}:
                if not self._active.get(other) and other not in self._pinned:
                    self._free(other)
        self._use(unit)

    def enter_aside(self, unit: UnitState) -> None:
        if self._open:
            self._unguard_all()
            return
        last = {self._last} if self._last_stays else set()
        for other in self._out - last - {unit.unit.index}:
            if not self._active.get(other) and other not in self._pinned:
                self._free(other)
        self._use(unit)

    def leave(self, unit: UnitState) -> bool:
        outermost = super().leave(unit)
        if outermost:
            unit.guard()  # reads of its weights from here on are noticed, though they may still be there
        return outermost

    def pin(self, unit: UnitState) -> None:
        self._pinned.add(unit.unit.index)

    def hold(self) -> None:
        self._held = True

    def drop(self) -> None:
        self._held = False
        if any(unit.resident for unit in self._units):
            self.free_all()

    def end_forward(self, *, training: bool) -> None:
        self._active.clear()
        if self._open:
            self._guard_all()
            return
        if not self._deviated:
            self._leave_out(self._forward, len(self._forward.units), self._issue_forward, ending=True)
        self._last_stays = training and self.recorded and not self._deviated
        for index in list(self._out):
            if not training or not (index in self._pinned or (index == self._last and self._last_stays)):
                self._free(index)
        if not training:
            self._pinned.clear()
            self._free_kept()
        self._collectives.wait_for_readers()
        if training:
            self._heap.note_forward()
        self._entered.clear()

    # ---- backward

    def begin_backward(self) -> None:
        self._round, self._backward = None, Order(())
        self._entered.clear()
        if self._open:
            self._unguard_all()
            self._allow(len(self._units))
            return
        for unit in self._units:
            if unit.unit.index in self.kept:
                self._use(unit)

    def enter_backward(
        self, units: Sequence[UnitState], current: ForwardPass | None, *, recomputing: bool = False
    ) -> None:
        if self._open:
            return
        if current is not None and current.plan is not None and current is not self._round:
            self._begin_round(current)
        for unit in units:
            index = unit.unit.index
            position = self._backward.find(index)
            if position is None:
                self._use(unit)
                self._entered.add(index)
                continue
            if not recomputing:
                self._leave_out(self._backward, position, self._issue_backward)
                self._backward.cursor = position
                self._release(self._backward, {other.unit.index for other in units})
            self._issue_backward(position + 1)
            unit.ready()
            self._issue_backward(position + 1 + self._prefetch, ahead=True)
            self._entered.add(index)
            if position in (0, len(self._backward.units) - 1) and not recomputing:
                # What came after the units (logits) is free by now, or else all activations are, but they
                # leave holes too small for the large gradients of the rest of the model (embeddings).
                self._heap.return_freed_memory()

    def end_backward(self, current: ForwardPass | None) -> None:
        if not self._open:
            if self._round is None and current is not None and current.plan is not None:
                self._begin_round(current)
            self._leave_out(self._backward, len(self._backward.units), self._issue_backward, ending=True)
        self._allow(len(self._units))

    def free_all(self) -> None:
        self._active.clear()
        if self._open:
            self._guard_all()
            return
        if not self._held:
            self._last_stays = False
            for unit in self._units:
                if unit.resident:
                    unit.free()
            for kept in (self._pinned, self._out, self._kept_now):
                kept.clear()
        self._collectives.wait_for_readers()
        self._entered.clear()
        self._forward.restart()

    def _begin_round(self, current: ForwardPass) -> None:
        """Backward goes on with another forward pass, or begins."""
        if self._round is not None:
            self._leave_out(self._backward, len(self._backward.units), self._issue_backward, ending=True)
        assert current.plan is not None
        self._round, self._backward = current, Order(current.plan.gathers)
        self._allow(current.plan.allowed(0))

    # ---- the order

    @property
    def deviated(self) -> bool:
        return self._deviated

    def adopt_order(self, order: Sequence[int], lazy: Collection[int], kept: Collection[int]) -> None:
        super().adopt_order(order, lazy, kept)
        for index in self.kept & self._out:
            self._out.discard(index)
            self._kept_now.add(index)
        self._forward = Order(self.forward_order)
        self.plan = self._make_plan()

    def adopt_early(self, early: Sequence[int]) -> None:
        """Reduce these kept units before the gathers of backward."""
        self.early = tuple(early)
        self.plan = self._make_plan()

    def _make_plan(self) -> BackwardPlan:
        gathers = [index for index in reversed(self.forward_order) if index not in self.kept]
        trainable = {unit.unit.index for unit in self._units if unit.unit.trainable}
        late = [index for index in sorted(self.kept & trainable, reverse=True) if index not in self.early]
        return BackwardPlan.of(
            gathers, early=self.early, trainable=trainable, late=late, ahead=self._prefetch
        )

    @property
    def _last(self) -> int | None:
        """The unit that backward begins with."""
        return self.plan.gathers[0] if self.plan.gathers else None

    # ---- memory

    def _issue_forward(self, stop: int, *, ahead: bool = False) -> None:
        for position in self._forward.issue(stop, ahead=ahead):
            unit = self._units[self._forward.units[position]]
            if unit.unit.index in self.kept:
                self._use(unit, wait=False)
            elif not (self._held and unit.resident):
                self._gather(unit)

    def _issue_backward(self, stop: int, *, ahead: bool = False) -> None:
        assert self._round is not None
        plan = self._round.plan
        assert plan is not None
        for position in self._backward.issue(stop, ahead=ahead):
            self._reduce_due(plan.due(position))
            unit = self._units[plan.gathers[position]]
            stays = position == 0 and self._last_stays and unit.unit.index == self._last
            if not stays and not (self._held and unit.resident):
                self._gather(unit)
            self._last_stays = False
            self._allow(plan.allowed(self._backward.issued))

    def _leave_out(
        self, order: Order, stop: int, issue: Callable[[int], None], *, ending: bool = False
    ) -> None:
        """Issue the positions up to `stop`, which this rank does not use, and hold one unit at a time."""
        while order.issued < stop:
            order.cursor = max(order.cursor, order.issued)
            self._release(order, ending=ending)
            issue(order.issued + 1)

    def _gather(self, unit: UnitState) -> None:
        # Also where this rank still has the unit (pinned, or its modules at work): others may have freed it, and a
        # gather is everybody's.
        unit.gather()
        self._out.add(unit.unit.index)

    def _use(self, unit: UnitState, *, wait: bool = True) -> None:
        """Gather `unit` for use, whatever the order."""
        index = unit.unit.index
        if not unit.resident:
            unit.gather()
        (self._kept_now if index in self.kept else self._out).add(index)
        if wait:
            unit.ready()

    def _release(self, order: Order, also: Collection[int] = (), *, ending: bool = False) -> None:
        """Free what the pass has left behind it, but not `also`; all of it, where the pass is `ending`."""
        for index in list(self._out):
            if index in also or index in self._pinned or self._active.get(index) or order.holds(index):
                continue
            if self._round is not None and order is self._backward:
                if index in self._round.watched and index not in self._entered and not ending:
                    continue  # this rank used it earlier than others did: its turn will come
            elif order is self._forward:
                if index == self._last and not order.comes_again(index):
                    continue  # backward begins with it
                if not self.recorded and index not in self._entered:
                    continue  # the order is a guess: it may come yet
            self._free(index)

    def _free(self, index: int) -> None:
        if not self._held:
            self._units[index].free()
            self._out.discard(index)
            self._entered.discard(index)

    def _free_kept(self) -> None:
        for index in list(self._kept_now):
            self._units[index].free()
        self._kept_now.clear()
