"""Host time of a step: what the Python and the launches of an engine cost, apart from computation and communication.

One rank of a fake group of 64 trains 100 small blocks (4 linear layers and 2 norms of width 64) with batch 2, clipping
and AdamW; nothing is sent. Each engine has a process of its own. They take turns, a few steps each, in alternating
order; a ratio is the median over the turns of what two engines took in the same one, so that a machine that is slow
for a while is slow for both.

python benchmarks/host_time.py
python benchmarks/host_time.py --rounds 25 --json host_time.json
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import bar_holds, in_rounds, plain_table, ratio, read_options, write_json
from zerokit import ZeroOptimizer
from zerokit.placement import stage_of

_steps: list[Callable[[], None]] = []

WORLD, BLOCKS, WIDTH, BATCH = 64, 100, 64, 2
BUCKET_MB = 0.07
"""A block is a unit of its own, as it is in FSDP2."""
WARM_UP, STEPS = 10, 9
"""Before the first turn, and in each."""
ENGINES = ("torch", "stage 0", "stage 1", "stage 2", "stage 3", "fsdp2")
BARS = {("stage 3", "fsdp2"): 0.25, ("stage 2", "torch"): 1.10}


def prepare(engine: str) -> None:
    """Make the engine of this process."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    _steps.append(make_step(engine))


def take_steps(steps: int) -> float:
    """Milliseconds of processor time of a step, the median of `steps`."""
    times = []
    for _ in range(steps):
        started = time.process_time()
        _steps[0]()
        times.append(time.process_time() - started)
    return median(times) * 1e3


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
    if engine.startswith("stage"):
        zero = ZeroOptimizer(
            model,
            torch.optim.AdamW,
            stage=stage_of(int(engine.removeprefix("stage "))),
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
    if engine == "fsdp2":
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


def main() -> int:
    """Measure each engine in a process of its own; returns 1 when a bar is missed."""
    arguments = read_options(__doc__, None, rounds=15, engines=list(ENGINES), json=Path)
    os.environ["OMP_NUM_THREADS"] = "1"
    with contextlib.ExitStack() as stack:
        processes = {
            name: stack.enter_context(ProcessPoolExecutor(1, get_context("spawn"), prepare, (name,)))
            for name in arguments.engines
        }

        def take(name: str, steps: int = STEPS) -> float:
            return processes[name].submit(take_steps, steps).result()

        for name in processes:
            take(name, WARM_UP)
        turns = in_rounds(list(processes), arguments.rounds, take)

    def say(engine: str, to: str) -> str:
        return f"{ratio(turns[engine], turns[to]):.2f}" if to in turns else ""

    rows = [
        [name, f"{median(times):.1f}", say(name, "torch"), say(name, "fsdp2")]
        for name, times in turns.items()
    ]
    print(plain_table("Processor time of a step", ["engine", "ms", "/ torch", "/ FSDP2"], rows))
    write_json(arguments.json, {"step_ms": turns})
    known = [pair for pair in BARS if set(pair) <= set(turns)]
    held = [bar_holds(f"{one} of {to}", ratio(turns[one], turns[to]), BARS[one, to]) for one, to in known]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
