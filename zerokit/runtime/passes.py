"""One forward pass of this rank: which units it used and when, and so which of them backward is done with.

Autograd runs nodes in reverse order of creation: when an output of unit A receives its gradient, every node created
after A's last use has run. Units that this pass used only later than that are over, and so are those it never used.
"""

from __future__ import annotations

from collections.abc import Collection

from zerokit.runtime.order import BackwardPlan


class ForwardPass:
    """The uses of units in one forward pass, and the order that its backward follows."""

    def __init__(self, plan: BackwardPlan | None = None) -> None:
        self.plan = plan
        """None for a module of the model that was called without the model: its units are gathered as they come."""
        self.consumed = False
        """Whether a backward pass has brought gradients through it."""
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self._clock = 0
        self.watched: set[int] = set()
        """Units with outputs whose gradients a hook will announce."""

    def use(self, unit: int) -> None:
        """A module of `unit` is about to run."""
        self._clock += 1
        self._first.setdefault(unit, self._clock)
        self._last[unit] = self._clock

    def used(self, unit: int) -> bool:
        """Whether a module of `unit` has run."""
        return unit in self._first

    def over(self, unit: int, entered: Collection[int]) -> bool:
        """Whether the last gradient of `unit` has come once an output of one of `entered` receives its own."""
        if unit not in self._first:
            return True
        boundary = max((self._last.get(other, 0) for other in entered), default=0)
        return 0 < boundary < self._first[unit]
