"""Moving a model's gradients into flat buckets, against copying as many bytes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch.optim import AdamW

from zerokit import ZeroOptimizer
from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.workloads.build import build

MODEL = "gpt-34m"
GROUP = f"bucket fill, {MODEL}"


def bench_fill(benchmark: BenchmarkFixture, fake_world: dist.ProcessGroup) -> None:
    """`UnitGradients.fill` for every parameter: a copy that also divides by the world size."""
    benchmark.group = GROUP
    built = ZeroOptimizer(build(MODEL), AdamW, stage=1, precision="fp32", lr=1e-3, bucket_mb=16.0).parts
    units = list(built.gradients.units.values())
    arrived = [[torch.ones_like(parameter) for parameter in unit.storage.parameters] for unit in units]
    for unit in units:
        unit.prepare(built.gradients.pool)

    def fill() -> None:
        for unit, tensors in zip(units, arrived, strict=True):
            unit.filled.clear()  # else the next call adds
            for position, tensor in enumerate(tensors):
                unit.fill(position, tensor, 0.5)

    benchmark(fill)


def bench_copy(benchmark: BenchmarkFixture) -> None:
    """The floor: one copy of one flat tensor."""
    benchmark.group = GROUP
    source = torch.ones(describe(MODEL).parameters or 0)
    target = torch.empty_like(source)
    benchmark(lambda: target.copy_(source))
