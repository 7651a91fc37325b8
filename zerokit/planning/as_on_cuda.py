"""A CPU's trace of what CUDA runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_attention = F.scaled_dot_product_attention


def _attention_without_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    *more: Any,
    **options: Any,
) -> Tensor:
    return _attention(query, key, value, attn_mask, 0.0, *more, **options)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(input, p, True)[0] if training and p else input


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    made: tuple[Tensor, Tensor] = torch.ops.aten._fused_rms_norm(input, list(normalized_shape), weight, eps)
    return made[0]


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """Replace operations of `F` that save other tensors on CUDA than on a CPU by what CUDA runs.

    CUDA's fused attention keeps a seed for its dropout, where a CPU falls back to whole matrices; its dropout keeps a
    mask of one byte an element; its RMSNorm is one kernel, which saves its input and one number a row.

    In the module itself: autograd turns function modes off, and recomputes forwards in backward.
    """
    replaced: dict[str, Any] = {
        "scaled_dot_product_attention": _attention_without_dropout,
        "dropout": _dropout,
    }
    if hasattr(torch.ops.aten, "_fused_rms_norm"):
        replaced["rms_norm"] = _rms_norm
    kept = {name: vars(F)[name] for name in replaced}
    vars(F).update(replaced)
    try:
        yield
    finally:
        vars(F).update(kept)
