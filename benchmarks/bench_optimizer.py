"""AdamW over one rank's flat shards, against AdamW over parameters, all of `gpt-34m` in fp32."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn
from torch.optim import AdamW, Optimizer

from zerokit import ZeroOptimizer
from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.workloads.build import build

MODEL = "gpt-34m"
GROUP = f"AdamW step, {MODEL}"


def _time_step(benchmark: BenchmarkFixture, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()  # the first step allocates the moments
    benchmark.group = GROUP
    benchmark(optimizer.step)


@pytest.mark.parametrize("kernel", ["fused", "foreach", "loop"])
def bench_parameters(benchmark: BenchmarkFixture, kernel: str) -> None:
    """Every parameter, as DDP's ranks do."""
    parameters = build(MODEL).parameters()
    _time_step(benchmark, AdamW(parameters, lr=1e-3, fused=kernel == "fused", foreach=kernel == "foreach"))


def bench_flat_shards(benchmark: BenchmarkFixture, fake_world: dist.ProcessGroup) -> None:
    """One flat tensor a unit, fused: what each of two ranks does at stages 1 to 3."""
    built = ZeroOptimizer(build(MODEL), AdamW, stage=1, precision="fp32", lr=1e-3, bucket_mb=16.0).parts
    for storage in built.storages:
        storage.unguard_flats()  # as the step does, which gives them their gradients
    _time_step(benchmark, built.inner)


def bench_flat_whole(benchmark: BenchmarkFixture) -> None:
    """One flat tensor of all parameters, fused."""
    flat = nn.Parameter(torch.zeros(describe(MODEL).parameters or 0))
    _time_step(benchmark, AdamW([flat], lr=1e-3, fused=True))
