"""The order of collectives, as pure arithmetic that is equal on every rank, and the position of a pass in it.

[Note: one order] Collectives match by the order in which ranks issue them, so that order must not depend on what one
rank happens to do. Forward gathers units in a recorded order, backward in its reverse, with reductions at fixed
positions in between:

    forward    a    b    c    d                            d stays gathered for backward
    backward  (d)   c   R(d)  b   R(c)  a   R(b)  R(a)     the next gather is in flight before a unit's work begins

A rank that uses a unit first issues whatever precedes it: gathers of units that it leaves out, and reductions of
units it is done with, with zeros for gradients that never came. So the rank that is furthest behind can always go on,
and no rank hangs. A reduction whose gradients may still come lets the gathers behind it pass: then all ranks must.

[Note: the end of a unit's gradients] Autograd runs nodes in reverse order of creation: when an output of a unit
receives its gradient, units that a forward pass used only later, or never, will receive no more gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TypeAlias

Operation: TypeAlias = int
"""The gather of a unit, written as its index; or its reduction, written as `reduction(index)`, which is below 0."""


def reduction(unit: int) -> Operation:
    """Convert a unit to its reduction, or a reduction to its unit."""
    return ~unit


class Schedule:
    """The operations in order, and a pass's position. A unit may be gathered several times.

    `cursor` is the position of the gather whose unit was entered last (-1 before); those below `issued` have been
    issued.
    """

    def __init__(self, operations: Iterable[Operation] = ()) -> None:
        self.operations = tuple(operations)
        self.cursor = -1
        self.issued = 0

    def find(self, unit: int) -> int | None:
        """The first position, from the cursor on, of a gather of `unit`."""
        start = max(self.cursor, 0)
        return self.operations.index(unit, start) if unit in self.operations[start:] else None

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

    def comes_again(self, unit: int) -> bool:
        """Whether `unit` is gathered again after the cursor."""
        return unit in self.operations[self.cursor + 1 :]


def backward_order(
    gathers: Sequence[int],
    *,
    trainable: Collection[int],
    early: Iterable[int] = (),
    late: Iterable[int],
    ahead: int,
) -> tuple[Operation, ...]:
    """The one order of gathers and reductions in backward; every trainable unit is reduced once.

    A unit's reduction follows when the pass has left its last gather, behind the gathers that are `ahead` of it.
    Trainable units without gathers come behind the first gather if they are `early` (a head), else at the end.
    """
    last = {unit: position for position, unit in enumerate(gathers)}
    behind: list[list[int]] = [[] for _ in range(len(gathers) + 1)]
    behind[min(1, len(gathers))] += early
    for unit in sorted(last.keys() & trainable, key=last.__getitem__):
        behind[min(last[unit] + 1 + ahead, len(gathers))].append(unit)
    behind[-1] += late
    operations = [reduction(unit) for unit in behind[0]]
    for unit, reduced in zip(gathers, behind[1:], strict=True):
        operations += [unit, *map(reduction, reduced)]
    return tuple(operations)


class ForwardPass:
    """The uses of units in one forward pass."""

    def __init__(self) -> None:
        self.consumed = False
        """Whether a backward pass has brought gradients through it."""
        self.uses = 0
        """How often units have been used so far."""
        self.first_use: dict[int, int] = {}
        """Which use of any unit was the first one of each."""
        self.watched: set[int] = set()
        """Units with outputs whose gradients a hook will announce."""

    def use(self, unit: int) -> None:
        self.uses += 1
        self.first_use.setdefault(unit, self.uses)


class Passes:
    """The forward passes of this step, and those that backward has completed."""

    def __init__(self) -> None:
        self.current = ForwardPass()
        self.aside = ForwardPass()
        """Modules called by themselves, outside any forward of the model: their units are gathered as they come."""
        self.unanswered = False
        """Whether a forward pass with gradients has no backward yet."""
        self.unwatched: set[int] = set()
        """Units used where no hook shows when backward is done with them."""
        self._open: list[ForwardPass] = []
        """Passes with gradients since the last step that no backward has come through."""

    def begin(self, *, training: bool) -> None:
        self.current = ForwardPass()
        if training:
            self._open.append(self.current)
            self.unanswered = True

    @property
    def latest(self) -> ForwardPass | None:
        """The last pass of the model without a completed backward."""
        return self._open[-1] if self._open else None

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
        """Whether `unit` receives no more gradients once an output made after `uses` uses has received its own.

        With None only if it was never used.
        """
        if unit in self.unwatched or any(not (one is current or one.consumed) for one in self._open):
            return False
        first = current.first_use.get(unit)
        return first is None or (uses is not None and uses < first)
