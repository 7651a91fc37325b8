"""When units are gathered and freed: one order of all-gathers, the same on every rank.

[Note: one order] Collectives match by the order in which ranks issue them, so that order must not depend on what
one rank happens to do. Units are gathered in a fixed *forward order* and its reverse in backward. Entering a unit
first issues every earlier gather that is missing; the end of forward and of backward issues the rest. So a unit
that one rank leaves out is gathered there all the same, and no other rank hangs. In the first forward the order
is the rest of the model, then unit modules in layout order; rank 0 records what it really did, and broadcasts it.

[Note: freeing in backward] A unit is freed when the backward pass enters another one, or ends; never at its last
gradient, because a frozen weight is needed after that. It is safe because autograd runs nodes in reverse order of
creation: when the output of an earlier unit receives its gradient, all nodes of later units have run.

At stages 1 and 2 parameters stay whole, and are gathered once after every optimizer step: all are issued when the
next forward begins, in forward order, and waited for unit by unit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zerokit.runtime.collectives import Collectives
from zerokit.runtime.memory import keep_freed_memory, return_freed_memory
from zerokit.runtime.storage import FlatUnit

_SETTLING_PASSES = 3
"""The heap settles in the first passes; where parameters stay whole, later ones would only pay for fresh pages."""


class Gathering:
    """Gathers and frees units as the model walks through them.

    `units` are all units in line order; those without `scopes` hold the rest of the model's parameters, which the
    root module may use at any time, so they stay gathered from their first use to the end of the pass.
    """

    def __init__(self, units: Sequence[FlatUnit], collectives: Collectives, *, sharded: bool) -> None:
        self._units = units
        self._collectives = collectives
        self._sharded = sharded
        rest = [unit.unit.index for unit in units if not unit.unit.scopes]
        self.forward_order = rest + [unit.unit.index for unit in units if unit.unit.scopes]
        self._backward_order = self._reverse()
        self.recorded = False
        self.lazy: set[int] = set()
        """Units whose weights are used only inside modules that announce it: needed when those are entered."""
        self._trace: list[int] = []
        self._cursor = -1
        self._issued = 0
        self._backward_cursor = -1
        self._backward_issued = 0
        self._entered: set[int] = set()
        self._active: dict[int, int] = {}
        self._outdated = False
        self._passes = 0

    # ---- after the optimizer step, stages 1 and 2

    def outdate(self) -> None:
        """Trainable parameters have been updated by their owners only, until `refresh`.

        Gathering right away could meet a rank that has left after its last step.
        """
        self._outdated = not self._sharded

    def refresh(self) -> None:
        """Start gathering what `outdate` announced."""
        if self._outdated:
            self._outdated = False
            for index in dict.fromkeys(self.forward_order):
                if self._units[index].unit.trainable:
                    self._units[index].gather()

    def make_current(self) -> None:
        """Let the parameters that are whole at this stage hold their current values."""
        self.refresh()
        for unit in self._units:
            unit.ready()
        self.settle()

    def settle(self) -> None:
        """Return when shards may change, and this rank may leave: others have read what they gather of them."""
        self._collectives.settle()

    # ---- forward

    def begin_forward(self) -> None:
        self._cursor, self._issued = -1, 0
        self._entered.clear()
        self._active.clear()
        self.refresh()
        for unit in self._units:
            if unit.unit.index not in self.lazy and not (self._sharded and unit.unit.scopes):
                self.enter(unit, record=False)

    def enter(self, unit: FlatUnit, *, record: bool = True) -> None:
        """`unit` is about to be used in forward."""
        index = unit.unit.index
        within = self._active.get(index, 0) > 0  # a module inside one that has been entered already
        if record and not self.recorded and not within and self._trace[-1:] != [index]:
            self._trace.append(index)
        if not self._sharded:
            self.refresh()
            unit.ready()
            return
        if unit.unit.scopes:
            # The last one stays for backward on every rank, also on one that meets it earlier than rank 0 did.
            last = self._last
            again = last is not None and _find(self.forward_order, last, self._cursor + 1) is not None
            self._release_all_but({index} if again or last is None else {index, last})
        place = _find(self.forward_order, index, self._cursor)
        if place is not None:
            self._cursor = place
            self._issued = self._issue(self.forward_order, self._issued, place + 1)
        self._use(unit)
        if place is not None:
            self._issued = self._issue(self.forward_order, self._issued, place + 2)

    def activate(self, unit: FlatUnit) -> None:
        self._active[unit.unit.index] = self._active.get(unit.unit.index, 0) + 1

    def leave(self, unit: FlatUnit) -> bool:
        """A module of `unit` has returned. True when it was the outermost one at work."""
        index = unit.unit.index
        self._active[index] = self._active.get(index, 1) - 1
        return self._active[index] <= 0

    def end_forward(self, *, training: bool) -> None:
        """Issue what is missing, then free all units but those that backward begins with."""
        if self._sharded:
            self._issued = self._issue(self.forward_order, self._issued, len(self.forward_order))
            for unit in self._units:
                kept = training and (not unit.unit.scopes or unit.unit.index == self._last)
                if unit.resident and not kept:
                    unit.free()
            self.settle()
        else:
            self.make_current()
        if training:
            self._settle_heap()
        self._entered.clear()
        self._active.clear()

    # ---- backward

    def begin_backward(self) -> None:
        self._backward_cursor, self._backward_issued = -1, 0
        self._entered.clear()
        if not self._sharded:
            return
        for unit in self._units:
            if not unit.unit.scopes:
                self._use(unit)

    def enter_backward(self, units: Sequence[FlatUnit], *, recomputing: bool = False) -> None:
        """The gradient of an output of `units` is there, or a checkpoint is about to run their forward again."""
        if not self._sharded:
            return
        if not recomputing and any(unit.unit.scopes for unit in units):
            self._release_all_but({unit.unit.index for unit in units})
        order = self._backward_order
        for unit in units:
            if not unit.unit.scopes:
                self._use(unit)
                continue
            place = _find(order, unit.unit.index, self._backward_cursor)
            if place is not None:
                self._backward_cursor = place
                self._backward_issued = self._issue(order, self._backward_issued, place + 1)
            self._use(unit)
            if place is not None:
                self._backward_issued = self._issue(order, self._backward_issued, place + 2)
                if place in (0, len(order) - 1):
                    # What came after the units (logits) is free by now, or else all activations are, but they
                    # leave holes too small for the large gradients of the rest of the model (embeddings).
                    self._return_freed_memory()

    def end_backward(self) -> None:
        """Issue what this rank did not need but others may have, and free everything."""
        if not self._sharded:
            return
        order = self._backward_order
        self._backward_issued = self._issue(order, self._backward_issued, len(order))
        self.free_all()

    def free_all(self) -> None:
        if self._sharded:
            for unit in self._units:
                if unit.resident:
                    unit.free()
            self.settle()
        else:
            self.make_current()
        self._entered.clear()
        self._active.clear()
        self._cursor = self._backward_cursor = -1
        self._issued = self._backward_issued = 0

    # ---- the order

    def trace(self, lazy: Sequence[int]) -> list[int]:
        """The order of the first forward on this rank, every unit at least once.

        Units of the rest appear once; those that cannot be gathered lazily come first.
        """
        lead = [u.unit.index for u in self._units if not u.unit.scopes and u.unit.index not in lazy]
        order = list(lead)
        for index in self._trace:
            if index not in order or (self._units[index].unit.scopes and order[-1] != index):
                order.append(index)
        return order + [index for index in self.forward_order if index not in order]

    def adopt_order(self, order: Sequence[int], lazy: Sequence[int]) -> None:
        kept = self._last
        self.forward_order = list(order)
        self._backward_order = self._reverse()
        if self._sharded and kept is not None and kept != self._last and self._units[kept].resident:
            self._units[kept].free()
        self.lazy = set(lazy)
        self.recorded = True

    def _settle_heap(self) -> None:
        self._passes += 1
        if self._sharded or self._passes <= _SETTLING_PASSES:
            # Backward begins with the largest tensors, which no hole that forward has left can take.
            self._return_freed_memory()
        if self._passes == _SETTLING_PASSES and self._on_host:
            keep_freed_memory()

    def _return_freed_memory(self) -> None:
        if self._on_host:
            return_freed_memory()

    @property
    def _on_host(self) -> bool:
        return self._units[0].device.type == "cpu"

    @property
    def _last(self) -> int | None:
        """The unit that backward begins with."""
        return self._backward_order[0] if self._backward_order else None

    def _reverse(self) -> list[int]:
        return [index for index in reversed(self.forward_order) if self._units[index].unit.scopes]

    def _issue(self, order: Sequence[int], start: int, stop: int) -> int:
        for place in range(start, min(stop, len(order))):
            unit = self._units[order[place]]
            if not unit.resident:
                unit.gather()
        return max(start, min(stop, len(order)))

    def _use(self, unit: FlatUnit) -> None:
        if not unit.resident:
            unit.gather()
        unit.ready()
        self._entered.add(unit.unit.index)

    def _release_all_but(self, kept: Collection[int]) -> None:
        """Free the module units that have done their part."""
        for other in list(self._entered):
            unit = self._units[other]
            if other not in kept and unit.unit.scopes and not self._active.get(other):
                self._entered.discard(other)
                if unit.resident:
                    unit.free()


def _find(order: Sequence[int], index: int, cursor: int) -> int | None:
    """The place of `index` in `order` at or after `cursor`."""
    for place in range(max(cursor, 0), len(order)):
        if order[place] == index:
            return place
    return None
