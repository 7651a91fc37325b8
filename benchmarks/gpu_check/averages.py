"""Means over one rank, of sizes at which NCCL before 2.29.7 leaves the end of a buffer unwritten.

NCCL's kernel for one rank (nccl#1950) rounds the share of each block down, so the last elements keep what was there.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu_check.alone import alone
from benchmarks.gpu_check.place import Place, attempt, found
from tests.support.devices import STAGES
from zerokit import Precision, ZeroOptimizer

_SIZES = ((16_704, "fp32"), (125_888, "fp32"), (65_600, "bf16"), (125_888, "bf16"))
_PRECISIONS = {"fp32": Precision(), "bf16": Precision(compute=torch.bfloat16, reduce=torch.bfloat16)}


class _Vector(nn.Module):
    """Its gradient is what it is multiplied with."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(numel))

    def forward(self, factors: Tensor) -> Tensor:
        return (self.weight * factors).sum()


def averages(place: Place) -> dict[str, Any]:
    """Steps of SGD at each stage, from one reduction and from two that add up: each weight moves by its gradient."""
    faults: list[str] = []
    with alone(place):
        for (numel, precision), stage, passes in itertools.product(_SIZES, STAGES, (1, 2)):
            label = f"{numel} in {precision}, stage {stage}, {passes} reductions"
            wrong = attempt(label, partial(_unmoved, place, numel, precision, stage, passes), faults, place)
            if wrong:
                faults.append(f"{label}: {wrong} are wrong")
        unwritten = _unwritten(place) if place.device.type == "cuda" else None
    count = len(_SIZES) * len(STAGES) * 2
    row = f"{count - len(faults)}/{count} right; unwritten by NCCL's own AVG: {unwritten}"
    return found({"row": row, "cells": count, "unwritten_by_nccl": unwritten}, faults)


def _unmoved(place: Place, numel: int, precision: str, stage: Any, passes: int) -> int:
    """How many weights are not what plain arithmetic gives: whole and half numbers, exact in bf16 too."""
    model = _Vector(numel).to(place.device)
    factors = (torch.arange(numel, device=place.device) % 5 + 1).float()
    if precision == "bf16":
        factors = factors.bfloat16()
    optimizer = ZeroOptimizer(model, torch.optim.SGD, stage=stage, precision=_PRECISIONS[precision], lr=0.5)
    for _ in range(2):
        for _ in range(passes):
            optimizer.backward(model(factors))
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.gathered():
        return int((model.weight.detach().float() != -passes * factors.float()).sum())


def _unwritten(place: Place) -> dict[str, int]:
    """What NCCL's own mean over one rank leaves unwritten."""
    result = {}
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    for numel, dtype in ((16_704, torch.float32), (65_600, torch.bfloat16)):
        out = torch.full((numel,), float("nan"), dtype=dtype, device=place.device)
        scatter(out, torch.ones_like(out), op=dist.ReduceOp.AVG)
        result[f"{numel} {dtype}"] = int(out.isnan().sum())
    return result
