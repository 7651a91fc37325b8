"""What the bench's instruments cost: steps with and without them, interleaved, in one process a rank.

    python benchmarks/instrument_cost.py
    python benchmarks/instrument_cost.py --model gpt-5m --blocks 40 --interval 0.1

The only instrument that runs inside a timed step is the sampler's thread; clocks are read before and after a step,
and progress, phases, bandwidth and the record come between or after. Blocks of steps with and without the thread
follow each other in pairs, every second pair in reverse order, and the medians of a pair's blocks are compared.
Ends with 1 if the processor time that sampling takes exceeds one percent of the steps'.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import in_rounds, make_parser
from benchmarks.ranks import run_ranks
from zerokit.bench.engines.trainer import make
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.measure.sampler import Sampler
from zerokit.bench.sweeps.cells import product
from zerokit.bench.worker.training import Loop
from zerokit.bench.workloads.build import load

LIMIT = 0.01
WITH, WITHOUT = "with the sampler", "without"


def measure(model: str, blocks: int, steps: int, interval: float) -> dict[str, Any]:
    """All blocks on this rank: the median step of each, with and without; what sampling took and how often it read.

    Only one rank of a node samples.
    """
    options: dict[str, list[str] | list[int]] = {
        "model": [model],
        "precision": ["fp32"],
        "nproc_per_node": [dist.get_world_size()],
    }
    (settings,) = product(options, {"device": "cpu"})
    accelerator = Accelerator(torch.device("cpu"), "gloo")
    loaded = load(settings)
    trainer = make(loaded, settings, accelerator)
    loop = Loop(trainer, loaded, settings, accelerator)
    for step in range(3):
        trainer.step(loop.batches(step))
    cost_ms = sampled_ms = 0.0
    readings = 0

    def run_block(which: str) -> float:
        nonlocal cost_ms, sampled_ms, readings
        sampler = Sampler(interval) if which == WITH and dist.get_rank() == 0 else None
        times = []
        if sampler is not None:
            sampler.start()
        for number in range(steps):
            batches = loop.batches(number)
            started = time.perf_counter()
            trainer.step(batches)
            times.append((time.perf_counter() - started) * 1000.0)
        if sampler is not None:
            samples = sampler.stop()
            cost_ms, sampled_ms = cost_ms + samples.cost_ms, sampled_ms + sum(times)
            readings += len(samples.seconds)
        return median(times)

    medians = in_rounds([WITHOUT, WITH], blocks, run_block, progress=False)
    return {**medians, "share": cost_ms / sampled_ms if sampled_ms else 0.0, "readings": readings}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="gpt-5m")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks, with and without")
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two readings")
    options = parser.parse_args(arguments)
    run = (options.model, options.blocks, options.steps, options.interval)
    cost = run_ranks(measure, *run, world=options.world)[0]
    ratios = [one / other for one, other in zip(cost[WITH], cost[WITHOUT], strict=True)]
    low, middle, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    step_ms = median(cost[WITHOUT])
    print(f"{options.model}, {options.world} ranks, steps of {step_ms:.1f} ms, {cost['readings']} readings")
    print(f"step with ÷ without the sampler: {middle:.4f} (quartiles {low:.4f} to {high:.4f})")
    print(f"processor time of the sampler: {100 * cost['share']:.3f} % of the steps'")
    return 0 if cost["share"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
