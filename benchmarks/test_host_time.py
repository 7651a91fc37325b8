"""Host time of a step: what the Python and the launches of an engine cost, apart from computation and communication.

One rank of a fake group of 64 trains 100 small blocks (4 linear layers and 2 norms of width 64) with batch 2, clipping
and AdamW; nothing is sent. Each engine has a process of its own. They take turns, a few steps each, in alternating
order; a round is the processor time of a step, the median of those of a turn.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from statistics import median

import pytest
import torch
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.elsewhere import elsewhere, replay
from benchmarks.measuring import in_rounds
from zerokit import ZeroOptimizer
from zerokit.placement import stage_of

_steps: list[Callable[[], None]] = []

WORLD, BLOCKS, WIDTH, BATCH = 64, 100, 64, 2
BUCKET_MB = 0.07
"""A block is a unit of its own, as it is in FSDP2."""
WARM_UP, STEPS = 5, 5
"""Before the first turn, and in each."""
ENGINES = (
    "zerokit, stage 0",
    "zerokit, stage 1",
    "zerokit, stage 2",
    "zerokit, stage 3",
    "torch alone",
    "FSDP2",
)


def prepare(engine: str) -> None:
    """Make the engine of this process."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    _steps.append(make_step(engine))


def take_steps(steps: int) -> float:
    """Seconds of processor time of a step, the median of `steps`."""
    times = []
    for _ in range(steps):
        started = time.process_time()
        _steps[0]()
        times.append(time.process_time() - started)
    return median(times)


def make_step(engine: str) -> Callable[[], None]:
    """The user's loop, once around."""
    torch.manual_seed(0)

    def block() -> nn.Module:
        layers = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
        return nn.Sequential(*layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(block() for _ in range(BLOCKS))
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one in self.blocks:
                x = x + one(x)
            out: torch.Tensor = self.head(x)
            return out.mean()

    model = Model()
    x = torch.randn(BATCH, WIDTH)
    if engine.startswith("zerokit"):
        zero = ZeroOptimizer(
            model,
            torch.optim.AdamW,
            stage=stage_of(int(engine[-1])),
            precision="fp32",
            bucket_mb=BUCKET_MB,
            lr=1e-4,
        )

        def step() -> None:
            zero.backward(model(x))
            zero.clip_grad_norm_(1.0)
            zero.step()
            zero.zero_grad()

        return step
    if engine == "FSDP2":
        for one in model.blocks:
            fully_shard(one)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def plain_step() -> None:
        model(x).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return plain_step


@pytest.fixture(scope="module")
def turns(rounds: int) -> dict[str, list[float]]:
    with pytest.MonkeyPatch.context() as environment, contextlib.ExitStack() as stack:
        environment.setenv("OMP_NUM_THREADS", "1")
        processes = {
            name: stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"), prepare, (name,)))
            for name in ENGINES
        }

        def take(name: str, steps: int = STEPS) -> float:
            return processes[name].submit(take_steps, steps).result()

        for name in processes:
            take(name, WARM_UP)
        return in_rounds(ENGINES, rounds, take)


@pytest.mark.benchmark(group="host time of a step", timer=elsewhere)
@pytest.mark.parametrize("how", ENGINES)
def test_host_time(benchmark: BenchmarkFixture, turns: dict[str, list[float]], how: str) -> None:
    replay(benchmark, turns[how])
