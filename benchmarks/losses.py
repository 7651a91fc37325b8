"""Loss after the same tokens on two ranks: what is rounded or comes late, beside exact sums and states in fp32.

    wires      int8 and int4 gradients, from the first step on
    islands    local SGD, DiLoCo and Streaming DiLoCo, behind steps that synchronise each time, once for all methods of
               a seed, as in post-local SGD (arXiv:1808.07217) and DiLoCo (arXiv:2311.08105)
    states     AdamW's moments in eight bits

Every run sees the same samples in the same order, each once; the learning rate falls along a cosine to a tenth. What is
compared is the loss on held-out text after the last step: the mean over seeds of its ratio to that of exact sums.

A file keeps what is done, and the same command goes on with what is left.

python benchmarks/losses.py wires wires.json --model gpt-tiny --lr 3e-3 --steps 400
python benchmarks/losses.py islands islands.json
python benchmarks/losses.py states states.json --model gpt-tiny --lr 3e-3 --steps 500
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

import zerokit
from benchmarks.measuring import bar_holds, plain_table, read_options, write_json
from benchmarks.ranks import run_ranks
from zerokit import LocalSteps, Precision, ZeroOptimizer
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import load

EXACT = "exact sums"
BARS = {"int8": 1.002, "int4": 1.01, "DiLoCo": 1.02, "fp8": 1.002}
"""How much of the exact sums' loss a method may have."""
HELD_OUT = 64
"""Batches, from a place in the text that no run comes to."""


def methods(what: str, every: int) -> dict[str, dict[str, Any]]:
    """Options of `Precision`, of `LocalSteps` or of `ZeroOptimizer` by name."""
    known: dict[str, dict[str, dict[str, Any]]] = {
        "wires": {
            "int8": {"wire": "int8"},
            "int4": {"wire": "int4"},
        },
        "states": {"fp8": {"states": "fp8"}},
        "islands": {
            "local SGD (mean)": {"every": every, "outer": None},
            "DiLoCo": {"every": every},
            "Streaming DiLoCo": {"every": every, "fragments": 3, "delay": max(1, every // 3), "blend": 0.5},
        },
    }
    if what not in known:
        raise SystemExit(f"{what}: expected {', '.join(known)}")
    return known[what]


def train(job: dict[str, Any], method: str, seed: int) -> dict[str, Any]:
    """One run on this rank: the mean training loss of each step, and the loss on held-out text."""
    settings = Settings(
        model=job["model"],
        batch_size=job["batch_size"],
        seq_len=64,
        nodes=2,
        seed=seed,
        data="standard-library",
    )
    loaded, together = load(settings), job["together"]
    options = methods(job["what"], job["every"]).get(method, {})
    islands, states = "every" in options, options.pop("states", "device")
    losses: list[float] = []

    def optimizer_for(network: torch.nn.Module, precision: Precision, **mesh: Any) -> ZeroOptimizer:
        return ZeroOptimizer(
            network, torch.optim.AdamW, precision=precision, states=states, lr=job["lr"], **mesh
        )

    def run(network: torch.nn.Module, optimizer: ZeroOptimizer, steps: range) -> None:
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

    start, network = Path(job["folder"]) / f"seed-{seed}", loaded.build()
    if together and not zerokit.list_steps(start):
        first = optimizer_for(network, Precision())
        run(network, first, range(together))
        zerokit.save(start, first, step=together, extra={"losses": losses})
        network, losses = loaded.build(), []
    if islands:
        optimizer = optimizer_for(network, Precision(), mesh=(2, 1), stage=("local", 2))
        local = LocalSteps(optimizer, **options)
    else:
        optimizer = optimizer_for(network, Precision(**options))
    before = zerokit.load(start, optimizer)["losses"] if together else []
    run(network, optimizer, range(together, job["steps"]))
    if islands:
        local.synchronize()
    far = 2 * 10**6
    with torch.no_grad():
        found = [float(network(*loaded.batch(far + n * settings.batch_size))) for n in range(HELD_OUT)]
    return {"losses": before + losses, "held_out": mean(found)}


def main(words: Sequence[str] | None = None) -> int:
    """A table of the methods; 1 when a bar is missed."""
    options = read_options(
        __doc__,
        words,
        _what=(str, "wires, islands or states"),
        _file=(Path, "keeps every loss; models after the first part lie beside it"),
        model="gpt-5m",
        batch_size=4,
        steps=1000,
        together=(int, "steps before islands begin  [default: 300 with islands]"),
        every=50,
        seeds=5,
        lr=1e-3,
        method=([], "only these beside the exact one"),
    )
    given = vars(options)
    path, chosen = given.pop("file"), given.pop("method")
    if given["together"] is None:
        given["together"] = 300 if given["what"] == "islands" else 0
    names = [EXACT, *(chosen or methods(given["what"], given["every"]))]
    job = {**given, "folder": str(path.with_suffix("").absolute())}
    kept = json.loads(path.read_text()) if path.exists() else {"options": given, "jobs": {}}
    if kept["options"] != given:
        raise SystemExit(f"{path} was begun with {kept['options']}: use these, or another file")
    ends: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(given["seeds"]):
        for name in names:
            if (run := f"seed {seed}, {name}") not in kept["jobs"]:
                print(run, file=sys.stderr, flush=True)
                kept["jobs"][run] = run_ranks(train, job, name, seed)[0]
                write_json(path, kept)
            ends[name].append(kept["jobs"][run]["held_out"])
    ratios = {
        name: [one / exact for one, exact in zip(found, ends[EXACT], strict=True)]
        for name, found in ends.items()
    }
    rows = [
        [name, f"{mean(ends[name]):.4f}", f"{mean(found):.4f}", f"{_error(found):.4f}"]
        for name, found in ratios.items()
    ]
    title = f"{given['model']}, {given['steps']} steps, {given['seeds']} seeds"
    print(plain_table(title, ["method", "held-out loss", "÷ exact", "standard error"], rows))
    held = [bar_holds(name, mean(ratios[name]), bar) for name, bar in BARS.items() if name in ratios]
    return 0 if all(held) else 1


def _error(values: Sequence[float]) -> float:
    """The standard error of their mean."""
    return float(stdev(values) / len(values) ** 0.5) if len(values) > 1 else 0.0


if __name__ == "__main__":
    sys.exit(main())
