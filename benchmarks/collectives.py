"""The runtime's gloo collectives against gloo's own, two ranks, fp32.

python benchmarks/collectives.py
python benchmarks/collectives.py --rounds 30 --megabytes 1 8
"""

from __future__ import annotations

import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import in_rounds, make_parser, plain_table, spread
from benchmarks.ranks import run_ranks
from zerokit.layout import Parameter, Unit
from zerokit.runtime.collectives import Collectives, make_collectives

WARMUP = 2


def _unit(collectives: Collectives, whole: Tensor) -> Unit:
    return Unit(0, (), (Parameter("whole", (whole.numel(),)),), collectives.world)


def zerokit_all_gather(collectives: Collectives, whole: Tensor) -> None:
    collectives.all_gather(_unit(collectives, whole), whole).wait()
    collectives.wait_for_readers()


def zerokit_reduce_scatter(collectives: Collectives, bucket: Tensor) -> None:
    own = bucket.view(collectives.world, -1)[collectives.rank]
    collectives.reduce_scatter(_unit(collectives, bucket), bucket, own, add=False).wait()


def gloo_all_gather(collectives: Collectives, whole: Tensor) -> None:
    dist.all_gather_into_tensor(whole, whole.view(collectives.world, -1)[collectives.rank].clone())


def gloo_reduce_scatter(collectives: Collectives, bucket: Tensor) -> None:
    dist.reduce_scatter_tensor(bucket.new_empty(bucket.numel() // collectives.world), bucket)


def gloo_all_reduce(collectives: Collectives, bucket: Tensor) -> None:
    """What DDP pays for a bucket; the sum is halved each time so that it stays finite."""
    dist.all_reduce(bucket, op=dist.ReduceOp.SUM)
    bucket.mul_(0.5)


OPERATIONS = {
    function.__name__.replace("_", " "): function
    for function in (
        *(zerokit_all_gather, gloo_all_gather, zerokit_reduce_scatter, gloo_reduce_scatter),
        gloo_all_reduce,
    )
}


def measure(megabytes: int, rounds: int) -> tuple[str, dict[str, list[float]]]:
    """How zerokit's travel, and milliseconds of each operation on buffers of this size, on this rank."""
    warnings.simplefilter("ignore", FutureWarning)  # names that torch 2.13 has changed
    group: Any = dist.group.WORLD
    collectives = make_collectives(group, torch.device("cpu"), timedelta(seconds=60), units=1)
    buffers = {name: torch.ones(megabytes * 250_000 // 128 * 128) for name in OPERATIONS}

    def once(name: str) -> float:
        started = time.perf_counter()
        OPERATIONS[name](collectives, buffers[name])
        return (time.perf_counter() - started) * 1e3

    found = in_rounds(list(OPERATIONS), WARMUP + rounds, once, progress=False)
    return collectives.route, {name: times[WARMUP:] for name, times in found.items()}


def main() -> None:
    """A table a size."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[1, 8, 32])
    options = parser.parse_args()
    for megabytes in options.megabytes:
        route, found = run_ranks(measure, megabytes, options.rounds)[0]
        rows = [[name, spread(times, 2)] for name, times in found.items()]
        print(plain_table(f"{megabytes} MB, zerokit's through {route}", ["", "ms (min–max)"], rows))


if __name__ == "__main__":
    main()
