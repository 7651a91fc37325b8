"""A CPU's trace of what CUDA runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from zerokit.runtime.hooks import in_backward


class AsOnCuda(TorchFunctionMode):
    """Operations that save other tensors on CUDA than on a CPU, replaced by what CUDA runs.

    CUDA's fused attention keeps a seed for its dropout, where a CPU falls back to whole matrices; its dropout keeps a
    mask of one byte an element; its RMSNorm is one kernel, which saves its input and one number a row.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs.pop("dropout_p", None)
        elif func is F.dropout:
            names = ("input", "p", "training", "inplace")
            given = {
                "p": 0.5,
                "training": True,
                "inplace": False,
                **dict(zip(names, args, strict=False)),
                **kwargs,
            }
            if not given["training"] or given["p"] == 0:
                return given["input"]
            return torch.native_dropout(given["input"], given["p"], True)[0]
        elif func is F.rms_norm and hasattr(torch.ops.aten, "_fused_rms_norm"):
            names = ("input", "normalized_shape", "weight", "eps")
            given = {"weight": None, "eps": None, **dict(zip(names, args, strict=False)), **kwargs}
            return torch.ops.aten._fused_rms_norm(
                given["input"], list(given["normalized_shape"]), given["weight"], given["eps"]
            )[0]
        return func(*args, **kwargs)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Replace them in forward, and in modules that backward runs again: autograd turns function modes off."""
    again: list[ExitStack] = []

    def before(module: nn.Module, args: Any) -> None:
        if in_backward():
            again.append(ExitStack())
            again[-1].enter_context(AsOnCuda())

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if in_backward():
            again.pop().close()

    entering = register_module_forward_pre_hook(before)
    leaving = register_module_forward_hook(after, always_call=True)
    try:
        with AsOnCuda():
            yield
    finally:
        entering.remove()
        leaving.remove()
