"""Norms over all gradients: the same bits however the line is cut, and nothing of them is read on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.runtime.collectives import Collectives

NUMBERS = 9
"""Numbers of a step's messages. All are equally long: gloo ends a process that receives more than it asked for, so a
rank that leaves a message out would end another one before that finds that they took different paths."""

_CHUNK = 1 << 16
"""Elements converted to fp64 at a time: half a MiB stays in a core's cache."""


def global_norm(
    shards: Sequence[Tensor], norm_type: float, collectives: Collectives, count: float | Tensor = 0.0
) -> tuple[Tensor, Tensor]:
    """The `norm_type`-norm of all ranks' `shards` together, and the sum of their counts; both 0-d, fp64.

    They travel in one all-reduce. Partial sums in fp32 would differ with the cut (29 different results in 30
    cuts, measured).
    """
    if math.isinf(norm_type):
        largest = _largest(shards, collectives.device)
        # A maximum over ranks may drop a nan. Each rank's count has a place of its own in it.
        numbers = max(1 + collectives.world, NUMBERS)
        both = torch.zeros(numbers, dtype=torch.float64, device=collectives.device)
        both[0] = torch.where(largest.isnan(), math.inf, largest)
        both[1 + collectives.rank].fill_(count)
        collectives.all_reduce(both, dist.ReduceOp.MAX)
        return both[0], both[1:].sum()
    both = torch.zeros(NUMBERS, dtype=torch.float64, device=collectives.device)
    both[0] = _power_sum(shards, norm_type, collectives.device)
    both[1].fill_(count)  # torch 2.11 waits for the device where a number is assigned
    collectives.all_reduce(both, dist.ReduceOp.SUM)
    return both[0].sqrt() if norm_type == 2.0 else both[0].pow(1.0 / norm_type), both[1]


def all_finite(shards: Sequence[Tensor], device: torch.device) -> Tensor:
    """Whether no element is inf or nan, as a 0-d tensor: one check over all shards."""
    return _largest(shards, device).isfinite()


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """The factor for gradients of this norm (both 0-d, fp64); 1 if the norm is not finite.

    Computed in fp32, as torch.nn.utils.clip_grad_norm_ does it, so that results can be compared in bits.
    """
    coefficient = (max_norm / (norm.float() + 1e-6)).clamp(max=1.0)
    # Otherwise all gradients would become nan, the padding of kept buckets too, which nothing would ever clear.
    return torch.where(norm.isfinite(), coefficient.double(), 1.0)


def _largest(shards: Sequence[Tensor], device: torch.device) -> Tensor:
    """The largest magnitude, or nan where there is one; 0-d, fp64."""
    filled = [shard for shard in shards if shard.numel()]
    if not filled:
        return torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cuda":
        return torch.stack(torch._foreach_norm(filled, math.inf)).max().double()
    extremes = [extreme for shard in _joined(filled) for extreme in torch.aminmax(shard)]
    return torch.stack(extremes).abs().max().double()


def _joined(shards: Sequence[Tensor]) -> list[Tensor]:
    """The same elements in fewer tensors, small ones together: each operation has its price on the host."""
    small = [shard for shard in shards if shard.numel() <= _CHUNK // 8]
    large = [shard for shard in shards if shard.numel() > _CHUNK // 8]
    return [*large, torch.cat(small)] if small else large


def _power_sum(shards: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of the elements' magnitudes to the power of `norm_type`; 0-d, fp64."""
    filled = [shard for shard in shards if shard.numel()]
    total = torch.zeros((), dtype=torch.float64, device=device)
    if device.type == "cuda":
        # Accumulates in fp64 without a copy in fp64, which `vector_norm(dtype=...)` makes.
        norms = torch._foreach_norm(filled, norm_type, dtype=torch.float64) if filled else ()
        return torch.stack([total, *norms]).pow(norm_type).sum()
    for shard in _joined(filled):
        for chunk in shard.split(_CHUNK):
            wide = chunk.double()
            total += torch.dot(wide, wide) if norm_type == 2.0 else (wide.abs() ** norm_type).sum()
    return total
