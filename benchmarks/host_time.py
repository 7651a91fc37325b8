"""Host time of a step: what the Python and the launches of an engine cost, apart from computation and communication.

One rank of a fake group of 64 trains 100 small blocks (4 linear layers and 2 norms of width 64) with batch 2, clipping
and AdamW; nothing is sent. Each engine has a process of its own. They take turns, a few steps each, in alternating
order; a ratio is the median over the turns of what two engines took in the same one, so that a machine that is slow
for a while is slow for both.

python benchmarks/host_time.py
python benchmarks/host_time.py --rounds 25 --json host_time.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file from a checkout that is not installed
    sys.path.insert(0, str(ROOT))

WORLD, BLOCKS, WIDTH, BATCH = 64, 100, 64, 2
BUCKET_MB = 0.07
"""A block is a unit of its own, as it is in FSDP2."""
WARM_UP, STEPS = 10, 9
"""Before the first turn, and in each."""
ENGINES = ("torch", "stage 0", "stage 1", "stage 2", "stage 3", "fsdp2")
BARS = {("stage 3", "fsdp2"): 0.25, ("stage 2", "torch"): 1.10}


def serve(engine: str) -> None:
    """Train as many steps as each line of the standard input says, and print what `take_steps` returns."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    forward, rest = make_step(engine)
    for line in sys.stdin:
        print(*take_steps(forward, rest, int(line)), flush=True)


def take_steps(
    forward: Callable[[], Tensor], rest: Callable[[Tensor], None], steps: int
) -> tuple[float, float]:
    """Milliseconds of processor time of a step and of its forward, medians of `steps`."""
    times, forwards = [], []
    for _ in range(steps):
        started = time.process_time()
        loss = forward()
        after_forward = time.process_time()
        rest(loss)
        times.append(time.process_time() - started)
        forwards.append(after_forward - started)
    return statistics.median(times) * 1e3, statistics.median(forwards) * 1e3


def make_step(engine: str) -> tuple[Callable[[], Tensor], Callable[[Tensor], None]]:
    """The user's loop, once around: the forward, and what follows it."""
    import torch
    from torch import nn

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
        from zerokit import ZeroOptimizer

        zero = ZeroOptimizer(
            model,
            torch.optim.AdamW,
            stage=int(engine.removeprefix("stage ")),
            precision="fp32",
            bucket_mb=BUCKET_MB,
            lr=1e-4,
        )

        def step(loss: Tensor) -> None:
            zero.backward(loss)
            zero.clip_grad_norm_(1.0)
            zero.step()
            zero.zero_grad()

        return lambda: model(x), step
    if engine == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for one in model.blocks:
            fully_shard(one)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def plain_step(loss: Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: model(x), plain_step


def main() -> int:
    """Measure each engine in processes of its own; returns 1 when a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), metavar="ENGINE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return 0
    with contextlib.ExitStack() as stack:
        turns = take_turns(
            {engine: stack.enter_context(Engine(engine)) for engine in arguments.engines}, arguments.rounds
        )

    from benchmarks.tables import print_table

    def ratio(engine: str, to: str) -> float:
        pairs = zip(turns[engine], turns[to], strict=True)
        return statistics.median(step / other for (step, _), (other, _) in pairs)

    def say(engine: str, to: str) -> str:
        return f"{ratio(engine, to):.2f}" if to in turns else ""

    rows = [
        [
            engine,
            f"{statistics.median(step for step, _ in values):.1f}",
            say(engine, "torch"),
            say(engine, "fsdp2"),
            f"{statistics.median(forward for _, forward in values):.1f}",
        ]
        for engine, values in turns.items()
    ]
    print_table("Processor time of a step", ["engine", "ms", "/ torch", "/ FSDP2", "forward ms"], rows)
    if arguments.json:
        arguments.json.write_text(json.dumps({"step_ms, forward_ms": turns}, indent=1) + "\n")
    missed = 0
    for (engine, to), bar in BARS.items():
        if engine in turns and to in turns:
            measured = ratio(engine, to)
            missed += measured > bar
            verdict = "holds" if measured <= bar else "MISSED"
            print(f"{engine} at most {bar:.2f} x {to}: {measured:.3f}, {verdict}")
    return 1 if missed else 0


class Engine:
    """An engine in a process of its own, which trains when asked."""

    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", name],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def take_steps(self, steps: int) -> tuple[float, float]:
        """See `take_steps`; raises `ChildProcessError` if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(steps, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline().split()
        if len(answer) != 2:
            raise ChildProcessError(f"{self._process.args!r} ended with {self._process.wait()}")
        return float(answer[0]), float(answer[1])

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *failure: object) -> None:
        self._process.kill()
        self._process.communicate()


def take_turns(engines: dict[str, Engine], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """By engine: what its steps took in each round."""
    for engine in engines.values():
        engine.take_steps(WARM_UP)
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for number in range(rounds):
        for name in engines if number % 2 == 0 else reversed(engines):
            turns[name].append(engines[name].take_steps(STEPS))
    return turns


if __name__ == "__main__":
    sys.exit(main())
