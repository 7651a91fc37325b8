"""Steps and memory with masters and states in a file, beside the same training with all of it in memory.

Two gloo ranks train a GPT of 206 M parameters at stage 2 or 3; each training runs in fresh processes, and rounds
alternate their order. Every step should take at most 1.15 times as long as the slower of the two: the same step in
memory, or the states' way from the disk and back at the rates that the disk has in the same round. The peak of a rank's
resident memory, from before the model is built to after the last step, a save and a load, should be at most what the
formulas say it holds, with the states of two units and 64 MiB beside it; activations are what the same training takes
with all in memory.

python benchmarks/states.py DIRECTORY
python benchmarks/states.py DIRECTORY --precision fp32 --stage 3 --rounds 1 --json states.json
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

import zerokit
from benchmarks.measuring import bar_holds, in_rounds, plain_table, ratio, read_options, spread, write_json
from benchmarks.ranks import run_ranks
from zerokit import Precision, ZeroOptimizer
from zerokit.bench.catalogue.workloads import GPTConfig
from zerokit.bench.machine.disk import measure_disk
from zerokit.bench.machine.host import peak_host_bytes
from zerokit.bench.workloads.build import build_model
from zerokit.bench.workloads.models import init_module
from zerokit.placement import stage_of

WORLD, WARMUP = 2, 2
CONFIG = GPTConfig(16_384, 256, 1024, 15, 16)
MEMORY, DISK = "in memory", "in a file"
STEP_BAR, SLACK = 1.15, 64 << 20


def train(states: str, runs: str, stage: int, precision: Any, length: int, steps: int) -> dict[str, Any]:
    """A rank's part of a training: the milliseconds of its steps, and bytes that it held."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = peak_host_bytes()
    with torch.device("meta"):
        model = build_model(CONFIG, None, seed=0)
    optimizer = ZeroOptimizer(
        model,
        torch.optim.AdamW,
        stage=stage_of(stage),
        precision=Precision.of(precision),
        states=states,
        lr=1e-4,
        init_fn=init_module,
    )
    draw = torch.Generator().manual_seed(dist.get_rank())
    steps_ms = list[float]()
    for number in range(WARMUP + steps):
        tokens = torch.randint(0, CONFIG.vocabulary, (1, length + 1), generator=draw)
        dist.barrier()
        begun = time.perf_counter()
        loss = model(tokens[:, :-1], tokens[:, 1:])
        optimizer.backward(loss)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number >= WARMUP:
            steps_ms.append((time.perf_counter() - begun) * 1000.0)
    held = optimizer.predicted_memory()
    stepped = peak_host_bytes() - before
    zerokit.save(runs, optimizer, step=1)
    zerokit.load(runs, optimizer)
    return {
        "steps_ms": steps_ms,
        "loss": float(loss),
        "peak": stepped,
        "peak_saved": peak_host_bytes() - before,
        "formula": held.total,
        "visiting": held.visiting,
        "disk": held.disk,
    }


def main(words: Sequence[str] | None = None) -> int:
    """Measure both; returns 1 when a step or a peak is above its bar, or losses differ."""
    options = read_options(
        __doc__,
        words,
        _directory=(Path, "a directory on the disk"),
        precision="bf16",
        stage=2,
        length=(128, "tokens of a step on each rank"),
        rounds=3,
        steps=4,
        json=Path,
    )
    runs = options.directory.resolve() / "zerokit-states-benchmark"
    measured: dict[str, list[list[dict[str, Any]]]] = {MEMORY: [], DISK: []}
    visits_ms = list[float]()

    def measure(name: str) -> float:
        """The median step of one training, in ms."""
        states = str(options.directory.resolve()) if name == DISK else "device"
        try:
            found: list[dict[str, Any]] = run_ranks(
                *(train, states, str(runs), options.stage, options.precision, options.length, options.steps),
                world=WORLD,
            )
        finally:
            shutil.rmtree(runs, ignore_errors=True)
        measured[name].append(found)
        if name == DISK:
            os.sync()
            rates = measure_disk(options.directory, shutil.disk_usage(options.directory).free)
            if rates is None:
                raise SystemExit(f"{options.directory}: too little is free to measure the disk")
            visits_ms.append(1e3 * rates.visit_seconds(sum(rank["disk"] for rank in found)))
        slowest: list[float] = [max(step) for step in zip(*(rank["steps_ms"] for rank in found), strict=True)]
        return median(slowest)

    steps_ms = in_rounds((MEMORY, DISK), options.rounds, measure)
    bound_ms = [max(pair) for pair in zip(steps_ms[MEMORY], visits_ms, strict=True)]
    rows = [
        [name, spread(times, 0), f"{ratio(times, steps_ms[MEMORY]):.2f}"]
        for name, times in (*steps_ms.items(), ("the states' way, by the disk's rates", visits_ms))
    ]
    size = f"GPT of {CONFIG.parameters / 1e6:.0f} M, {options.precision}, stage {options.stage}"
    print(plain_table(f"A step: {size}, {WORLD} gloo ranks", ["states", "ms", "÷ in memory"], rows))
    worst: dict[str, dict[str, int]] = {
        name: {
            key: max(rank[key] for run in found for rank in run) for key in found[0][0] if key != "steps_ms"
        }
        for name, found in measured.items()
    }
    own = worst[MEMORY]
    activations = max(0, own["peak"] - own["formula"])
    memory_rows = [
        [name, *(f"{one[key] / 1e6:,.0f}" for key in ("formula", "visiting", "disk", "peak", "peak_saved"))]
        for name, one in worst.items()
    ]
    columns = ["states", "formula", "visiting", "on disk", "peak of steps", "peak with save, load"]
    print()
    print(plain_table("A rank's memory, in MB", columns, memory_rows))
    losses = [rank["loss"] for found in measured.values() for run in found for rank in run]
    write_json(
        options.json, {"steps_ms": steps_ms, "visits_ms": visits_ms, "ranks": measured, "losses": losses}
    )
    elsewhere = worst[DISK]
    most = elsewhere["formula"] + elsewhere["visiting"] + activations + SLACK
    held = [
        bar_holds("a step ÷ max(in memory, the states' way)", ratio(steps_ms[DISK], bound_ms), STEP_BAR),
        bar_holds("the peak, in MB", elsewhere["peak_saved"] / 1e6, most / 1e6),
        len(set(losses)) == WORLD,
    ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
