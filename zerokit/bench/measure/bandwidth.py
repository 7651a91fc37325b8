"""zerokit's collectives by themselves, at the size of its layout's largest unit, with nccl-tests' definitions.

They are timed after the training. What torch's reach on the same wire, `zerokit doctor` tells.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.machine.wire import bus_factor
from zerokit.bench.measure.clock import clock_of
from zerokit.bench.record.measured import Bandwidth

if TYPE_CHECKING:
    from zerokit.bench.engines.trainer import Trainer

WARMUP = 2
MOST, LEAST = 20, 3
BUDGET_S = 1.0
"""The most time of one collective: a slow wire gets fewer repetitions."""
_CALLS_ON_A_DEVICE = 10
"""Between two events."""


def bandwidth_of(operation: str, by: str, size_bytes: int, world: int, times_s: list[float]) -> Bandwidth:
    """The result from the slowest rank's times."""
    seconds = median(times_s)
    algorithm = size_bytes / seconds / 1e9
    bus = algorithm * bus_factor(operation, world)
    return Bandwidth(operation, by, size_bytes, seconds * 1000.0, algorithm, bus)


def measure_bandwidth(trainer: Trainer) -> list[Bandwidth]:
    """Time the collectives of zerokit's steps; empty for one rank and for other engines. Collective."""
    world, zero, accelerator = dist.get_world_size(), trainer.zero, trainer.accelerator
    if world == 1 or zero is None:
        return []
    from zerokit.runtime.collectives import Wire
    from zerokit.runtime.shards import Shards
    from zerokit.runtime.wires import Draws, make_wire

    collectives = zero.runtime.collectives
    unit = max(zero.layout.units, key=lambda unit: unit.numel)
    whole, bucket = (
        Shards(unit, torch.zeros(unit.numel, dtype=dtype, device=accelerator.device))
        for dtype in (zero.precision.compute, zero.precision.reduce)
    )
    wire = make_wire(zero.precision, Draws(0), unit.index) or Wire(bucket.dtype)

    def gather() -> None:
        collectives.gather(whole).start().wait()
        collectives.wait_for_readers()

    def reduce() -> None:
        collectives.reduction(bucket, bucket, wire=wire).start().wait()

    calls = {
        "all_gather": (whole.dtype.itemsize, gather),
        "reduce_scatter": (wire.nbytes(unit) / unit.payload_numel, reduce),
    }
    return [
        bandwidth_of(operation, "zerokit", round(unit.numel * bytes_each), world, _time(call, accelerator))
        for operation, (bytes_each, call) in calls.items()
    ]


def _time(call: Callable[[], object], accelerator: Accelerator) -> list[float]:
    """Seconds of each repetition on its slowest rank; ranks agree on how many there are.

    A device makes several calls between two events, behind a barrier, as nccl-tests does: single calls between two
    synchronisations would show the host's launches.
    """
    clock = clock_of(accelerator)
    calls = _CALLS_ON_A_DEVICE if clock.runs_ahead else 1

    def once() -> float:
        accelerator.maximum([0.0])
        clock.begin()
        for _ in range(calls):
            call()
        clock.end()
        return clock.read()[0] / 1000.0 / calls

    last_warmup = accelerator.maximum([once() for _ in range(WARMUP)])[-1]
    repetitions = max(LEAST, min(MOST, int(BUDGET_S / max(last_warmup * calls, 1e-9))))
    return accelerator.maximum([once() for _ in range(repetitions)])
