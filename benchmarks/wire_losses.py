"""Losses on int8 and int4 wires against those of exact sums: equal models, batches and seeds, two ranks.

Each seed trains once on every wire, with error feedback and without. What is compared is the mean loss of the last
fifth of the steps, over seeds. A file keeps what is done, and the same command goes on with what is left.

python benchmarks/wire_losses.py wire_losses.json
python benchmarks/wire_losses.py wire_losses.json --model gpt-5m --batch-size 2 --lr 1e-3 --minutes 4
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import bar_holds, in_pieces, make_parser, plain_table
from benchmarks.ranks import run_ranks
from zerokit import Precision, ZeroOptimizer
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import load

EXACT = "exact"
WIRES = {
    EXACT: Precision(),
    "int8": Precision(wire="int8"),
    "int8, no feedback": Precision(wire="int8", feedback=False),
    "int4": Precision(wire="int4"),
    "int4, no feedback": Precision(wire="int4", feedback=False),
}
BARS = {"int8": 0.002, "int4": 0.01}
"""How much the loss may exceed that of exact sums, as a share of it."""


def train(wire: str, model: str, batch_size: int, steps: int, lr: float, seed: int) -> list[float]:
    """The losses of each step, over ranks."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    settings = Settings(
        model=model,
        batch_size=batch_size,
        seq_len=64,
        nproc_per_node=ranks,
        seed=seed,
        device="cpu",
        data="standard-library",
    )
    loaded = load(settings)
    network = loaded.build()
    optimizer = ZeroOptimizer(network, torch.optim.AdamW, precision=WIRES[wire], lr=lr)
    losses = []
    for step in range(steps):
        loss = network(*loaded.batch((step * ranks + rank) * batch_size))
        optimizer.backward(loss)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    both = torch.stack(losses)
    dist.all_reduce(both)
    found: list[float] = (both / ranks).tolist()
    return found


def main(words: Sequence[str] | None = None) -> int:
    """A table of the wires; 1 when a bar is missed or some runs are left."""
    parser = make_parser(__doc__)
    parser.add_argument("file", type=Path, help="keeps every loss")
    parser.add_argument("--model", default="gpt-tiny")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run after these")
    given = vars(parser.parse_args(words))
    path, minutes = given.pop("file"), given.pop("minutes")
    jobs = {f"seed {seed}, {name}": (name, seed) for seed in range(given["seeds"]) for name in WIRES}

    def run(job: str) -> list[float]:
        wire, seed = jobs[job]
        arguments = (given["model"], given["batch_size"], given["steps"], given["lr"], seed)
        losses: list[float] = run_ranks(train, wire, *arguments)[0]
        return losses

    done = in_pieces(path, given, list(jobs), run, minutes)
    return 1 if done is None else _report(given, {jobs[job]: losses for job, losses in done.items()})


def _report(options: Mapping[str, Any], runs: Mapping[tuple[str, int], Sequence[float]]) -> int:
    last, seeds = options["steps"] // 5, range(options["seeds"])
    ends = {name: [mean(runs[name, seed][-last:]) for seed in seeds] for name in WIRES}
    above = {
        name: [end / exact - 1.0 for end, exact in zip(found, ends[EXACT], strict=True)]
        for name, found in ends.items()
    }
    rows = [
        [name, f"{mean(ends[name]):.4f}", f"{100 * mean(each):+.3f} %", f"{100 * _error(each):.3f} %"]
        for name, each in above.items()
    ]
    title = f"{options['model']}, {options['steps']} steps, {options['seeds']} seeds"
    print(plain_table(title, ["wire", "loss", "above exact", "standard error"], rows))
    held = [
        bar_holds(f"{name}: loss above that of exact sums", mean(above[name]), bar)
        for name, bar in BARS.items()
    ]
    for name in BARS:
        without = [b - a for a, b in zip(above[name], above[f"{name}, no feedback"], strict=True)]
        print(f"{name} without feedback: {100 * mean(without):+.3f} ± {100 * _error(without):.3f} % more")
    return 0 if all(held) else 1


def _error(values: Sequence[float]) -> float:
    """The standard error of their mean."""
    return float(stdev(values) / len(values) ** 0.5) if len(values) > 1 else 0.0


if __name__ == "__main__":
    sys.exit(main())
