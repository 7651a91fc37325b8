"""The order of all units: that of the line, until ranks have agreed on what rank 0 did first."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zerokit.layout import Unit
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.passes import ForwardPass
from zerokit.schedule import Order, Plan


class Recording:
    """The `order` in force. Units without `scopes` hold the rest, which the root module may use at any time."""

    def __init__(
        self, units: Sequence[Unit], collectives: Collectives, prefetch: int | None, whole: frozenset[int]
    ) -> None:
        self._collectives = collectives
        self._rest = frozenset(unit.index for unit in units if not unit.scopes)
        self.order = Order.of_line(units, prefetch, whole)

    @property
    def lazy(self) -> frozenset[int]:
        """Units of the rest whose weights are used only inside modules that announce it, and gathered there."""
        return self._rest.difference(self.order.first)

    def record_forward(self, done: ForwardPass, lazy: Collection[int]) -> Plan:
        """Adopt what rank 0 has `done` in a forward pass, and in the first one which of its units are `lazy`.

        Collective. Returns the plan of the backward pass that follows: units that some ranks alone have read early are
        kept from the next pass on, and are not there on the other ranks now.
        """
        mine = done.trace, done.read_early, frozenset(self.lazy if self.order.from_forward else lazy)
        everyone = self._collectives.all_gather_objects(mine, "end of forward")
        trace, _, lazy = everyone[0]
        early = [read for _, read, _ in everyone]
        kept, first = self.order.kept, sorted(self._rest.difference(lazy))
        there = self.order.recorded(trace, kept.union(set.intersection(*early)), first)
        self.order = self.order.recorded(trace, kept.union(*early), first)
        return there.backward_afresh

    def record_reductions(self, completed: Sequence[int]) -> None:
        """Where nothing is gathered, adopt the order in which rank 0's first gradients became complete. Collective."""
        if self.order.prefetch is None and not self.order.from_backward:
            mine = list(dict.fromkeys([*completed, *self.order.reduced]))
            self.order = self.order.reducing(self._collectives.all_gather_objects(mine, "end of backward")[0])
