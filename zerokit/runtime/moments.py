"""The moments among an optimizer's states, by their names: what may be kept in eight bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SQUARES = frozenset(
    ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "exp_inf", "exp_avg_var", "max_exp_avg_var")
)
"""Names of second moments: running means or maxima of squares or magnitudes."""
MOMENTS = SQUARES | {"exp_avg", "exp_avg_diff", "momentum_buffer", "grad_avg"}
"""Names of moments: averages over the last hundred or thousand gradients.

None are weights and their averages, nor sums over the whole training, such as Adagrad's, to which a step adds less than
eight bits can tell.
"""


def moments_of(state: Mapping[str, Any], shape: Sequence[int]) -> list[tuple[str, Tensor]]:
    """The moments of a tensor of this shape among its states, in float32."""
    return [
        (kind, value)
        for kind, value in state.items()
        if kind in MOMENTS and isinstance(value, Tensor) and value.shape == shape
        if value.dtype == torch.float32 and value.numel()
    ]
