"""What a rank does to its flat units in a step: gradients into buckets, AdamW over shards; all of `gpt-34m` in fp32."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from zerokit import ZeroOptimizer
from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.workloads.build import build

MODEL = "gpt-34m"
NUMEL = describe(MODEL).parameters or 0
FILL, STEP = f"bucket fill, {MODEL}", f"AdamW step, {MODEL}"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A rank of a CPU job has one thread; with more, small machines time their neighbours."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def zero() -> Iterator[ZeroOptimizer]:
    """Stage 1 on rank 0 of two, of which the other does not exist: collectives return at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield ZeroOptimizer(build(MODEL), AdamW, stage=1, precision="fp32", lr=1e-3, bucket_mb=16.0)
    dist.destroy_process_group()


@pytest.mark.benchmark(group=FILL)
def bench_fill(benchmark: BenchmarkFixture, zero: ZeroOptimizer) -> None:
    """`UnitGradients.fill` for every parameter: a copy that also divides by the world size."""
    gradients = zero.parts.gradients
    units = list(gradients.units.values())
    arrived = [[torch.ones_like(parameter) for parameter in unit.storage.parameters] for unit in units]
    for unit in units:
        unit.prepare(gradients.pool)

    def fill() -> None:
        for unit, tensors in zip(units, arrived, strict=True):
            unit.filled.clear()  # else the next call adds
            for position, tensor in enumerate(tensors):
                unit.fill(position, tensor, 0.5)

    benchmark(fill)


@pytest.mark.benchmark(group=FILL)
def bench_copy(benchmark: BenchmarkFixture) -> None:
    """The floor: one copy of one flat tensor."""
    source = torch.ones(NUMEL)
    target = torch.empty_like(source)
    benchmark(lambda: target.copy_(source))


def _time_step(benchmark: BenchmarkFixture, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()  # the first step allocates the moments
    benchmark(optimizer.step)


@pytest.mark.benchmark(group=STEP)
@pytest.mark.parametrize("kernel", ["fused", "foreach", "loop"])
def bench_parameters(benchmark: BenchmarkFixture, kernel: str) -> None:
    """Every parameter, as DDP's ranks do."""
    parameters = build(MODEL).parameters()
    _time_step(benchmark, AdamW(parameters, lr=1e-3, fused=kernel == "fused", foreach=kernel == "foreach"))


@pytest.mark.benchmark(group=STEP)
def bench_flat_shards(benchmark: BenchmarkFixture, zero: ZeroOptimizer) -> None:
    """One flat tensor a unit, fused: what each of two ranks does at stages 1 to 3."""
    for storage in zero.parts.storages:
        storage.unguard_flats()  # as the step does, which gives them their gradients
    _time_step(benchmark, zero.parts.inner)


@pytest.mark.benchmark(group=STEP)
def bench_flat_whole(benchmark: BenchmarkFixture) -> None:
    """One flat tensor of all parameters, fused."""
    _time_step(benchmark, AdamW([nn.Parameter(torch.zeros(NUMEL))], lr=1e-3, fused=True))
