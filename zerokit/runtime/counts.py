"""The exact batch: losses that are sums over samples or tokens, whose gradients are divided by the sum of all counts.

Sequences differ in length, so ranks and micro-batches hold different numbers of tokens, and a mean of their means
weighs the tokens of a short batch more. A count travels in the message of the norm, or of the agreement before a step.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.errors import UsageError
from zerokit.runtime.collectives import Collectives

Count: TypeAlias = float | Tensor
"""A number of samples or tokens; on a device maybe a 0-d tensor there, which the host does not read."""


def checked(count: object, device: torch.device) -> Count | None:
    """A number of samples or tokens, or None. Raises `UsageError` for anything else.

    A tensor on the `device` that computes is not read. One on the host is: a copy to a device would wait for it.
    """
    if isinstance(count, Tensor) and count.dim() == 0 and count.device.type != "cpu":
        return count
    number = count.item() if isinstance(count, Tensor) and count.numel() == 1 else count
    if number is not None and not (isinstance(number, int | float) and 0 <= number < math.inf):
        raise UsageError(
            f"backward(count={count!r}): expected a number of at least 0, or a 0-d tensor: how many samples or tokens "
            "the loss is a sum over"
        )
    return count if isinstance(count, Tensor) and count.device == device else number


def sum_over_ranks(count: Count | None, collectives: Collectives) -> Tensor:
    """The sum of all ranks' counts, 0-d, by a message of its own; a rank without a count has none."""
    total = torch.zeros((), dtype=torch.float64, device=collectives.device)
    total += 0.0 if count is None else count
    collectives.all_reduce(total, dist.ReduceOp.SUM)
    return total


def share_of(total: Tensor, world: int) -> Tensor:
    """The factor that makes the mean of `world` ranks' gradients that over all samples or tokens; 1 without any."""
    return torch.where(total > 0, world / total, 1.0)
