"""Loss after the same tokens: two islands with local steps, beside the sum of gradients in every step.

Every run sees the same samples in the same order, each once; the learning rate falls along a cosine to a tenth. The
first steps synchronise each time, once for all methods of a seed: local steps begin behind this warm-up, as in
post-local SGD (arXiv:1808.07217) and DiLoCo (arXiv:2311.08105, which begins with a pretrained model). The loss is that
on held-out text after the last synchronisation: each method's mean over seeds, and its ratio to that of every-step
synchronisation.

A file keeps what is done, and the same command goes on with what is left.

python benchmarks/local_steps_loss.py local_steps_loss.json --minutes 4
python benchmarks/local_steps_loss.py tiny.json --model gpt-tiny --lr 3e-3
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

import zerokit
from benchmarks.measuring import bar_holds, in_pieces, make_parser, plain_table
from benchmarks.ranks import run_ranks
from zerokit import LocalSteps, ZeroOptimizer
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import load

BAR = 1.02
HELD_OUT = 64
"""Batches, from a place in the text that no run comes to."""
BASE = "every step"
MEANT = "DiLoCo"
"""The method that must hold the bar."""


def methods(every: int) -> dict[str, dict[str, Any] | None]:
    """Options of `LocalSteps` by name; None for gradients summed in every step."""
    return {
        BASE: None,
        "local SGD (mean)": {"every": every, "outer": None},
        MEANT: {"every": every},
        "Streaming DiLoCo": {"every": every, "fragments": 3, "delay": max(1, every // 3), "blend": 0.5},
    }


def train(job: dict[str, Any], method: str, seed: int) -> dict[str, Any]:
    """One run on this rank: mean training losses of both islands by step, and the loss on held-out text."""
    settings = Settings(
        model=job["model"], batch_size=4, seq_len=64, nodes=2, seed=seed, data="standard-library"
    )
    loaded = load(settings)
    options, together = methods(job["every"])[method], job["together"]
    network = loaded.build()
    start = Path(job["folder"]) / f"seed-{seed}"

    def optimizer_for(islands: bool) -> ZeroOptimizer:
        mesh: dict[str, Any] = {"mesh": (2, 1), "stage": ("local", 2)} if islands else {"stage": 2}
        return ZeroOptimizer(network, torch.optim.AdamW, precision="fp32", lr=job["lr"], **mesh)

    losses: list[float] = []

    def run(optimizer: ZeroOptimizer, steps: range) -> None:
        for step in steps:
            rise = min(1.0, (step + 1) / max(1, job["steps"] // 20))
            fall = 0.55 + 0.45 * math.cos(math.pi * step / job["steps"])
            optimizer.param_groups[0]["lr"] = job["lr"] * rise * fall
            loss = network(*loaded.batch((2 * step + dist.get_rank()) * settings.batch_size))
            optimizer.backward(loss)
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            both = loss.detach().clone()
            dist.all_reduce(both)
            losses.append(both.item() / 2)

    if not zerokit.list_steps(start):
        first = optimizer_for(islands=False)
        run(first, range(together))
        zerokit.save(start, first, step=together, extra={"losses": losses})
        del first
        network, losses = loaded.build(), []
    optimizer = optimizer_for(islands=options is not None)
    local = None if options is None else LocalSteps(optimizer, **options)
    extra = zerokit.load(start, optimizer)
    run(optimizer, range(together, job["steps"]))
    if local is not None:
        local.synchronize()
    with torch.no_grad():
        first_sample = 2 * 10**6
        held_out = mean(
            float(network(*loaded.batch(first_sample + n * settings.batch_size))) for n in range(HELD_OUT)
        )
    return {"losses": extra["losses"] + losses, "held_out": held_out}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "file", type=Path, help="keeps every loss; the models after the warm-up lie beside it"
    )
    parser.add_argument("--model", default="gpt-5m")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--together", type=int, default=300, help="steps of the warm-up")
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--method", action="append", help="only these beside every step; again for more")
    parser.add_argument("--minutes", type=float, default=1000.0, help="begin no run after these")
    given = vars(parser.parse_args())
    path, minutes, chosen = given.pop("file"), given.pop("minutes"), given.pop("method")
    names = [BASE, *(chosen or list(methods(given["every"]))[1:])]
    jobs = {f"seed {seed}, {name}": (name, seed) for seed in range(given["seeds"]) for name in names}
    job = {**given, "folder": str(path.with_suffix("").absolute())}
    done = in_pieces(path, given, list(jobs), lambda name: run_ranks(train, job, *jobs[name])[0], minutes)
    if done is None:
        return 1
    means = {
        name: mean(done[job]["held_out"] for job, (method, _) in jobs.items() if method == name)
        for name in names
    }
    rows = [[name, f"{means[name]:.4f}", f"{means[name] / means[BASE]:.4f}"] for name in names]
    title = (
        f"{given['model']}, {given['steps']} steps, the first {given['together']} together, then a synchronisation "
        f"in {given['every']}, {given['seeds']} seeds"
    )
    print(plain_table(title, ["method", "held-out loss", "÷ every step"], rows))
    return 0 if MEANT not in means or bar_holds(MEANT, means[MEANT] / means[BASE], BAR) else 1


if __name__ == "__main__":
    sys.exit(main())
