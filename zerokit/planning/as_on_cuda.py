"""A CPU's trace of what CUDA runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *more: Any,
    **options: Any,
) -> Any:
    composite = torch.ops.aten.scaled_dot_product_attention.default.decompose
    return composite(query, key, value, attn_mask, 0.0, *more, **options)


def _dropout(input: Tensor, p: float, train: bool) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if train and p else input


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    return torch.ops.aten._fused_rms_norm(input, normalized_shape, weight, eps)[0]


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Replace operations that save other tensors on CUDA than on a CPU by what CUDA runs.

    CUDA's fused attention keeps a seed for its dropout, where a CPU falls back to whole matrices; its dropout keeps a
    mask of one byte an element; its RMSNorm is one kernel, which saves its input and one number a row.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("scaled_dot_product_attention", _attention, "AutogradCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        if hasattr(torch.ops.aten, "_fused_rms_norm"):
            library.impl("rms_norm", _rms_norm, "AutogradCPU")
        yield
    finally:
        library._destroy()
