"""The order of collectives, which is equal on every rank, and the position of a pass in it.

[Note: one order] Collectives match by the order in which ranks issue them, so that order must not depend on what one
rank happens to do. Forward gathers units in a recorded order, backward in its reverse, with reductions at fixed
positions in between:

    forward    a    b    c    d                            d stays gathered for backward
    backward  (d)   c   R(d)  b   R(c)  a   R(b)  R(a)     the next gather is in flight before a unit's work begins

A rank that uses a unit first issues whatever precedes it: gathers of units that it leaves out, and reductions of
units it is done with, with zeros for gradients that never came. So the rank that is furthest behind can always go on,
and no rank hangs. A reduction whose gradients may still come lets the gathers behind it pass: then all ranks must.

[Note: the end of a unit's gradients] Autograd runs nodes in reverse order of creation: when an output of a unit
receives its gradient, units that a forward pass used only later, or never, will receive no more gradients. Another
forward pass that is still open may bring them some in the same backward, but only where autograd's engine reaches them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from typing import TypeAlias

from zerokit.runtime.buckets import Phase
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.unit import UnitState

Operation: TypeAlias = int
"""The gather of a unit, written as its index; or its reduction, written as `reduction(index)`, which is below 0."""


def reduction(unit: int) -> Operation:
    """Convert a unit to its reduction, or a reduction to its unit."""
    return ~unit


class Schedule:
    """The operations in order, and a pass's position. A unit may be gathered several times.

    `cursor` is the position of the gather whose unit was entered last (-1 before); those below `issued` are issued.
    """

    def __init__(self, operations: Iterable[Operation] = ()) -> None:
        self.operations = tuple(operations)
        self.cursor = -1
        self.issued = 0

    def move_to(self, position: int) -> None:
        """Note that the unit gathered at `position` has been entered."""
        self.cursor = position

    def find(self, unit: int) -> int | None:
        """The first position, from the cursor on, of a gather of `unit`."""
        try:
            return self.operations.index(unit, max(self.cursor, 0))
        except ValueError:
            return None

    def issue(self, stop: int) -> Iterator[Operation]:
        """The unissued operations up to `stop` (exclusive), each marked as issued when taken."""
        while self.issued < stop:
            self.issued += 1
            yield self.operations[self.issued - 1]

    def issue_ahead(self, position: int, gathers: int) -> Iterator[Operation]:
        """The operations after `position`: at most so many gathers, none of a unit in use for an earlier position."""
        while self.issued < len(self.operations):
            operation = self.operations[self.issued]
            ahead = sum(each >= 0 for each in self.operations[position + 1 : self.issued])
            if operation >= 0 and (ahead >= gathers or self.needs(operation)):
                return
            self.issued += 1
            yield operation

    def needs(self, unit: int) -> bool:
        """Whether a gather of `unit` was issued for a position that the pass has not passed."""
        return unit in self.operations[max(self.cursor, 0) : self.issued]


class ForwardPass:
    """The uses of units in one forward pass."""

    def __init__(self) -> None:
        self.consumed = False  # whether a backward pass has brought gradients through it
        self.uses = 0  # how often units have been used so far
        self.first_use: dict[int, int] = {}  # which use of any unit was the first one of each
        self.trace: list[int] = []  # units in the order in which the pass has come to them
        self.read_early: set[int] = set()
        """Units whose weights were read outside the modules that announce it."""
        self.watched: set[int] = set()  # units with outputs whose gradients a hook will announce

    def consume(self, accumulates: bool) -> None:
        """Note a backward pass through it, which brings gradients or does not."""
        self.consumed |= accumulates

    def use(self, unit: int) -> None:
        self.uses += 1
        self.first_use.setdefault(unit, self.uses)


class Passes:
    """The forward passes of this step, and those that backward has completed."""

    def __init__(self) -> None:
        self.current = ForwardPass()
        self.aside = ForwardPass()
        """Modules called by themselves, outside any forward of the model: their units are gathered as they come."""
        self.unanswered = False  # whether a forward pass with gradients has no backward yet
        self.unwatched: set[int] = set()
        """Units used where no hook shows when backward is done with them."""
        self._open: list[ForwardPass] = []
        """Passes with gradients since the last step that no backward has come through."""
        self._reached: set[int] = set()
        """Units to which this backward brings gradients; known where several passes are open."""

    def begin(self, *, training: bool) -> None:
        self.current = ForwardPass()
        if training:
            self._open.append(self.current)
            self.unanswered = True

    @property
    def latest(self) -> ForwardPass | None:
        """The last pass of the model without a completed backward."""
        return self._open[-1] if self._open else None

    def begin_backward(self, reached: Iterable[int]) -> None:
        """Start a backward pass that brings gradients to the units `reached`, through one open forward or more."""
        self._reached = set(reached) if len(self._open) > 1 else set()

    def end_backward(self) -> None:
        self.unanswered = False
        self._open = [one for one in self._open if not one.consumed]
        if not self._open:
            self.unwatched.clear()

    def clear(self) -> None:
        self._open.clear()
        self.unwatched.clear()
        self.unanswered = False

    def are_gradients_over(self, unit: int, current: ForwardPass, uses: int | None) -> bool:
        """Whether `unit` receives no more gradients once an output made after `uses` uses (None: all) has its own."""
        others = any(not (one is current or one.consumed) for one in self._open)
        if unit in self.unwatched or (others and unit in self._reached):
            return False
        first = current.first_use.get(unit)
        return first is None or (uses is not None and uses < first)


class Order:
    """The order of all units: a guess from the layout, then what rank 0 did first.

    Units without `scopes` hold the rest, which the root module may use at any time.
    """

    def __init__(self, units: Sequence[UnitState], collectives: Collectives, prefetch: int) -> None:
        self._units, self._collectives = units, collectives
        self._gathers, self._prefetch = units[0].placement.cuts_parameters, prefetch
        self._trainable = frozenset(unit.index for unit in units if unit.unit.trainable)
        self.kept = frozenset(unit.index for unit in units if not unit.unit.scopes)
        """Units that stay gathered from their first use to the end of backward, whatever uses them."""
        self.lazy: frozenset[int] = frozenset()
        """Units whose weights are used only inside modules that announce it: needed when those are entered."""
        self.forward = sorted((unit.index for unit in units), key=lambda i: (bool(units[i].unit.scopes), i))
        self.recorded = False  # whether `forward` is what a forward pass of rank 0 did
        self.backward = self._plan()  # the operations of backward
        self.reductions_recorded = False

    @property
    def reductions(self) -> list[int]:
        """Units in the order in which their gradients are reduced."""
        return [reduction(operation) for operation in self.backward if operation < 0]

    @property
    def last(self) -> int | None:
        """The unit that backward begins with."""
        return self.backward[0] if self.backward and self.backward[0] >= 0 else None

    @property
    def first(self) -> int | None:
        """The unit that backward comes to last."""
        return next((operation for operation in reversed(self.backward) if operation >= 0), None)

    def record_forward(self, done: ForwardPass, lazy: Collection[int]) -> list[int]:
        """Adopt what rank 0 has `done` in a forward pass, and in the first one which of its units are `lazy`.

        Returns the units that some ranks alone have read early: all keep them from now on, and others have freed them.
        """
        mine = done.trace, done.read_early, frozenset(self.lazy if self.recorded else lazy)
        everyone = self._collectives.all_gather_objects(mine)
        trace, _, self.lazy = everyone[0]
        read = [early for _, early, _ in everyone]
        missing = sorted(
            index for index in set().union(*read) - self.kept if not all(index in early for early in read)
        )
        self.kept = self.kept.union(*read)
        self.forward = self._in_order(trace, self.kept, self.lazy)
        self.recorded = True
        if self._gathers:
            self.backward = self._plan()
        return missing

    def _in_order(self, trace: Sequence[int], kept: Set[int], lazy: Collection[int]) -> list[int]:
        """The order of a forward pass on this rank, every unit at least once.

        Kept units appear once; those that cannot be gathered lazily come first. A unit stays gathered between two uses
        with only kept ones in between. Units that this rank left out follow their neighbours on the line, where others
        meet them.
        """
        order = [u.index for u in self._units if not u.unit.scopes and u.index not in lazy]
        last = -1
        for index in trace:
            if index not in order or (index not in kept and last != index):
                order.append(index)
            if index not in kept:
                last = index
        for index in range(len(self._units)):
            if index not in order:
                before = max((at for at, other in enumerate(order) if other == index - 1), default=-1)
                order.insert(before + 1, index)
        return order

    def record_reductions(self, completed: Sequence[int], early: Set[int]) -> None:
        """After the first reductions: adopt the order in which rank 0's gradients became complete.

        Where gathers give the order, agree on what is a head: whose gradients were complete `early` on all ranks.
        """
        if not self._gathers:
            order = dict.fromkeys([*completed, *self.reductions])
            self.backward = tuple(map(reduction, self._collectives.all_gather_objects(list(order))[0]))
        elif self.last is not None:
            everyones = self._collectives.all_gather_objects(early & self.kept & self.lazy)
            self.backward = self._plan(frozenset.intersection(*map(frozenset, everyones)))
        self.reductions_recorded = True

    def _plan(self, early: Set[int] = frozenset()) -> tuple[Operation, ...]:
        """The operations of backward; every trainable unit is reduced once.

        A unit's reduction follows when the pass has left its last gather, behind the gathers that are ahead of it.
        Units of the rest come behind the first gather if they are `early`, else at the end.
        """
        if not self._gathers:
            return tuple(reduction(index) for index in reversed(self.forward) if index in self._trainable)
        gathers = [index for index in reversed(self.forward) if index not in self.kept]
        last = {unit: position for position, unit in enumerate(gathers)}
        behind: list[list[int]] = [[] for _ in range(len(gathers) + 1)]
        behind[min(1, len(gathers))] += sorted(early & self.kept & self._trainable, reverse=True)
        for unit in sorted(last.keys() & self._trainable, key=last.__getitem__):
            behind[min(last[unit] + 1 + self._prefetch, len(gathers))].append(unit)
        behind[-1] += sorted((self.kept - early) & self._trainable, reverse=True)
        operations = [reduction(unit) for unit in behind[0]]
        for unit, reduced in zip(gathers, behind[1:], strict=True):
            operations += [unit, *map(reduction, reduced)]
        return tuple(operations)


class Reductions:
    """Issues the reductions that a pass has come to, each when its gradients are complete or will not come."""

    def __init__(self, gradients: Gradients, passes: Passes, order: Order) -> None:
        self._gradients, self._passes, self._order = gradients, passes, order
        self.waiting: deque[int] = deque()
        """Units whose reduction the pass has come to, and which wait for gradients."""
        self._completed: list[int] = []
        """Units in the order in which their gradients became complete, until it is recorded."""
        self._early: list[int] | None = None
        """Units whose gradients were complete when backward entered the first one that is gathered."""
        self._made: tuple[ForwardPass, int | None] | None = None
        """What has just received its gradient: an output of this pass, made after so many uses of units."""
        self._accumulates = False
        self._ending = False  # whether the pass will bring no more gradients

    def begin(self, *, accumulates: bool) -> None:
        """Start a pass; `accumulates` if it brings gradients."""
        self._accumulates, self._ending = accumulates, False
        self._made = self._early = None
        self.waiting.clear()

    def remaining(self) -> Iterator[Operation]:
        """The operations of backward that are left for another forward pass."""
        self.waiting.clear()
        reduced = {
            reduction(index) for index, unit in self._gradients.units.items() if unit.phase >= Phase.REDUCING
        }
        return (operation for operation in self._order.backward if operation not in reduced)

    def note_output(self, current: ForwardPass, uses: int | None, *, gathered: bool) -> None:
        """Note the gradient of an output, made in `current` after so many `uses` by a `gathered` unit or a kept one."""
        if self._early is None and gathered:
            self._early = [
                index for index, unit in self._gradients.units.items() if unit.phase >= Phase.COMPLETE
            ]
        self._made = current, uses

    def note_complete(self, index: int) -> None:
        """Note that all gradients of a unit have arrived."""
        if not self._order.reductions_recorded:
            self._completed.append(index)
        self.issue(due=False)

    def note_last_gradient(self) -> None:
        """Note that the pass will bring no more gradients."""
        self._ending = True

    def issue(self, *, due: bool) -> None:
        """Issue reductions that the pass has come to, as far as their gradients are complete.

        What is `due` is reduced with zeros for gradients that will not come any more. Without this a rank on which
        a gradient is missing would hold back its reductions until the end of backward, while others wait for them
        before they issue the gather that this rank waits for.
        """
        while self.waiting and self._accumulates and not self._gradients.accumulating:
            index = self.waiting[0]
            if self._gradients.units[index].phase < Phase.COMPLETE and not (due and self._is_over(index)):
                return
            self._gradients.reduce(self.waiting.popleft())

    def _is_over(self, index: int) -> bool:
        """Whether the backward pass under way will bring no more gradients to a unit."""
        made = self._made
        return self._ending or (made is not None and self._passes.are_gradients_over(index, *made))

    def end(self) -> None:
        """Issue what is left, wait for all sums, and record the order after the first ones."""
        if not self._accumulates:
            return
        if not self._gradients.accumulating:
            for index in self._order.reductions:
                if self._gradients.units[index].phase < Phase.REDUCING:
                    self._gradients.reduce(index)
        self._gradients.end_backward()
        self.waiting.clear()  # a forward that has run this backward goes on
        if not self._order.reductions_recorded and not self._gradients.accumulating:
            latest = self._passes.latest
            unused = set() if latest is None else self._gradients.units.keys() - latest.first_use.keys()
            self._order.record_reductions(self._completed, unused.union(self._early or ()))
