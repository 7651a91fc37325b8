"""Measurements of the network: an all-reduce over all ranks, and exchanges along each axis and between nodes.

Times and bandwidths are by nccl-tests' definitions: the slowest rank's time, bytes on the busiest wire one way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist

from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.machine.computing import measure_slowdown
from zerokit.bench.machine.speeds import AllReduce, AxisLink, Pair, UnitSpeeds

SMALL_BYTES, LARGE_BYTES = 2**20, 2**24
FAST_S = 0.05
"""The large size follows where the small one took less than this: 20 MB/s and up."""
REPETITIONS = 5


def bus_factor(operation: str, world: int) -> float:
    """Bytes that the busiest rank sends, relative to the buffer's size: from nccl-tests' PERFORMANCE.md."""
    part = (world - 1) / world
    return {"all_reduce": 2 * part, "all_gather": part, "reduce_scatter": part, "broadcast": 1.0}[operation]


def measure_all_reduce(group: dist.ProcessGroup, accelerator: Accelerator) -> AllReduce | None:
    """Measure the all-reduce; None for one rank. Collective."""
    world, rank = group.size(), group.rank()
    if world == 1:
        return None

    def once(size_bytes: int) -> tuple[float, bool]:
        # Small whole numbers, so that the sum is exact in any order.
        pattern = torch.arange(size_bytes // 4, device=accelerator.device) % 7
        buffer = (pattern + rank).float()
        seconds = accelerator.seconds(
            partial(dist.all_reduce, buffer, group=group), group, rounds=1, warmup=0
        )
        expected = (pattern * world + world * (world - 1) // 2).float()
        return seconds, accelerator.maximum([not torch.equal(buffer, expected)], group) == [0.0]

    once(SMALL_BYTES)  # makes connections
    first = once(SMALL_BYTES)
    size = LARGE_BYTES if first[0] < FAST_S else SMALL_BYTES
    rounds = [once(size) for _ in range(REPETITIONS)]
    taken = median(seconds for seconds, _ in rounds)
    bus = size / taken / 1e9 * bus_factor("all_reduce", world)
    return AllReduce(size, taken, bus, accelerator.backend, all(right for _, right in (first, *rounds)))


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages between this rank and rank `other` of `group`, while other ranks exchange theirs; none with None."""

    other: int | None
    group: dist.ProcessGroup
    accelerator: Accelerator

    def of(self, size_bytes: int) -> Callable[[], None]:
        """A call that exchanges messages of so many bytes."""
        other, device = self.other, self.accelerator.device
        if other is None:
            return lambda: None
        outgoing, incoming = (torch.zeros(size_bytes // 4, device=device) for _ in range(2))

        def swap() -> None:
            operations = [  # receives come first: gloo may receive nothing while it sends
                dist.P2POp(dist.irecv, incoming, other, self.group),
                dist.P2POp(dist.isend, outgoing, other, self.group),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return swap

    def seconds(self, size_bytes: int) -> float:
        """The time of such an exchange. Collective."""
        return self.accelerator.seconds(self.of(size_bytes), self.group, rounds=REPETITIONS)

    def much(self) -> tuple[int, float]:
        """The size of messages, larger where the wire is fast, and the time of an exchange. Collective."""
        seconds = self.seconds(SMALL_BYTES)
        return (LARGE_BYTES, self.seconds(LARGE_BYTES)) if seconds < FAST_S else (SMALL_BYTES, seconds)


def measure_axes(
    group: dist.ProcessGroup,
    accelerator: Accelerator,
    nodes: Sequence[Sequence[int]],
    units: UnitSpeeds | None,
) -> list[AxisLink]:
    """Measure every axis of more than one rank; `nodes` are the ranks of each, `units` measured among these.

    All ranks of `group` call it; times are the slowest rank's.
    """
    links = []
    for axis, lines in (("inner", nodes), ("outer", list(zip(*nodes, strict=False)))):
        longest = max(map(len, lines))
        if longest == 1:
            continue
        exchange = Exchange(neighbour(group.rank(), lines), group, accelerator)
        latency = exchange.seconds(4)
        size, seconds = exchange.much()
        on_host = accelerator.device.type == "cpu"
        slowdown = measure_slowdown(group, exchange.of(size), seconds) if on_host else None
        inside = units if axis == "inner" else None
        links.append(AxisLink(axis, longest, latency, size / seconds / 1e9, size, slowdown, inside))
    return links


def measure_pairs(
    group: dist.ProcessGroup, accelerator: Accelerator, nodes: Sequence[Sequence[int]]
) -> list[Pair]:
    """Measure every pair of nodes, one after the other, by their first ranks. All ranks of `group` call it."""
    pairs = []
    for first, second in combinations(range(len(nodes)), 2):
        other = neighbour(group.rank(), [[nodes[first][0], nodes[second][0]]])
        size, seconds = Exchange(other, group, accelerator).much()
        pairs.append(Pair(first, second, size, seconds, size / seconds / 1e9))
    return pairs


def neighbour(rank: int, lines: Sequence[Sequence[int]]) -> int | None:
    """The partner of `rank` on its line; None for the last of an odd number, and if it is on no line."""
    for line in lines:
        if rank in line:
            at = line.index(rank) ^ 1
            return line[at] if at < len(line) else None
    return None
