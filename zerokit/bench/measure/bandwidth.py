"""Single collectives by themselves, after the training: nccl-tests' definitions of time and bandwidth.

zerokit's own are measured at the size of its layout's largest unit, torch's at the size of a bucket of DDP's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING

from zerokit.bench.record import Bandwidth

if TYPE_CHECKING:
    import torch

    from zerokit.bench.engines.trainer import Trainer
    from zerokit.bench.machine.accelerator import Accelerator
    from zerokit.bench.record.settings import Settings
    from zerokit.runtime import ZeroOptimizer

WARMUP = 2
MOST, LEAST = 20, 3
BUDGET_S = 1.0
"""Of one collective: a slow wire gets fewer repetitions."""

_TORCH_BUCKET_BYTES = 25 * 2**20
"""DDP's default."""

# What each peer's step consists of. The parameter server's messages are no collectives; compute-only has none.
_OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "ddp": ("all_reduce",),
    "zero-redundancy-optimizer": ("all_reduce", "broadcast"),
    "fsdp2": ("all_gather", "reduce_scatter"),
    "deepspeed": ("all_reduce", "all_gather", "reduce_scatter"),
}


def bus_factor(operation: str, world: int) -> float:
    """Bytes on the busiest rank's wire, in one direction, as a share of the buffer's.

    From nccl-tests' PERFORMANCE.md. Raises KeyError for an operation that has no such factor here.
    """
    part = (world - 1) / world
    return {"all_reduce": 2 * part, "all_gather": part, "reduce_scatter": part, "broadcast": 1.0}[operation]


def bandwidth_of(operation: str, by: str, size_bytes: int, world: int, times_s: list[float]) -> Bandwidth:
    """From the times of the slowest rank."""
    seconds = median(times_s)
    algorithm = size_bytes / seconds / 1e9
    return Bandwidth(
        operation, by, size_bytes, seconds * 1000.0, algorithm, algorithm * bus_factor(operation, world)
    )


def measure_bandwidth(
    trainer: Trainer, parameters: int, settings: Settings, accelerator: Accelerator
) -> list[Bandwidth]:
    """The collectives that the engine's steps consist of; empty for one rank. All ranks call it alike."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    if world == 1:
        return []
    if trainer.zero is not None:
        return _of_zerokit(trainer.zero, accelerator, world)
    dtype = torch.bfloat16 if settings.wire == "bf16" else torch.float32
    numel = min(_TORCH_BUCKET_BYTES // 4, parameters)
    numel = -(-numel // world) * world
    return [
        bandwidth_of(operation, "torch", numel * dtype.itemsize, world, _timed(call, accelerator))
        for operation in _OPERATIONS.get(settings.engine, ())
        for call in [torch_collective(operation, numel, accelerator, world, dtype)]
    ]


def _of_zerokit(zero: ZeroOptimizer, accelerator: Accelerator, world: int) -> list[Bandwidth]:
    import torch

    collectives = zero.parts.collectives
    unit = max(zero.layout.units, key=lambda unit: unit.numel)
    payload = unit.payload_numel
    whole = torch.zeros(unit.numel, dtype=zero.precision.compute, device=accelerator.device)
    bucket = torch.zeros(unit.numel, dtype=zero.precision.reduce, device=accelerator.device)
    own = bucket.view(world, -1)[collectives.rank]
    wire = zero.precision.wire or bucket.dtype

    def gather() -> None:
        collectives.all_gather(whole, unit.index, payload).wait()
        collectives.wait_for_readers()

    def reduce() -> None:
        collectives.reduce_scatter(bucket, own, unit.index, payload, add=False, wire=wire).wait()

    calls = {"all_gather": (whole.dtype, gather), "reduce_scatter": (wire, reduce)}
    return [
        bandwidth_of(operation, "zerokit", unit.numel * dtype.itemsize, world, _timed(call, accelerator))
        for operation, (dtype, call) in calls.items()
    ]


def torch_collective(
    operation: str, numel: int, accelerator: Accelerator, world: int, dtype: torch.dtype
) -> Callable[[], object]:
    """One of torch's over a buffer of `numel` elements, a multiple of `world`."""
    import torch
    import torch.distributed as dist

    whole = torch.zeros(numel, dtype=dtype, device=accelerator.device)
    own = torch.zeros(numel // world, dtype=dtype, device=accelerator.device)
    # torch 2.13 renamed both and warns about the old names.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: gather(whole, own),
        "reduce_scatter": lambda: scatter(own, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return calls[operation]


def _timed(call: Callable[[], object], accelerator: Accelerator) -> list[float]:
    """Seconds of each repetition on its slowest rank; ranks agree on how many there are."""
    import torch
    import torch.distributed as dist

    def once() -> float:
        accelerator.synchronize()
        started = time.perf_counter()
        call()
        accelerator.synchronize()
        return time.perf_counter() - started

    def slowest(times: list[float]) -> list[float]:
        values = torch.tensor(times, dtype=torch.float64, device=accelerator.device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return [float(value) for value in values.tolist()]

    last_warmup = slowest([once() for _ in range(WARMUP)])[-1]
    repetitions = max(LEAST, min(MOST, int(BUDGET_S / max(last_warmup, 1e-9))))
    return slowest([once() for _ in range(repetitions)])
