"""The order of collectives, as pure arithmetic, so that every rank computes the same, and where a pass is in it.

[Note: one order] Collectives match by the order in which ranks issue them, so that order must not depend on what one
rank happens to do. Forward gathers units in a recorded order, backward in its reverse, and reductions come at fixed
positions between the gathers of backward:

    forward    a    b    c    d                            d stays gathered for backward
    backward  (d)   c   R(d)  b   R(c)  a   R(b)  R(a)     the next gather is in flight before a unit's work begins

A rank that uses a unit first issues whatever precedes it: gathers of units that it leaves out, and reductions of
units it is done with, with zeros for gradients that never came. A rank that waits has thus issued all that precedes,
so the rank that is furthest behind can always go on, and no rank hangs.

[Note: what is over] Autograd runs nodes in reverse order of creation: when an output of a unit receives its gradient,
every node created after that output has run. Units that a forward pass used only later than that will receive no more
gradients, and neither will those that it never used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
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


class ForwardPass:
    """The uses of units in one forward pass, and the order that its backward follows."""

    def __init__(self, plan: BackwardPlan | None = None) -> None:
        self.plan = plan
        """None for a module of the model that was called without the model: its units are gathered as they come."""
        self.consumed = False
        """Whether a backward pass has brought gradients through it."""
        self._first: dict[int, int] = {}
        self.uses = 0
        """How often units have been used so far."""
        self.watched: set[int] = set()
        """Units with outputs whose gradients a hook will announce."""

    def use(self, unit: int) -> None:
        """A module of `unit` is about to run."""
        self.uses += 1
        self._first.setdefault(unit, self.uses)

    def used(self, unit: int) -> bool:
        """Whether a module of `unit` has run."""
        return unit in self._first

    def over(self, unit: int, uses: int | None) -> bool:
        """Whether the last gradient of `unit` has come once an output made after so many `uses` receives its own.

        With None only for a unit that was never used.
        """
        first = self._first.get(unit)
        return first is None or (uses is not None and uses < first)


class Passes:
    """The forward passes of this step, and which of them backward has come through."""

    def __init__(self) -> None:
        self.current = ForwardPass()
        self.aside = ForwardPass()
        """Modules called by themselves, outside any forward of the model."""
        self.unanswered = False
        """Whether a forward pass with gradients has no backward yet."""
        self.elsewhere: set[int] = set()
        """Units used where no hook shows when backward is done with them."""
        self._open: list[ForwardPass] = []
        """Passes with gradients since the last step that no backward has come through."""

    def begin(self, *, training: bool) -> None:
        """The model's forward begins."""
        self.current = ForwardPass()
        if training:
            self._open.append(self.current)
            self.unanswered = True

    def latest(self, *, planned: bool = False) -> ForwardPass | None:
        """The last one that no backward has come through; one that follows an order, if `planned`."""
        return next((one for one in reversed(self._open) if one.plan is not None or not planned), None)

    def end_backward(self) -> None:
        """A backward pass has brought all its gradients."""
        self.unanswered = False
        self._open = [one for one in self._open if not one.consumed]
        if not self._open:
            self.elsewhere.clear()

    def clear(self) -> None:
        """No backward is to come."""
        self._open.clear()
        self.elsewhere.clear()

    def when_over(
        self, current: ForwardPass, uses: int | None, *, accumulates: bool
    ) -> Callable[[int], bool]:
        """Which units will receive no more gradients in this pass, once an output made after `uses` has its own."""
        alone = accumulates and all(other is current or other.consumed for other in self._open)

        def over(unit: int) -> bool:
            return alone and unit not in self.elsewhere and current.over(unit, uses)

        return over
