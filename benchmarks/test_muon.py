"""The optimizer's step of Muon beside FSDP2's: two gloo ranks of one thread each, matrices of 512×2048.

zerokit orthogonalises each matrix on one rank, its owner. With `full_tensor()` FSDP2's ranks gather every matrix, and
each orthogonalises all of them. Beside them stands torch's class on FSDP2's DTensors as they are: its products are
divided among ranks, and it gathers each matrix in bf16 fifteen times a step. All run torch's class in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from benchmarks.elsewhere import elsewhere, replay, slowest, take_turns
from benchmarks.ranks import run_ranks
from zerokit import ZeroOptimizer
from zerokit.bench.engines.fsdp2 import FullTensorMuon
from zerokit.placement import stage_of

WORLD, MATRICES, ROWS, COLUMNS, BATCH = 2, 2, 512, 2048, 4
STAGES = {"zerokit, stage 2": 2, "zerokit, stage 3": 3}
PEERS: dict[str, type[torch.optim.Optimizer]] = {
    "FSDP2, full_tensor()": FullTensorMuon,
    "FSDP2, DTensors": torch.optim.Muon,
}
ENGINES = (*STAGES, *PEERS)
LEARNING_RATE = 1e-3
Times = dict[str, list[float]]


class Model(nn.Module):
    """Matrices side by side."""

    def __init__(self, matrices: int = MATRICES) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(matrices))

    def forward(self, x: Tensor) -> Tensor:
        """The loss, a scalar, of (batch, 2048)."""
        return torch.stack([layer(x).square().mean() for layer in self.layers]).mean()


def build(engine: str) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[Tensor], object]]:
    """The model, its optimizer, and the backward of a loss."""
    torch.manual_seed(0)
    model = Model()
    if engine in STAGES:
        zero = ZeroOptimizer(
            model, torch.optim.Muon, stage=stage_of(STAGES[engine]), precision="fp32", lr=LEARNING_RATE
        )
        return model, zero, zero.backward
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    make: Any = PEERS[engine]
    return model, make(model.parameters(), lr=LEARNING_RATE), torch.autograd.backward


def measure(rounds: int) -> Times:
    """Seconds of this rank's `optimizer.step()`, by engine."""
    trainings = {engine: build(engine) for engine in ENGINES}
    batch = torch.randn(BATCH, COLUMNS, generator=torch.Generator().manual_seed(dist.get_rank()))

    def make_gradients(engine: str) -> None:
        model, optimizer, backward = trainings[engine]
        optimizer.zero_grad()
        backward(model(batch))
        dist.barrier()

    steps = {engine: optimizer.step for engine, (_, optimizer, _) in trainings.items()}
    return take_turns(steps, rounds, make_gradients)


@pytest.fixture(scope="module")
def steps(rounds: int) -> Times:
    return slowest(run_ranks(measure, rounds, world=WORLD))


@pytest.mark.benchmark(group=f"optimizer.step() of Muon, {MATRICES} matrices", timer=elsewhere)
@pytest.mark.parametrize("how", ENGINES)
def test_muon(benchmark: BenchmarkFixture, steps: Times, how: str) -> None:
    replay(benchmark, steps[how])
