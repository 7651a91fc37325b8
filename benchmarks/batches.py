"""Throughput of `zerokit.Batches` beside random batches: two gloo ranks, stage 3, sequences of unequal length.

Both train on the same samples in each step, with the same memory: that of the longest sequence. Random batches have
equally many samples, which is one then, in as many micro-batches as a rank has samples. Even ones have `micro_tokens=`
instead. Sequences are joined without padding, and the model computes each token by itself, so that a batch costs what
its tokens do. Every training runs in fresh processes; rounds alternate their order.

python benchmarks/batches.py
python benchmarks/batches.py --rounds 3 --steps 20 --json batches.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import bar_holds, in_rounds, plain_table, ratio, read_options, spread, write_json
from benchmarks.ranks import run_ranks

WORLD, EACH, WARMUP = 2, 8, 2
"""Ranks, samples of a step on each, and steps that are not timed."""
SAMPLES = 4096
WIDTH, BLOCKS, VOCABULARY = 256, 4, 512
MEDIAN, SIGMA = 150, 0.7
"""Lengths are lognormal."""
KINDS = ("even", "random")
BAR = 1 / 1.25
"""The most that even batches may take of the time of random ones."""


def lengths() -> list[int]:
    """The tokens of each sample."""
    import numpy as np

    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA, SAMPLES)
    return [max(int(length), 2) for length in drawn]


def steps_of(kind: str, rank: int) -> Iterator[list[list[int]]]:
    """The samples of this rank's micro-batches, step by step."""
    from zerokit import Batches

    size: dict[str, Any] = {"samples": WORLD * EACH, "seed": 1}
    if kind == "even":
        even = Batches(lengths(), micro_tokens=max(lengths()), rank=rank, world=WORLD, **size)
        for step in even.steps(even):
            yield list(step)
    whole = Batches(lengths(), rank=0, world=1, **size)
    for step in whole.steps(whole):
        (samples,) = step  # in random order
        yield [[sample] for sample in samples[rank::WORLD]]


def train(kind: str, steps: int) -> dict[str, float]:
    """A rank's part of a training: its seconds, and the tokens of all ranks."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional as F

    from zerokit import ZeroOptimizer

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
            return result

    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), blocks, nn.Linear(WIDTH, VOCABULARY))
    optimizer = ZeroOptimizer(model, torch.optim.AdamW, stage=3, precision="fp32", lr=1e-3)
    generator = torch.Generator().manual_seed(2)
    data = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths()]
    tokens, begun = 0.0, 0.0
    for number, step in enumerate(islice(steps_of(kind, dist.get_rank()), WARMUP + steps)):
        if number == WARMUP:
            dist.barrier()
            begun = time.perf_counter()
        for batch in step:
            inputs = torch.cat([data[at][:-1] for at in batch])
            targets = torch.cat([data[at][1:] for at in batch])
            loss_sum = F.cross_entropy(model(inputs), targets, reduction="sum")
            optimizer.backward(loss_sum, count=len(targets))
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number >= WARMUP:
            tokens += optimizer.last_count or 0.0
    return {"seconds": time.perf_counter() - begun, "tokens": tokens}


def even_part(kind: str, steps: int) -> float:
    """The part of their time for which ranks that wait for each other in every micro-batch compute, by tokens."""
    sizes = lengths()
    ranks = [list(islice(steps_of(kind, rank), WARMUP + steps))[WARMUP:] for rank in range(WORLD)]
    loads: list[list[int]] = [
        [sum(sizes[at] for at in batch) for step in steps_ for batch in step] for steps_ in ranks
    ]
    longest: int = sum(max(together) for together in zip(*loads, strict=True))
    return sum(sum(own) for own in loads) / (WORLD * longest)


def main(words: Sequence[str] | None = None) -> int:
    """Measure both; returns 1 when even batches take more of random ones' time than the bar."""
    options = read_options(__doc__, words, rounds=5, steps=8, json=Path)

    def measure(kind: str) -> dict[str, float]:
        found: dict[str, float] = run_ranks(train, kind, options.steps, world=WORLD)[0]
        return found

    results = in_rounds(KINDS, options.rounds, measure)
    pace = {kind: [each["tokens"] / each["seconds"] for each in found] for kind, found in results.items()}
    parts = {kind: even_part(kind, options.steps) for kind in KINDS}
    gain = ratio(pace["even"], pace["random"])
    rows = [[kind, spread(pace[kind], 0), f"{1 - parts[kind]:.3f}"] for kind in KINDS]
    title = f"{WORLD} gloo ranks, stage 3, {EACH} samples a step on each, lognormal lengths (σ {SIGMA})"
    print(plain_table(title, ["batches", "tokens/s", "idle by tokens"], rows))
    print(f"\neven ÷ random: {gain:.2f}; by tokens alone {parts['even'] / parts['random']:.2f}")
    write_json(
        options.json, {"tokens_per_s": pace, "gain": gain, "median": {k: median(v) for k, v in pace.items()}}
    )
    return 0 if bar_holds("time with even batches ÷ random ones", 1 / gain, BAR) else 1


if __name__ == "__main__":
    sys.exit(main())
