"""The reductions of a backward pass, each issued when its gradients are complete or will not come."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Protocol

from zerokit.runtime.buckets import Phase
from zerokit.runtime.passes import ForwardPass, Passes


class Phased(Protocol):
    """One unit's gradients."""

    @property
    def phase(self) -> Phase:
        """What has become of them in this pass."""


class Reduced(Protocol):
    """The gradients of all units: the runtime's, or those of a plan."""

    @property
    def accumulating(self) -> bool:
        """Whether they stay on this rank for now."""

    @property
    def units(self) -> Mapping[int, Phased]:
        """Those of each unit."""

    def reduce(self, index: int) -> None:
        """Start the reduction of a unit."""

    def end_backward(self) -> None:
        """Wait for all reductions."""


class Reductions:
    """Issues the reductions that a pass has come to, in that order.

    A reduction whose gradients may still come lets the gathers behind it pass: then all ranks must.
    """

    def __init__(self, gradients: Reduced, passes: Passes, *, accumulates: bool = False) -> None:
        """Begin a pass, which `accumulates` if it brings gradients."""
        self._gradients, self._passes, self._accumulates = gradients, passes, accumulates
        self.waiting: deque[int] = deque()
        """Units whose reduction the pass has come to, and which wait for gradients."""
        self.completed: list[int] = []
        """Units in the order in which their gradients became complete in this pass."""
        self._is_over: Callable[[int], bool] = lambda unit: False
        """Whether the pass will bring no more gradients to a unit."""

    def clear(self) -> None:
        """Forget what the pass has come to: another forward pass comes to it again."""
        self.waiting.clear()

    def add(self, index: int) -> None:
        """Note that the pass has come to the reduction of a unit."""
        if self._gradients.units[index].phase < Phase.REDUCING:
            self.waiting.append(index)

    def note_output(self, current: ForwardPass, uses: int | None) -> None:
        """Note the gradient of an output, which was made in `current` after so many `uses`."""
        self._is_over = partial(self._passes.are_gradients_over, current=current, uses=uses)

    def note_complete(self, index: int) -> None:
        """Note that all gradients of a unit have arrived."""
        self.completed.append(index)
        self.issue(due=False)

    def note_last_gradient(self) -> None:
        """Note that the pass will bring no more gradients."""
        self._is_over = lambda unit: True

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

    def end(self, order: Iterable[int]) -> bool:
        """Issue what is left in this order, and wait for all sums. Returns whether there are any."""
        if not self._accumulates:
            return False
        summed = not self._gradients.accumulating
        if summed:
            for index in order:
                if self._gradients.units[index].phase < Phase.REDUCING:
                    self._gradients.reduce(index)
        self._gradients.end_backward()
        self.clear()  # a forward that has run this backward goes on
        return summed
