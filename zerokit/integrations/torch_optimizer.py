"""A torch optimizer that was built over a whole model, whose class, options and groups a `ZeroOptimizer` takes over."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from zerokit.checkpoint.frozen import Frozen
from zerokit.errors import UsageError
from zerokit.runtime.inner import parts_of
from zerokit.training import ZeroOptimizer

ZERO_OPTIONS = frozenset(
    {
        *("units", "bucket_mb", "prefetch", "mesh", "init_fn", "loss_scale", "on_nonfinite"),
        *("row_blocks", "update_cost", "states", "shares"),
    }
)
"""Arguments of `ZeroOptimizer` that are the same in every library."""

JOINED = (
    "zerokit.integrations.optimizer_list.OptimizerList([torch.optim.Muon(matrices), torch.optim.AdamW(rest)])"
)
"""What to write where several optimizers are to be one."""


def require_frozen(frozen: object) -> Frozen:
    """A library's `frozen`, for `zerokit.save`. Raises `UsageError`."""
    if frozen == "always" or frozen == "never":
        return frozen
    raise UsageError(
        f"frozen={frozen!r}: expected 'always' or 'never'. A checkpoint of this library is a directory of its own, "
        "which it moves and removes, so none can share frozen parameters with others ('once' is for zerokit.save())"
    )


@dataclass(frozen=True, slots=True)
class Part:
    """A class of optimizers, its options, and its groups of parameters."""

    optimizer_class: type[Optimizer]
    options: dict[str, Any]
    groups: list[dict[str, Any]]

    @classmethod
    def of(cls, optimizer: Optimizer) -> Part:
        """Take an optimizer of one class apart. Raises `UsageError`, see `Recipe.of`."""
        name = type(optimizer).__name__
        # Adagrad begins with states.
        if any(state and state.get("step", 1) for state in optimizer.state.values()):
            raise UsageError(
                f"this {name} has stepped already, and its state cannot be sharded: build a new one, and restore a "
                "training with zerokit.load()"
            )
        options = {}
        for key, parameter in list(inspect.signature(type(optimizer)).parameters.items())[1:]:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if key in optimizer.defaults:
                if not _same(optimizer.defaults[key], parameter.default):
                    options[key] = optimizer.defaults[key]
            elif parameter.default is parameter.empty:
                raise UsageError(
                    f"{name} cannot be built again: its argument {key!r} is not among its defaults. Build "
                    f"zerokit.ZeroOptimizer(model, {name}, {key}=...) yourself, in a loop of your own"
                )
            elif not _same(kept := getattr(optimizer, key, parameter.default), parameter.default):
                options[key] = kept  # as many classes keep `maximize`
        groups = [_own(group, optimizer.defaults) for group in optimizer.param_groups]
        return cls(type(optimizer), options, groups)


@dataclass(frozen=True, slots=True)
class Recipe:
    """What `ZeroOptimizer` needs to be built like an optimizer: its class, or each of an `OptimizerList`."""

    parts: list[Part]

    @classmethod
    def of(cls, optimizer: Optimizer) -> Recipe:
        """Take `optimizer` apart. Raises `UsageError` if it has stepped or cannot be built again from its defaults."""
        return cls([Part.of(part) for part in parts_of(optimizer)])

    def build(self, model: nn.Module, **zero_options: Any) -> ZeroOptimizer:
        """A `ZeroOptimizer` over `model`; its errors are those of `ZeroOptimizer`."""
        classes: dict[Any, Any] = {
            partial(part.optimizer_class, **part.options): part.groups for part in self.parts
        }
        return ZeroOptimizer(model, classes, **zero_options)


def hand_over(optimizer: Optimizer, zero: ZeroOptimizer) -> None:
    """Let schedulers that were built over `optimizer` drive `zero`: both have the same groups from now on.

    Stepping `optimizer` itself raises `UsageError`, since its parameters are sharded now.
    """

    def step(*args: object, **kwargs: object) -> NoReturn:
        raise UsageError("this optimizer was given to prepare(): step the one that prepare() has returned")

    def note_step(*args: object) -> None:
        optimizer.__dict__["_opt_called"] = True

    # Two marks that torch's schedulers look for, to warn of an optimizer that is never stepped.
    step.__dict__["_wrapped_by_lr_sched"] = True
    zero.register_step_post_hook(note_step)
    optimizer.__dict__["step"] = step
    optimizer.param_groups = zero.param_groups


def _own(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The group without what it has from the defaults, so that kernels can be chosen for all groups at once."""
    return {
        key: value
        for key, value in group.items()
        if key != "param_names" and not (key in defaults and _same(value, defaults[key]))
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return one is other
    return bool(one == other)
