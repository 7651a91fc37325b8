"""The matrix products in an operation of torch, from the shapes of its arguments."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from zerokit.planning.work import Product


def products_of(name: str, args: tuple[Any, ...], made: list[Tensor]) -> list[Product]:
    """The products of one operation; none for elementwise operations, norms and similar ones.

    Attention counts as its fused kernels compute it: causal attention skips half of both products, and its backward
    makes the scores again before four products.

    Args:
        name: of the operation, without namespace and overload, such as "addmm".
        args: of the call.
        made: the tensors that it returned.
    """
    match name:
        case "mm" | "addmm":
            left, right = args[-2:] if name == "mm" else args[1:3]
            return [Product(left.shape[0], right.shape[1], left.shape[1])]
        case "bmm" | "baddbmm":
            left, right = args[-2:] if name == "bmm" else args[1:3]
            return [Product(left.shape[1], right.shape[2], left.shape[2], left.shape[0])]
        case "_grouped_mm":
            return [_grouped(*args[:2])]
        case "convolution" | "_convolution":
            return [_convolution(args[1], made[0], groups=args[8])]
        case "convolution_backward":
            forward = _convolution(args[2], args[0], groups=args[9])
            wanted = args[10][:2]
            by_gradient = [Product(forward.m, forward.k, forward.n, forward.count), _transposed(forward)]
            return [product for product, yes in zip(by_gradient, wanted, strict=True) if yes]
        case "mkldnn_rnn_layer":
            return [_recurrence(*args[:3])]
        case "mkldnn_rnn_layer_backward":
            forward = _recurrence(*args[:3])
            return [Product(forward.m, forward.k, forward.n), _transposed(forward)]
    if not name.startswith("_scaled_dot_product") or "attention" not in name:
        return []
    if name.endswith("_backward"):
        query, key, value = args[1:4]
        scores, mixed = _attention(query, key, value, causal=_is_causal(args))
        # Scores again; gradients of values, scores, queries and keys.
        return [scores, mixed, scores, mixed, scores]
    return _attention(*args[:3], causal=_is_causal(args))


def _is_causal(args: tuple[Any, ...]) -> bool:
    return any(value is True for value in args[3:])


def _attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> list[Product]:
    batch, heads, length, width = query.shape
    others = key.shape[2] // 2 if causal and length > 1 else key.shape[2]
    count = batch * heads
    return [Product(length, others, width, count), Product(length, value.shape[3], others, count)]


def _grouped(left: Tensor, right: Tensor) -> Product:
    """The products of experts as one: each has a share of the rows or, for weights' gradients, of the sums."""
    times = left.shape[0] if left.dim() == right.dim() == 3 else 1
    return Product(times * left.shape[-2], right.shape[-1], left.shape[-1])


def _convolution(weight: Tensor, output: Tensor, *, groups: int) -> Product:
    """A convolution as the product of unfolded inputs [pixels, inputs] by weights [inputs, outputs]."""
    pixels = output.shape[0] * math.prod(output.shape[2:])
    return Product(pixels, weight.shape[0] // groups, math.prod(weight.shape[1:]), groups)


def _recurrence(inputs: Tensor, weight: Tensor, recurrent: Tensor) -> Product:
    """All steps of an LSTM's layer [steps, batch, inputs] as one product; four gates are rows of both weights."""
    return Product(math.prod(inputs.shape[:2]), weight.shape[0], weight.shape[1] + recurrent.shape[1])


def _transposed(product: Product) -> Product:
    """The gradient of the weights, for the product of the outputs."""
    return Product(product.k, product.n, product.m, product.count)
