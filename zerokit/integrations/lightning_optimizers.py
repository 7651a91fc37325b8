"""The optimizer of a LightningModule, and its schedulers handed over to a `ZeroOptimizer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from zerokit.errors import UsageError
from zerokit.runtime import ZeroOptimizer


def only_optimizer(optimizers: list[Optimizer]) -> Optimizer:
    """The optimizer that `configure_optimizers` returned. Raises `UsageError` for none or several."""
    if len(optimizers) != 1:
        raise UsageError(
            f"configure_optimizers returned {len(optimizers)} optimizers, but a module takes one: return one "
            "with a parameter group for each part, which may have its own options"
        )
    (given,) = optimizers
    if type(given).__name__ == "_MockOptimizer":
        raise UsageError(
            "configure_optimizers returned None: return an optimizer, torch.optim.AdamW(self.parameters())"
        )
    if isinstance(given, ZeroOptimizer):
        raise UsageError(
            "configure_optimizers returned a ZeroOptimizer: return the torch optimizer, such as "
            "torch.optim.AdamW(self.parameters()), ZeroStrategy makes a ZeroOptimizer of it"
        )
    return given


def attach(scheduler: Any, given: Optimizer, zero: ZeroOptimizer) -> None:
    """Let a scheduler, and those it is made of, drive `zero` instead of `given`."""
    if getattr(scheduler, "optimizer", None) is given:
        scheduler.optimizer = zero
    for inner in getattr(scheduler, "_schedulers", ()):
        attach(inner, given, zero)


def note_steps(zero: ZeroOptimizer) -> None:
    """Schedulers warn unless the optimizer that they were made with notes its steps, as torch has it do."""
    step = zero.step

    def noted(closure: Callable[[], float] | None = None) -> float | None:
        zero.__dict__["_opt_called"] = True
        return step(closure)

    noted.__dict__["_wrapped_by_lr_sched"] = True
    zero.__dict__["step"] = noted
