"""How fast ranks compute, one alone and all of them at once, and how fast they read memory that is not their own.

Plans for hosts rest on it: the ranks of a machine share the bandwidth of its memory, and at times its cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from statistics import median
from threading import Thread
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.machine.host import write_first
from zerokit.bench.machine.speeds import Copies, Pace, Paces, UnitSpeeds

if TYPE_CHECKING:
    from zerokit.runtime.collectives import Collectives
    from zerokit.runtime.memory import UnitMemory

_SIDE = 512
_NUMEL = 1 << 22
"""Elements of each added array; the arrays together exceed the caches."""
_UNIT_NUMEL = 1 << 20
_PAGES = 1 << 12
_ROUNDS, _LONG_ENOUGH_S = 9, 0.05
_EXCHANGES_S = 0.3
_COPY_BYTES, _COPY_ROUNDS = 256 << 20, 5
_HOST = Accelerator(torch.device("cpu"), "gloo")


def measure_paces(group: dist.ProcessGroup) -> Paces:
    """Let rank 0 compute alone, and then all ranks together. All ranks of a gloo `group` call it."""
    arrays = [torch.rand(_NUMEL) for _ in range(3)]
    calls = (
        _product(),
        _block(),
        lambda: torch.add(*arrays[:2], out=arrays[2]),
        partial(write_first, _PAGES),
    )
    moved = sum(array.nbytes for array in arrays)
    alone, together = zip(*(_seconds_of(call, group) for call in calls), strict=True)
    slow = _pace([max(ranks) for ranks in together], moved)
    by_rank = [2 * _SIDE**3 / seconds / 1e9 for seconds in together[0]]
    return Paces(torch.get_num_threads(), _pace(alone, moved), slow, by_rank)


def _seconds_of(call: Callable[[], object], group: dist.ProcessGroup) -> tuple[float, list[float]]:
    """The time of one call on rank 0 alone, and of each rank, by turns: a machine's own speed drifts in between."""
    call()
    alone, together = [], []
    for _ in range(_ROUNDS):
        dist.barrier(group)
        alone.append(0.0 if group.rank() else _seconds(call))
        dist.barrier(group)
        together.append(_seconds(call))
    by_rank = [0.0] * group.size()
    dist.all_gather_object(by_rank, median(together), group=group)
    return _HOST.maximum([median(alone)], group)[0], by_rank


def _pace(seconds: Sequence[float], moved: int) -> Pace:
    products, block, addition, pages = seconds
    return Pace(2 * _SIDE**3 / products / 1e9, block * 1e3, moved / addition / 1e9, pages / _PAGES)


def _block() -> Callable[[], object]:
    block = nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
    inputs = torch.rand(256, 256)

    def run() -> None:
        block.zero_grad()
        block(inputs).square().mean().backward()

    return run


def _product() -> Callable[[], object]:
    left, right, product = (torch.rand(_SIDE, _SIDE) for _ in range(3))
    return lambda: torch.mm(left, right, out=product)


def _seconds(call: Callable[[], object]) -> float:
    """The time of one call, from as many as take long enough to be timed."""
    start, calls = time.perf_counter(), 0
    while (taken := time.perf_counter() - start) < _LONG_ENOUGH_S:
        call()
        calls += 1
    return taken / calls


def measure_units(group: dist.ProcessGroup, collectives: Collectives) -> UnitSpeeds | None:
    """Gather and reduce a unit among the ranks of each node; None where they do not read each other's memory.

    All ranks of `group`, over which `collectives` were made, call it.
    """
    from zerokit.layout import Interval, Parameter, Unit
    from zerokit.placement import Axis
    from zerokit.runtime.collectives.host.memory import MemoryRoute
    from zerokit.runtime.memory import unit_memory

    route = collectives.routes[Axis.INNER]
    if not isinstance(route, MemoryRoute):
        return None

    def own(unit: Unit) -> Interval:
        return collectives.mesh.cut(Axis.INNER, unit, collectives.rank).piece(route.rank)

    def memory_of(numel: int, *, fresh: bool = False) -> UnitMemory:
        unit = Unit.equal(0, (), (Parameter("unit", (numel,)),), collectives.world)
        return unit_memory(unit, own(unit), torch.float32, _HOST.device, comes_and_goes=fresh)

    small, whole, fresh = memory_of(1), memory_of(_UNIT_NUMEL), memory_of(_UNIT_NUMEL, fresh=True)
    bucket = whole.whole.like(torch.zeros(whole.whole.unit.numel))

    def gather(memory: UnitMemory) -> None:
        memory.grow()
        collectives.gather(memory.whole, axes=[Axis.INNER]).start().wait()
        collectives.wait_for_readers()
        memory.shrink()

    def reduce() -> None:
        collectives.reduction(bucket, bucket, axes=[Axis.INNER]).start().wait()

    latency, *seconds = (
        _HOST.seconds(call, group, rounds=2 * _ROUNDS, warmup=_ROUNDS)
        for call in (partial(gather, small), partial(gather, whole), partial(gather, fresh), reduce)
    )
    received = (route.size - 1) * own(bucket.unit).numel * bucket.dtype.itemsize
    return UnitSpeeds(latency, *(received / max(taken - latency, 1e-9) / 1e9 for taken in seconds))


def measure_slowdown(group: dist.ProcessGroup, exchange: Callable[[], object], seconds: float) -> float:
    """The part of its computing speed that a rank loses while it exchanges messages. All ranks of `group` call it.

    `exchange` makes one exchange, which takes so many `seconds` on every rank, and waits for it.
    """
    multiply = _product()
    dist.barrier(group)
    undisturbed = median(_seconds(multiply) for _ in range(_ROUNDS))
    dist.barrier(group)
    count = max(2, ceil(_EXCHANGES_S / seconds))
    exchanges = Thread(target=lambda: [exchange() for _ in range(count)])
    start, calls = time.perf_counter(), 0
    exchanges.start()
    while exchanges.is_alive():
        multiply()
        calls += 1
    taken = time.perf_counter() - start
    return _HOST.maximum([max(0.0, 1 - calls * undisturbed / taken)], group)[0]


def measure_copies(group: dist.ProcessGroup, accelerator: Accelerator) -> Copies:
    """Copy from and to pinned memory, each way and both at once. All ranks of `group` call it.

    Raises `RuntimeError` where the system pins no memory.
    """
    device = accelerator.device
    hosts = [torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    devices = [torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    ways = ((devices[0], hosts[0]), (hosts[1], devices[1]))
    streams = [torch.cuda.Stream(device) for _ in ways]

    def rate(*used: int) -> float:
        def copy() -> None:
            for way in used:
                target, source = ways[way]
                with torch.cuda.stream(streams[way]):
                    target.copy_(source, non_blocking=True)

        return _COPY_BYTES / accelerator.seconds(copy, group, rounds=_COPY_ROUNDS) / 1e9

    return Copies(rate(0), rate(1), rate(0, 1))
