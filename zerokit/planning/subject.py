"""The subject of a plan: a model, its micro-batches, and the unit of throughput."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass(frozen=True)
class Subject:
    """A model to plan for.

    Attributes:
        name: what a plan calls it.
        build: makes the model, on torch's default device; its `forward(*batch)` returns the loss.
        batch: makes a micro-batch of so many samples on the CPU.
        unit: what throughput counts: "tokens", "images" or "samples".
        units_per_sample: tokens of a sequence, else 1.
        flops_per_unit: FLOPs of forward and backward for MFU; None counts the products of the traced step.
        flops_convention: in words, how these were counted.
        bench_options: options of `zerokit bench` that train this model; empty for one that bench cannot build.
        assumptions: sentences about what was not asked for.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    unit: str = "samples"
    units_per_sample: int = 1
    flops_per_unit: float | None = None
    flops_convention: str = "products of forward and backward, masked halves of attention left out"
    bench_options: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
