"""What the bench's instruments cost: steps with and without them, interleaved, in one process a rank.

    python benchmarks/instrument_cost.py
    python benchmarks/instrument_cost.py --model gpt-5m --blocks 40 --interval 0.1

The only instrument that runs inside a timed step is the sampler's thread; clocks are read before and after a step,
and progress, phases, bandwidth and the record come between or after. Blocks of steps with and without the thread
follow each other in pairs, every second pair in reverse order, and the medians of a pair's blocks are compared.
Ends with 1 if the processor time that sampling takes exceeds one percent of the steps'.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerokit.bench.engines.trainer import Trainer
    from zerokit.bench.worker.training import Loop

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a file from a checkout that is not installed
    sys.path.insert(0, str(ROOT))

LIMIT = 0.01


@dataclass(frozen=True, slots=True)
class Cost:
    """What was measured on rank 0.

    Attributes:
        ratios: of each pair of blocks, median step with the sampler ÷ without.
        step_ms: the median step without it.
        sampling_share: processor time of the sampler ÷ duration of the blocks that it ran in.
        readings: taken in all.
    """

    ratios: list[float]
    step_ms: float
    sampling_share: float
    readings: int


def measure(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    """Train as `rank` of `world`; rank 0 writes `cost.json`."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    from zerokit.bench.engines.trainer import make
    from zerokit.bench.machine.place import Place
    from zerokit.bench.record.settings import Settings
    from zerokit.bench.worker.training import Loop
    from zerokit.bench.workloads.build import load

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(f"{folder}/store", world), rank=rank, world_size=world)
    settings = Settings(model=options.model, precision="fp32", device="cpu", nproc_per_node=world)
    place = Place(torch.device("cpu"), "gloo")
    loaded = load(settings)
    trainer = make(loaded, settings, place)
    loop = Loop(trainer, loaded, settings, place)
    for step in range(3):
        trainer.step(loop.batches(step))
    cost = run_pairs(trainer, loop, options, sampling=rank == 0)
    if rank == 0:
        Path(folder, "cost.json").write_text(json.dumps(asdict(cost)))
    dist.destroy_process_group()


def run_pairs(trainer: Trainer, loop: Loop, options: argparse.Namespace, *, sampling: bool) -> Cost:
    """All blocks on this rank; only one rank of a node samples."""
    from zerokit.bench.measure.sampler import Sampler

    ratios: list[float] = []
    without: list[float] = []
    cost_ms = sampled_ms = 0.0
    readings = 0
    for pair in range(options.blocks):
        medians = {}
        for instrumented in (True, False) if pair % 2 else (False, True):
            sampler = Sampler(options.interval) if instrumented and sampling else None
            times = []
            if sampler is not None:
                sampler.start()
            for number in range(options.steps):
                batches = loop.batches(number)
                started = time.perf_counter()
                trainer.step(batches)
                times.append((time.perf_counter() - started) * 1000.0)
            if sampler is not None:
                samples = sampler.stop()
                cost_ms, sampled_ms = cost_ms + samples.cost_ms, sampled_ms + sum(times)
                readings += len(samples.seconds)
            medians[instrumented] = statistics.median(times)
        ratios.append(medians[True] / medians[False])
        without.append(medians[False])
    share = cost_ms / sampled_ms if sampled_ms else 0.0
    return Cost(ratios, statistics.median(without), share, readings)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt-5m")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=20, help="pairs of blocks, with and without")
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two readings")
    options = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="zerokit-instruments-") as folder:
        ranks = [
            context.Process(target=measure, args=(rank, options.world, folder, options))
            for rank in range(options.world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            return 1
        cost = Cost(**json.loads(Path(folder, "cost.json").read_text()))
    low, middle, high = statistics.quantiles(cost.ratios, n=4) if len(cost.ratios) > 1 else cost.ratios * 3
    print(f"{options.model}, {options.world} ranks, steps of {cost.step_ms:.1f} ms, {cost.readings} readings")
    print(f"step with ÷ without the sampler: {middle:.4f} (quartiles {low:.4f} to {high:.4f})")
    print(f"processor time of the sampler: {100 * cost.sampling_share:.3f} % of the steps'")
    return 0 if cost.sampling_share <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
