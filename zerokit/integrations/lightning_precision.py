"""Lightning's precision plugin over a `ZeroOptimizer`, and which of Lightning's packages is in use."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.errors import UsageError
from zerokit.runtime import Precision
from zerokit.runtime.counts import Count
from zerokit.training import ZeroOptimizer


@functools.cache
def lightning_package() -> str:
    """The package that the program uses: both may be installed, and their classes do not mix."""
    names = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch_lightning"}
    for module in names:
        if sys.modules.get(module) is not None:
            return module
    for module, package in names.items():
        if find_spec(package) is not None:
            return module
    raise ImportError("ZeroStrategy needs Lightning: pip install pytorch-lightning (or lightning)")


_Plugin: Any = import_module(f"{lightning_package()}.plugins.precision").Precision

PRECISIONS: Mapping[str, str | Precision] = {
    "32-true": "fp32",
    "bf16-mixed": "bf16",
    "16-mixed": "fp16",
    "bf16-true": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
}
"""What `Trainer(precision=…)` means here: mixed precision has masters in fp32 and computes in half."""


class ZeroPrecision(_Plugin):  # type: ignore[misc]
    """Lightning's precision hooks, answered by the `ZeroOptimizer`: it casts, scales and clips.

    `precision` is a flag of Lightning, such as "bf16-mixed".
    """

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision = precision
        self.optimizer: ZeroOptimizer | None = None

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Differentiate the loss, scaled in fp16, or a sum with its `count`.

        Where the module has a `backward` of its own, that one is called, but not in fp16 or with a count.
        """
        assert self.optimizer is not None
        own = type(model).backward.__module__ != f"{lightning_package()}.core.module"
        if own and self.optimizer.scaler is not None:
            raise UsageError(
                f"{type(model).__name__}.backward() would differentiate the loss without its fp16 scale: remove it, or "
                'train with precision="bf16-mixed"'
            )
        if own and "count" in kwargs:
            raise UsageError(
                f"{type(model).__name__}.backward() would differentiate a sum without its count: remove it, or return "
                "a mean"
            )
        if own or args or set(kwargs) - {"count", "retain_graph", "create_graph"}:
            model.backward(tensor, *args, **kwargs)
        else:
            self.optimizer.backward(tensor, **kwargs)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        """Scale gradients down to the global norm `clip_val`; `last_norm` is the norm before."""
        assert self.optimizer is not None
        self.optimizer.clip_grad_norm_(clip_val)

    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        """Clamp every element of the gradients to ±`clip_val`. Costs whole gradients."""
        assert self.optimizer is not None
        with self.optimizer.gathered_gradients():
            nn.utils.clip_grad_value_(self.optimizer.runtime.model.parameters(), clip_val)


def flag_of(plugin: Any, *, chosen: bool) -> str:
    """Lightning's flag for a precision plugin. Raises `UsageError` where it cannot be kept."""
    flag = str(getattr(plugin, "precision", ""))
    known = type(plugin).__name__ in ("Precision", "MixedPrecision", "HalfPrecision")
    if not known or flag not in PRECISIONS:
        raise UsageError(
            f"Trainer(precision={flag!r}, {type(plugin).__name__}) cannot be kept by zerokit: choose one of "
            f"{', '.join(map(repr, PRECISIONS))}, or ZeroStrategy(precision=zerokit.Precision(…))"
        )
    if chosen and flag != "32-true":
        raise UsageError(
            f"Trainer(precision={flag!r}) and ZeroStrategy(precision=…) both choose: leave one of them out"
        )
    return flag


def count_in(output: Any, key: str) -> Count:
    """The entry `key` of what a `training_step` has returned. Raises `UsageError` where there is none."""
    if isinstance(output, Mapping) and output.get(key) is not None:
        return cast(Count, output[key])
    found = (
        f"a dictionary of {', '.join(map(repr, output))}"
        if isinstance(output, Mapping)
        else str(type(output))
    )
    raise UsageError(
        f"ZeroStrategy(count_key={key!r}), but training_step returned {found}: return "
        f"{{'loss': a sum, {key!r}: of how many samples or tokens}}"
    )
