"""What `ZeroStrategy` cannot train with, and what to write instead."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from zerokit.errors import UsageError
from zerokit.integrations.torch_optimizer import JOINED
from zerokit.training import ZeroOptimizer


def only_optimizer(optimizers: list[Optimizer]) -> Optimizer:
    """The optimizer of a module that has one. Raises `UsageError`."""
    if len(optimizers) != 1:
        raise UsageError(
            f"configure_optimizers returned {len(optimizers)} optimizers, but a module takes one: return one "
            "with a parameter group for each part, which may have its own options, or join optimizers of several "
            f"classes: {JOINED}"
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


def refuse_conflicts(module: Any, trainer: Any) -> None:
    """Raise `UsageError` for a compiled module, and for callbacks that need whole or changing models."""
    if getattr(module, "_compiler_ctx", None) is not None:
        raise UsageError(
            "the whole module is compiled, and its training_step with it: compile the repeated blocks instead, for "
            "example `for block in self.blocks: block.compile()` in __init__, and pass the plain module to fit()"
        )
    for callback in trainer.callbacks:
        names = {cls.__name__ for cls in type(callback).__mro__}
        if names & {"StochasticWeightAveraging", "WeightAveraging"}:
            raise UsageError(
                f"{type(callback).__name__} keeps a second model on every rank: average shards instead, with a "
                "callback that makes zerokit.Ema(trainer.strategy.zero_optimizer, decay) in on_fit_start and calls its "
                "update() in on_train_batch_end"
            )
        if "BaseFinetuning" in names:
            raise UsageError(
                f"{type(callback).__name__} adds parameter groups while the module trains, but its layout is fixed: "
                "pass all parameters in configure_optimizers, and freeze and release them by requires_grad_() in "
                "on_train_epoch_start"
            )
