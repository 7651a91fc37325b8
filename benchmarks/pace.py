"""Throughput of ranks of unequal speed with `zerokit.Pace`, beside equal batches and beside what each can do alone.

Two gloo ranks, stage 2. Rank 1 is held to a part of a core: a process of its own stops it and lets it go on, by turns.
Each rank's own speed is that of a training on it alone, held in the same way. Every training runs in fresh processes;
rounds alternate their order.

python benchmarks/pace.py
python benchmarks/pace.py --rounds 3 --steps 10 --part 0.5 --json pace.json
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import bar_holds, in_rounds, plain_table, ratio, read_options, spread, write_json
from benchmarks.ranks import run_ranks

SAMPLES, STEP, TOKENS = 8192, 960, 16
"""Samples, those of a step over all ranks, and tokens of each."""
WIDTH, BLOCKS = 256, 4
EVERY, WARMUP = 2, 7
"""Steps between agreements, and those that are not timed: the third agreement is in force after them."""
PERIOD_S = 0.02
KINDS = ("pace", "equal", "rank 0 alone", "rank 1 alone")
BAR = 0.90
"""The least part of the sum of both ranks' own speeds that `Pace` must reach."""


@contextmanager
def held_to(part: float) -> Iterator[None]:
    """Stop this process for the rest of each period, from a process of its own."""
    if part >= 1:
        yield
        return
    held = os.getpid()
    until, alive = os.pipe()
    if not (keeper := os.fork()):
        os.close(alive)
        try:
            while not select.select([until], [], [], PERIOD_S * part)[0]:
                os.kill(held, signal.SIGSTOP)
                time.sleep(PERIOD_S * (1 - part))
                os.kill(held, signal.SIGCONT)
        finally:
            os._exit(0)
    try:
        yield
    finally:
        # The keeper ends where it has let this process go on, which a signal could prevent.
        os.close(alive)
        os.waitpid(keeper, 0)


def train(kind: str, part: float, steps: int) -> float:
    """A rank's part of a training: samples of all ranks in a second."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from zerokit import Batches, Pace, ZeroOptimizer

    slow = kind == "rank 1 alone" or dist.get_rank() == 1
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )
    )
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=2, precision="fp32", lr=1e-3)
    data = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(2))
    batches = Batches(
        [1.0] * SAMPLES,
        samples=STEP,
        seed=1,
        pace=Pace(optimizer, every=EVERY) if kind == "pace" else None,
    )
    begun = 0.0
    with held_to(part if slow else 1.0):
        for number, step in enumerate(islice(batches.steps(batches), WARMUP + steps)):
            if number == WARMUP:
                dist.barrier()
                begun = time.perf_counter()
            for batch in step:
                inputs = data[batch].unsqueeze(1).expand(-1, TOKENS, -1)
                loss_sum = (model(inputs) - inputs).square().sum()
                optimizer.backward(loss_sum, count=inputs.numel())
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        elapsed = time.perf_counter() - begun
    return STEP * steps / elapsed


def main(words: Sequence[str] | None = None) -> int:
    """Measure all; returns 1 when `Pace` stays below the bar."""
    part_help = "the part of a core that rank 1 has"
    options = read_options(__doc__, words, rounds=5, steps=6, part=(0.5, part_help), json=Path)

    def measure(kind: str) -> float:
        world = 1 if kind.endswith("alone") else 2
        found: float = run_ranks(train, kind, options.part, options.steps, world=world)[0]
        return found

    results = in_rounds(KINDS, options.rounds, measure)
    own = [sum(both) for both in zip(results["rank 0 alone"], results["rank 1 alone"], strict=True)]
    parts = {kind: ratio(results[kind], own) for kind in ("pace", "equal")}
    rows = [[kind, spread(found, 1), f"{ratio(found, own):.2f}"] for kind, found in results.items()]
    title = f"Two gloo ranks, stage 2, {STEP} samples a step; rank 1 has {options.part:g} of a core"
    print(plain_table(title, ["training", "samples/s", "÷ both ranks alone"], rows))
    medians = {kind: median(found) for kind, found in results.items()}
    write_json(options.json, {"samples_per_s": results, "median": medians, "parts": parts})
    return 0 if bar_holds("both ranks alone ÷ Pace", 1 / parts["pace"], 1 / BAR) else 1


if __name__ == "__main__":
    sys.exit(main())
