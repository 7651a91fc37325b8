"""Private names of PyTorch, each with what it is used for: where a version changes one, this is the place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

share_memory: Callable[[Tensor, Tensor], bool] = vars(torch._C)["_is_alias_of"]
"""Whether two tensors lie in one storage; no layout of either is refused."""


def point_at(parameter: nn.Parameter, data: Tensor) -> None:
    """Let `parameter` be a view of other memory, and stay the same object to autograd and to modules."""
    parameter.data = data


def change_class(parameter: nn.Parameter, to: type[nn.Parameter]) -> None:
    """Change a parameter's class and keep its identity."""
    parameter.__class__ = to


def take_gradient(parameter: nn.Parameter) -> Tensor | None:
    """`parameter.grad`, which is None afterwards."""
    gradient, parameter.grad = parameter.grad, None
    return gradient


def become(parameter: nn.Parameter, real: nn.Parameter) -> None:
    """Give `parameter` the tensor of `real`; attributes and hooks stay."""
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)
    # Hooks stay with the object, but autograd calls those of its new tensor: they are set again.
    parameter._backward_hooks = parameter._backward_hooks
    hooks: Any = parameter._post_accumulate_grad_hooks
    parameter._post_accumulate_grad_hooks = hooks
