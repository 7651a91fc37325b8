"""Single collectives, timed after the training with nccl-tests' definitions of time and bandwidth.

zerokit's own are measured at the size of its layout's largest unit, torch's at the size of a bucket of DDP's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.measure.clock import clock_of
from zerokit.bench.record.measured import Bandwidth

if TYPE_CHECKING:
    from zerokit.bench.engines.trainer import Trainer
    from zerokit.runtime import ZeroOptimizer

WARMUP = 2
MOST, LEAST = 20, 3
BUDGET_S = 1.0
"""The most time of one collective: a slow wire gets fewer repetitions."""
_CALLS_ON_A_DEVICE = 10
"""Between two events."""

_TORCH_BUCKET_BYTES = 25 * 2**20
"""DDP's default."""

# What each peer's step consists of. The parameter server's messages are no collectives; compute-only has none.
_OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "ddp": ("all_reduce",),
    "post-local-sgd": ("all_reduce",),
    "zero-redundancy-optimizer": ("all_reduce", "broadcast"),
    "fsdp2": ("all_gather", "reduce_scatter"),
    "deepspeed": ("all_reduce", "all_gather", "reduce_scatter"),
}
_Call = tuple[float, Callable[[], object]]
"""Bytes of an element on the wire, and the collective."""


def bus_factor(operation: str, world: int) -> float:
    """Bytes that the busiest rank sends, relative to the buffer's size: from nccl-tests' PERFORMANCE.md."""
    part = (world - 1) / world
    return {"all_reduce": 2 * part, "all_gather": part, "reduce_scatter": part, "broadcast": 1.0}[operation]


def bandwidth_of(operation: str, by: str, size_bytes: int, world: int, times_s: list[float]) -> Bandwidth:
    """The result from the slowest rank's times."""
    seconds = median(times_s)
    algorithm = size_bytes / seconds / 1e9
    bus = algorithm * bus_factor(operation, world)
    return Bandwidth(operation, by, size_bytes, seconds * 1000.0, algorithm, bus)


def measure_bandwidth(trainer: Trainer, parameters: int) -> list[Bandwidth]:
    """Time the collectives that the engine's steps use; empty for one rank. Collective."""
    world, settings, accelerator = dist.get_world_size(), trainer.settings, trainer.accelerator
    if world == 1:
        return []
    if trainer.zero is not None:
        by, (numel, calls) = "zerokit", _zerokits(trainer.zero, world, accelerator)
        operations = tuple(calls)
    else:
        numel = -(-min(_TORCH_BUCKET_BYTES // 4, parameters) // world) * world
        by, operations = "torch", _OPERATIONS.get(settings.engine, ())
        if not operations:
            return []
        dtype = torch.bfloat16 if settings.wire == "bf16" else torch.float32
        calls = _torchs(numel, world, dtype, accelerator)
    return [
        bandwidth_of(operation, by, round(numel * element_bytes), world, _time(call, accelerator))
        for operation in operations
        for element_bytes, call in [calls[operation]]
    ]


def _zerokits(zero: ZeroOptimizer, world: int, accelerator: Accelerator) -> tuple[int, dict[str, _Call]]:
    """The elements of the largest unit, and zerokit's collectives over it."""
    from zerokit.runtime.collectives import Wire
    from zerokit.runtime.collectives.quantised import QuantisedWire, rounding_key

    collectives = zero.runtime.collectives
    unit = max(zero.layout.units, key=lambda unit: unit.numel)
    whole = torch.zeros(unit.numel, dtype=zero.precision.compute, device=accelerator.device)
    bucket = torch.zeros(unit.numel, dtype=zero.precision.reduce, device=accelerator.device)
    own = bucket.view(world, -1)[collectives.position]
    wire = Wire(bucket.dtype)
    if zero.precision.blocks is not None:
        wire = QuantisedWire(zero.precision.blocks, key=rounding_key(0))
    elif isinstance(zero.precision.wire, torch.dtype):
        wire = Wire(zero.precision.wire)

    def gather() -> None:
        collectives.all_gather(unit, whole).wait()
        collectives.wait_for_readers()

    def reduce() -> None:
        collectives.reduce_scatter(unit, bucket, own, add=False, wire=wire).wait()

    return unit.numel, {
        "all_gather": (whole.dtype.itemsize, gather),
        "reduce_scatter": (wire.nbytes(unit) / unit.payload_numel, reduce),
    }


def _torchs(numel: int, world: int, dtype: torch.dtype, accelerator: Accelerator) -> dict[str, _Call]:
    """Torch's collectives over a buffer of `numel` elements, a multiple of `world`."""
    whole = torch.zeros(numel, dtype=dtype, device=accelerator.device)
    own = torch.zeros(numel // world, dtype=dtype, device=accelerator.device)
    # torch 2.13 renamed both and warns about the old names.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return {
        "all_reduce": (dtype.itemsize, lambda: dist.all_reduce(whole)),
        "all_gather": (dtype.itemsize, lambda: gather(whole, own)),
        "reduce_scatter": (dtype.itemsize, lambda: scatter(own, whole)),
        "broadcast": (dtype.itemsize, lambda: dist.broadcast(whole, 0)),
    }


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
