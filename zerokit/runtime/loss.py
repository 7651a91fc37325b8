"""The loss that a backward pass differentiates: its scale, and how many samples or tokens it is a sum over."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from zerokit.errors import UsageError


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss times `scale` (None where nobody scales it), a sum over `count` samples or tokens (None for a mean)."""

    scale: float | None = None
    count: float | Tensor | None = None
    current: ClassVar[Loss | None] = None
    """What some optimizer's `backward` differentiates now; None for plain `loss.backward()`."""

    @property
    def factor(self) -> float:
        """What gradients are multiplied by."""
        return self.scale or 1.0

    def added_to(self, held: Loss) -> Loss:
        """The loss whose gradients are those of `held` and of this one.

        Raises `UsageError` where the one is scaled otherwise, or one is a sum and the other a mean.
        """
        if held.factor != self.factor:
            raise UsageError(
                f"this backward brings gradients of a loss scaled by {self.factor:g} to an optimizer that holds "
                f"others scaled by {held.factor:g}, which is 1 after step(), clip_grad_norm_() and "
                "gathered_gradients(): call its zero_grad() in between, or sum the losses of several optimizers and "
                "call backward() of one"
            )
        if self.count is None and held.count is None:
            return self
        if self.count is None or held.count is None:
            raise UsageError(
                "backward() with a count= and without one in a step, or before zero_grad(): the one adds up sums, the "
                "other means; give a count in all passes of a step, or in none"
            )
        return Loss(self.scale, held.count + self.count)


@contextmanager
def differentiating(loss: Loss) -> Iterator[None]:
    """A context in which backward passes, of whatever optimizers, differentiate this loss."""
    before = Loss.current
    Loss.current = loss
    try:
        yield
    finally:
        Loss.current = before
