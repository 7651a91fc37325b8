"""The forward passes of a step, and what backward will still bring through them.

[Note: the end of a unit's gradients] Autograd runs nodes in reverse order of creation: when an output of a unit
receives its gradient, units that a forward pass used only later, or never, will receive no more gradients. Another
forward pass that is still open may bring them some in the same backward, but only where autograd's engine reaches them.
The nodes of a graph that backward has made (`create_graph=True`) are numbered by the thread that backward ran in: on a
device not the one of forward, so that they may come behind all of forward's.
"""

from __future__ import annotations

from collections.abc import Iterable

from zerokit.schedule import Stop


class ForwardPass:
    """The uses of units in one forward pass."""

    def __init__(self) -> None:
        self.consumed = False  # whether a backward pass has brought gradients through it
        self.uses = 0  # how often units have been used so far
        self.first_use: dict[int, int] = {}  # which use of any unit was the first one of each
        self.trace: list[Stop] = []
        self.read_early: set[int] = set()
        """Units whose weights were read outside the modules that announce it."""
        self.watched: set[int] = set()  # units with outputs whose gradients a hook will announce

    def consume(self, accumulates: bool) -> None:
        """Note a backward pass through it, which brings gradients or does not."""
        self.consumed |= accumulates

    def use(self, unit: int) -> None:
        self.uses += 1
        self.first_use.setdefault(unit, self.uses)

    def come_to(self, stop: Stop) -> None:
        """Note a stop; a pass that is there already has come to no other one."""
        if self.trace[-1:] != [stop]:
            self.trace.append(stop)


class BackwardPass:
    """A backward pass under way.

    Attributes:
        accumulates: whether it brings gradients.
        amid: whether gradients of earlier passes were there when it began.
        reached: units to which it brings some, where several forward passes are open.
    """

    def __init__(self, reached: Iterable[int], *, accumulates: bool, amid: bool) -> None:
        self.reached, self.accumulates, self.amid = frozenset(reached), accumulates, amid
        self.makes_graph = False  # of its own

    def note_graph(self) -> None:
        self.makes_graph = True


class Passes:
    """The forward passes of this step, those that backward has completed, and the backward pass under way."""

    def __init__(self) -> None:
        self.current = ForwardPass()
        self.aside = ForwardPass()
        """Modules called by themselves, outside any forward of the model: their units are gathered as they come."""
        self.unanswered = False  # whether a forward pass with gradients has no backward yet
        self.unwatched: set[int] = set()
        """Units used where no hook shows when backward is done with them."""
        self._open: list[ForwardPass] = []
        """Passes with gradients since the last step that no backward has come through."""
        self.backward: BackwardPass | None = None  # has begun, and not ended or been abandoned

    def begin(self, *, training: bool) -> None:
        self.current = ForwardPass()
        if training:
            self._open.append(self.current)
            self.unanswered = True

    @property
    def latest(self) -> ForwardPass | None:
        """The last pass of the model without a completed backward."""
        return self._open[-1] if self._open else None

    def begin_backward(self, reached: Iterable[int], *, accumulates: bool, amid: bool) -> BackwardPass:
        """Begin a backward pass, and return it."""
        several = reached if len(self._open) > 1 else ()
        self.backward = BackwardPass(several, accumulates=accumulates, amid=amid)
        return self.backward

    def leave_backward(self) -> None:
        """Note that no backward pass is under way any more."""
        if self.backward is not None and self.backward.makes_graph:
            for each in self._open:
                self.unwatched.update(each.first_use)
        self.backward = None

    def end_backward(self) -> None:
        """Note that backward has completed what its gradients came through."""
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
        if unit in self.unwatched or (others and self.backward is not None and unit in self.backward.reached):
            return False
        first = current.first_use.get(unit)
        return first is None or (uses is not None and uses < first)
