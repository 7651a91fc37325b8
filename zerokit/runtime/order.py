"""The order of gathers and reductions that all ranks follow: a guess from the layout, then what rank 0 did first.

`Order` knows it; `Reductions` issues those of a backward pass in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence, Set

from zerokit.placement import Placement
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.schedule import ForwardPass, Operation, Passes, backward_order, reduction
from zerokit.runtime.unit import UnitState


class Order:
    """The order of all units; those without `scopes` hold the rest, which the root module may use at any time."""

    def __init__(
        self, units: Sequence[UnitState], collectives: Collectives, placement: Placement, prefetch: int
    ) -> None:
        self._units, self._collectives = units, collectives
        self._gathers, self._prefetch = placement.cuts_parameters, prefetch
        self._trainable = frozenset(unit.index for unit in units if unit.unit.trainable)
        self.kept = frozenset(unit.index for unit in units if not unit.unit.scopes)
        """Units that stay gathered from their first use to the end of backward, whatever uses them."""
        self.lazy: frozenset[int] = frozenset()
        """Units whose weights are used only inside modules that announce it: needed when those are entered."""
        self.forward = sorted((unit.index for unit in units), key=lambda i: (bool(units[i].unit.scopes), i))
        self.recorded = False
        """Whether `forward` is what a forward pass of rank 0 did."""
        self.backward = self._plan()
        """The operations of backward."""
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

    def record_forward(self, trace: Sequence[int], read_early: Set[int], lazy: Collection[int]) -> None:
        """Adopt rank 0's order after a forward pass: its `trace` of units, those that were read before, and `lazy`."""
        broadcast = self._collectives.broadcast_list
        self.forward = broadcast(self._in_order(trace, self.kept | read_early, lazy))
        self.lazy = frozenset(broadcast(sorted(lazy)))
        self.kept = frozenset(broadcast(sorted(self.kept | read_early)))
        self.recorded = True
        if self._gathers:
            self.backward = self._plan()

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
        self.reductions_recorded = True
        if not self._gathers:
            order = dict.fromkeys([*completed, *self.reductions])
            self.backward = tuple(map(reduction, self._collectives.broadcast_list(list(order))))
        elif self.last is not None:
            everyones = self._collectives.all_gather_objects(early & self.kept & self.lazy)
            self.backward = self._plan(frozenset.intersection(*map(frozenset, everyones)))

    def _plan(self, early: Set[int] = frozenset()) -> tuple[Operation, ...]:
        """The operations of backward; but for those that are `early`, units of the rest are reduced last."""
        if not self._gathers:
            # Where units of the rest are used is not known.
            scoped = {index: bool(self._units[index].unit.scopes) for index in self._trainable}
            return tuple(map(reduction, sorted(scoped, key=lambda i: (scoped[i], i), reverse=True)))
        gathers = [index for index in reversed(self.forward) if index not in self.kept]
        first, late = (
            sorted(each & self.kept & self._trainable, reverse=True) for each in (early, self.kept - early)
        )
        return backward_order(
            gathers, trainable=self._trainable, early=first, late=late, ahead=self._prefetch
        )


class Reductions:
    """Issues the reductions that a pass has come to, each when its gradients are complete or will not come."""

    def __init__(self, gradients: Gradients, passes: Passes, order: Order) -> None:
        self._gradients, self._passes, self._order = gradients, passes, order
        self._waiting: deque[int] = deque()
        """Units whose reduction the pass has come to, and which wait for gradients."""
        self._completed: list[int] = []
        """Units in the order in which their gradients became complete, until it is recorded."""
        self._early: list[int] | None = None
        """Units whose gradients were complete when backward entered the first one that is gathered."""
        self._made: tuple[ForwardPass, int | None] | None = None
        """What has just received its gradient: an output of this pass, made after so many uses of units."""
        self._accumulates = False
        self.ending = False
        """Whether the pass will bring no more gradients."""

    def begin(self, *, accumulates: bool) -> None:
        """Start a pass; `accumulates` if it brings gradients."""
        self._accumulates, self.ending = accumulates, False
        self._made = self._early = None
        self._waiting.clear()

    def remaining(self) -> Iterator[Operation]:
        """The operations of backward that are left for another forward pass."""
        self._waiting.clear()
        reduced = {reduction(index) for index, unit in self._gradients.units.items() if unit.reduced}
        return (operation for operation in self._order.backward if operation not in reduced)

    def note_output(self, current: ForwardPass, uses: int | None, *, gathered: bool) -> None:
        """Note the gradient of an output, made in `current` after so many `uses` by a `gathered` unit or a kept one."""
        if self._early is None and gathered:
            self._early = [index for index, unit in self._gradients.units.items() if unit.complete]
        self._made = current, uses

    def note_complete(self, index: int) -> None:
        """Note that all gradients of a unit have arrived."""
        if not self._order.reductions_recorded:
            self._completed.append(index)
        self.issue(due=False)

    def come_to(self, indices: Iterable[int]) -> None:
        """Let units be reduced when their gradients are there."""
        self._waiting.extend(indices)

    def issue(self, *, due: bool) -> None:
        """Issue reductions that the pass has come to, as far as their gradients are complete.

        What is `due` is reduced with zeros for gradients that will not come any more. Without this a rank on which
        a gradient is missing would hold back its reductions until the end of backward, while others wait for them
        before they issue the gather that this rank waits for.
        """
        while self._waiting and self._accumulates and not self._gradients.accumulating:
            index = self._waiting[0]
            if not self._gradients.units[index].complete and not (due and self._is_over(index)):
                return
            self._gradients.reduce(self._waiting.popleft())

    def _is_over(self, index: int) -> bool:
        """Whether the backward pass under way will bring no more gradients to a unit."""
        made = self._made
        return self.ending or (made is not None and self._passes.are_gradients_over(index, *made))

    def end(self, latest: ForwardPass | None) -> None:
        """Issue what is left, wait for all sums, and record the order after the first ones."""
        if not self._accumulates:
            return
        if not self._gradients.accumulating:
            for index in self._order.reductions:
                if not self._gradients.units[index].reduced:
                    self._gradients.reduce(index)
        self._gradients.end_backward()
        if not self._order.reductions_recorded and not self._gradients.accumulating:
            unused = set() if latest is None else self._gradients.units.keys() - latest.first_use.keys()
            self._order.record_reductions(self._completed, unused.union(self._early or ()))
