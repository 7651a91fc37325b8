"""One forward pass of this rank: which units it used and when, and so which of them backward is done with.

Autograd runs nodes in reverse order of creation: when an output of a unit receives its gradient, every node created
after that output has run. Units that this pass used only later than that are over, and so are those it never used.
"""

from __future__ import annotations

from collections.abc import Callable

from zerokit.runtime.order import BackwardPlan


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
