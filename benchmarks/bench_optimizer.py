"""AdamW over one rank's flat shards, against AdamW over parameters, all of `gpt-34m` in fp32."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn
from torch.optim import AdamW

from benchmarks.units import flat_units
from zerokit.bench.models import MODELS, build

MODEL = "gpt-34m"
GROUP = f"AdamW step, {MODEL}"


def _time(
    benchmark: BenchmarkFixture, parameters: Iterable[nn.Parameter], *, fused: bool, foreach: bool = False
) -> None:
    held = list(parameters)
    for parameter in held:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer = AdamW(held, lr=1e-3, fused=fused, foreach=foreach)
    optimizer.step()  # the first step allocates the moments
    benchmark.group = GROUP
    benchmark(optimizer.step)


@pytest.mark.parametrize("kernel", ["fused", "foreach", "loop"])
def bench_parameters(benchmark: BenchmarkFixture, kernel: str) -> None:
    """Every parameter, as DDP's ranks do."""
    _time(benchmark, build(MODELS[MODEL]).parameters(), fused=kernel == "fused", foreach=kernel == "foreach")


def bench_flat_shards(benchmark: BenchmarkFixture, fake_world: dist.ProcessGroup) -> None:
    """One flat tensor a unit, fused: what each of two ranks does at stages 1 to 3."""
    units = flat_units(build(MODELS[MODEL]), fake_world)
    _time(benchmark, [flat.tensor for unit in units for flat in unit.flats], fused=True)


def bench_flat_whole(benchmark: BenchmarkFixture) -> None:
    """One flat tensor of all parameters, fused."""
    _time(benchmark, [nn.Parameter(torch.zeros(MODELS[MODEL].parameters))], fused=True)
