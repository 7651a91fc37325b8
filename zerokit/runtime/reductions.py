"""The reductions of a backward pass, issued in the one order of `order`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from zerokit.runtime.gradients import Gradients
from zerokit.runtime.order import Order
from zerokit.runtime.schedule import ForwardPass, Operation, Passes, reduction


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
        self._accumulates = self._ending = False

    def begin(self, *, accumulates: bool) -> None:
        """Start a pass; `accumulates` if it brings gradients."""
        self._accumulates, self._ending = accumulates, False
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
        return self._ending or (made is not None and self._passes.are_gradients_over(index, *made))

    def expect_no_more(self) -> None:
        """Note that the pass will bring no more gradients."""
        self._ending = self._accumulates

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
