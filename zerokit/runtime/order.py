"""Fixed orders of collectives: pure arithmetic, so that every rank computes the same result.

[Note: one order] Collectives match by the order in which ranks issue them, so that order must not depend on what one
rank happens to do. Forward gathers units in a recorded order, backward in its reverse, and reductions come at fixed
positions between the gathers of backward:

    forward    a    b    c    d                            d stays gathered for backward
    backward  (d)   c   R(d)  b   R(c)  a   R(b)  R(a)     the next gather is in flight before a unit's work begins

A rank that uses a unit first issues whatever precedes it: gathers of units that it leaves out, and reductions of
units it is done with, with zeros for gradients that never came. A rank that waits has thus issued all that precedes,
so the rank that is furthest behind can always go on, and no rank hangs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property


class Order:
    """Units in the order in which a pass gathers them, how far the pass has come, and what it has issued.

    A unit may occur at several positions. `cursor` is the one entered last (-1 before the first); positions
    below `issued` have been issued, beyond the cursor as far as one prefetches or something needed them earlier.
    """

    def __init__(self, units: Sequence[int]) -> None:
        self.units = tuple(units)
        self.cursor = -1
        self.issued = 0

    def restart(self) -> None:
        self.cursor, self.issued = -1, 0

    def find(self, unit: int) -> int | None:
        """The first position of `unit` at the cursor or behind it."""
        for position in range(max(self.cursor, 0), len(self.units)):
            if self.units[position] == unit:
                return position
        return None

    def issue(self, stop: int, *, ahead: bool = False) -> Iterator[int]:
        """The positions up to `stop` (exclusive) that have not been issued, each marked as issued when it is taken.

        Those that are issued `ahead` of their need end before a unit that is still in use for an earlier position.
        """
        while self.issued < min(stop, len(self.units)):
            if ahead and self.units[self.issued] in self.units[max(self.cursor, 0) : self.issued]:
                return
            self.issued += 1
            yield self.issued - 1

    def holds(self, unit: int) -> bool:
        """Whether `unit` has been issued for a position that the pass has not left."""
        return unit in self.units[max(self.cursor, 0) : self.issued]

    def comes_again(self, unit: int) -> bool:
        """Whether `unit` occurs behind the cursor."""
        return unit in self.units[self.cursor + 1 :]


@dataclass(frozen=True)
class BackwardPlan:
    """The one order of gathers and reductions in backward.

    `gathers` are those of an `Order`; `reductions` lists every trainable unit once. The first `early` reductions
    come before all gathers but the first (a head's), those of `gathers` follow when the pass has left the unit's last
    position, behind the gathers that are `ahead` of it; the others come at the end.
    """

    gathers: tuple[int, ...]
    reductions: tuple[int, ...]
    early: int = 0
    ahead: int = 1

    @classmethod
    def of(
        cls,
        gathers: Sequence[int],
        *,
        early: Iterable[int],
        trainable: Collection[int],
        late: Iterable[int],
        ahead: int = 1,
    ) -> BackwardPlan:
        """The plan for these gathers; `early` and `late` are trainable units that are not among them."""
        last = {unit: position for position, unit in enumerate(gathers)}
        between = sorted((unit for unit in last if unit in trainable), key=last.__getitem__)
        head = tuple(early)
        return cls(tuple(gathers), (*head, *between, *late), len(head), ahead)

    @cached_property
    def _after(self) -> list[int]:
        """For each reduction, how many gathers are issued before it; ascending."""
        last = {unit: position for position, unit in enumerate(self.gathers)}
        most = len(self.gathers)
        heads = [min(1, most)] * self.early
        return heads + [
            min(last.get(unit, most) + 1 + self.ahead, most) for unit in self.reductions[self.early :]
        ]

    def due(self, position: int) -> int:
        """How many reductions are issued before the gather at `position`."""
        return bisect_right(self._after, position)

    def allowed(self, issued: int) -> int:
        """How many reductions may be issued when `issued` gathers have been."""
        return bisect_right(self._after, issued)
