"""Moving a model's gradients into flat buckets, against copying as many bytes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.units import flat_units
from zerokit.bench.models import MODELS, build
from zerokit.runtime.gradients import UnitGradients

MODEL = "gpt-34m"
GROUP = f"bucket fill, {MODEL}"


def bench_fill(benchmark: BenchmarkFixture, fake_world: dist.ProcessGroup) -> None:
    """`UnitGradients.fill` for every parameter: a copy that also divides by the world size."""
    benchmark.group = GROUP
    units = flat_units(build(MODELS[MODEL]), fake_world)
    gradients = [UnitGradients(unit, torch.float32, whole=True, gather=False) for unit in units]
    arrived = [[torch.ones_like(parameter) for parameter in unit.parameters] for unit in units]
    for unit in gradients:
        unit.prepare_own()

    def fill() -> None:
        for unit, tensors in zip(gradients, arrived, strict=True):
            unit.filled.clear()  # else the next call adds
            for position, tensor in enumerate(tensors):
                unit.fill(position, tensor, 0.5)

    benchmark(fill)


def bench_copy(benchmark: BenchmarkFixture) -> None:
    """The floor: one copy of one flat tensor."""
    benchmark.group = GROUP
    source = torch.ones(MODELS[MODEL].parameters)
    target = torch.empty_like(source)
    benchmark(lambda: target.copy_(source))
