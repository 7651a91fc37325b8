"""The optimizer's step of Muon beside FSDP2's with `full_tensor()`: two gloo ranks, matrices of 1024×4096.

zerokit orthogonalises each matrix on one rank, its owner; FSDP2's ranks gather every matrix, and each orthogonalises
all of them. Beside them stands torch's class on FSDP2's DTensors as they are: its products are divided among ranks, and
it gathers each matrix in bf16 fifteen times a step. All run torch's class, in fp32 and with one thread a rank, and a
step takes as long as on its slowest rank. Every training runs in fresh processes; rounds alternate their order.

python benchmarks/muon.py
python benchmarks/muon.py --rounds 1 --steps 1 --matrices 2
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import bar_holds, in_rounds, plain_table, ratio, read_options, spread, write_json
from benchmarks.ranks import run_ranks
from zerokit import ZeroOptimizer
from zerokit.bench.engines.fsdp2 import FullTensorMuon
from zerokit.placement import stage_of

WORLD, ROWS, COLUMNS, BATCH = 2, 1024, 4096, 4
WARMUP = 1
STAGES = {"zerokit stage 2": 2, "zerokit stage 3": 3}
PEER = "FSDP2, full_tensor()"
PEERS: dict[str, type[torch.optim.Optimizer]] = {PEER: FullTensorMuon, "FSDP2, DTensors": torch.optim.Muon}
ENGINES = (*STAGES, *PEERS)
LEARNING_RATE = 1e-3
BAR = 0.6
"""The most that a step may take of the peer's."""
ALIKE = 1e-3
"""The most by which losses may differ: Muon computes in bf16."""


class Model(nn.Module):
    """Matrices side by side."""

    def __init__(self, matrices: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(matrices))

    def forward(self, x: Tensor) -> Tensor:
        """The loss, a scalar, of (batch, 4096)."""
        return torch.stack([layer(x).square().mean() for layer in self.layers]).mean()


def train(engine: str, steps: int, matrices: int) -> dict[str, list[float]]:
    """A rank's part of a training: the milliseconds of the optimizer's steps, and the losses of all."""
    torch.manual_seed(0)
    model = Model(matrices)
    backward: Callable[[Tensor], object] = torch.autograd.backward
    optimizer: torch.optim.Optimizer
    if engine in STAGES:
        optimizer = zero = ZeroOptimizer(
            model, torch.optim.Muon, stage=stage_of(STAGES[engine]), precision="fp32", lr=LEARNING_RATE
        )
        backward = zero.backward
    else:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
        make: Any = PEERS[engine]
        optimizer = make(model.parameters(), lr=LEARNING_RATE)
    draw = torch.Generator().manual_seed(dist.get_rank())
    steps_ms, losses = list[float](), list[float]()
    for number in range(WARMUP + steps):
        loss = model(torch.randn(BATCH, COLUMNS, generator=draw))
        backward(loss)
        dist.barrier()
        begun = time.perf_counter()
        optimizer.step()
        if number >= WARMUP:
            steps_ms.append((time.perf_counter() - begun) * 1000.0)
        optimizer.zero_grad()
        losses.append(float(loss))
    return {"steps_ms": steps_ms, "losses": losses}


def main(words: Sequence[str] | None = None) -> int:
    """Measure all; returns 1 when zerokit's step takes more of FSDP2's than the bar, or losses differ."""
    options = read_options(__doc__, words, rounds=5, steps=3, matrices=8, json=Path)
    losses: dict[str, list[float]] = {}

    def measure(engine: str) -> float:
        """The median step of one training, in ms."""
        by_rank: list[dict[str, Any]] = run_ranks(train, engine, options.steps, options.matrices, world=WORLD)
        losses[engine] = by_rank[0]["losses"]
        slowest: list[float] = [
            max(step) for step in zip(*(rank["steps_ms"] for rank in by_rank), strict=True)
        ]
        return median(slowest)

    steps_ms = in_rounds(ENGINES, options.rounds, measure)
    ratios = {engine: ratio(times, steps_ms[PEER]) for engine, times in steps_ms.items()}
    rows = [[engine, spread(times, 0), f"{ratios[engine]:.2f}"] for engine, times in steps_ms.items()]
    title = f"optimizer.step() of Muon, {options.matrices} matrices of {ROWS}×{COLUMNS}, {WORLD} gloo ranks"
    print(plain_table(title, ["engine", "ms", "÷ full_tensor()"], rows))
    write_json(options.json, {"steps_ms": steps_ms, "ratios": ratios, "losses": losses})
    apart = max(
        abs(one / other - 1)
        for engine in ENGINES
        for one, other in zip(losses[engine], losses[PEER], strict=True)
    )
    held = [bar_holds("the largest difference of losses", apart, ALIKE)]
    held += [bar_holds(f"{engine} ÷ {PEER}", ratios[engine], BAR) for engine in STAGES]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
