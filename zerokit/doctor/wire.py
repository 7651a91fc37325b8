"""Measurements of the network: an all-reduce over all ranks, and exchanges along each axis and between nodes.

Times and bandwidths are by nccl-tests' definitions: the slowest rank's time, bytes on the busiest wire one way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

from zerokit.doctor.findings import Seat, Verdict
from zerokit.doctor.pace import UnitSpeeds, measure_slowdown, slowest

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from zerokit.bench.machine.accelerator import Accelerator

SMALL_BYTES, LARGE_BYTES = 2**20, 2**24
FAST_S = 0.05
"""The large size follows where the small one took less than this: 20 MB/s and up."""
REPETITIONS = 5
SLOW_GB_PER_S = 0.1
"""Gigabit Ethernet gives 0.118."""
SHARE_OF_LINK = 0.25
"""The least share of the speed that the interface promises."""
SLOW_PAIR = 0.5
"""A pair is slow below this share of the fastest pair's bandwidth."""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """An all-reduce of one size: the slowest rank's median time, and whether every sum was right."""

    size_bytes: int
    time_s: float
    bus_gb_per_s: float
    backend: str
    correct: bool


@dataclass(frozen=True, slots=True)
class Pair:
    """Two nodes that send to each other at the same time; bandwidth is per direction."""

    first: int
    second: int
    size_bytes: int
    time_s: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class AxisLink:
    """Exchanges between neighbours on one axis, all at the same time as in training.

    Attributes:
        axis: "inner", the ranks of a node, or "outer", ranks with the same position on different nodes.
        ranks: how many ranks the axis has.
        latency_s: the time of an exchange of four bytes.
        gb_per_s: bytes that each rank sends, and receives, in a second, in 10^9.
        size_bytes: of the messages that gave the bandwidth.
        slowdown: the part of a host's computing speed that an exchange takes while it is in flight; None on devices.
        units: collectives of zerokit where the ranks of a node read each other's memory; None elsewhere.
    """

    axis: str
    ranks: int
    latency_s: float
    gb_per_s: float
    size_bytes: int
    slowdown: float | None = None
    units: UnitSpeeds | None = None


def measure_axes(
    group: dist.ProcessGroup, accelerator: Accelerator, seats: Sequence[Seat], units: UnitSpeeds | None
) -> list[AxisLink]:
    """Measure every axis of more than one rank; `units` were measured among the ranks of a node.

    All ranks of `group` call it; times are the slowest rank's.
    """
    import torch

    nodes: dict[int, list[int]] = {}
    for seat in seats:
        nodes.setdefault(seat.node, []).append(seat.rank)
    lines = {
        "inner": list(nodes.values()),
        "outer": [list(line) for line in zip(*nodes.values(), strict=False)],
    }

    links = []
    for axis, members in lines.items():
        longest = max(map(len, members))
        if longest == 1:
            continue
        other = neighbour(group.rank(), members)
        latency = _exchange(group, accelerator, other, 4)
        size, seconds = _exchange_much(group, accelerator, other)
        slowdown = None
        if accelerator.device.type == "cpu":
            buffers = (torch.zeros(size // 4), torch.zeros(size // 4))
            slowdown = measure_slowdown(
                group, (lambda: None) if other is None else partial(_swap, *buffers, other, group), seconds
            )
        inside = units if axis == "inner" else None
        links.append(AxisLink(axis, longest, latency, size / seconds / 1e9, size, slowdown, inside))
    return links


def neighbour(rank: int, lines: Sequence[Sequence[int]]) -> int | None:
    """The partner of `rank` on its line; None for the last of an odd number, and if it is on no line."""
    for line in lines:
        if rank in line:
            at = line.index(rank) ^ 1
            return line[at] if at < len(line) else None
    return None


def measure_all_reduce(group: dist.ProcessGroup, accelerator: Accelerator) -> AllReduce | None:
    """Measure the all-reduce; None for one rank. Collective."""
    import torch
    import torch.distributed as dist

    from zerokit.bench.measure.bandwidth import bus_factor

    world, rank = group.size(), group.rank()
    if world == 1:
        return None

    device = accelerator.device

    def timed(size_bytes: int) -> tuple[float, bool]:
        buffer = torch.empty(size_bytes // 4, device=accelerator.device)
        # Small whole numbers, so that the sum is exact in any order.
        pattern = torch.arange(buffer.numel(), device=accelerator.device) % 7
        buffer.copy_(pattern + rank)
        seconds = _timed(lambda: dist.all_reduce(buffer, group=group), accelerator)
        expected = pattern * world + world * (world - 1) // 2
        wrong = float(not torch.equal(buffer, expected.to(buffer.dtype)))
        return slowest(group, seconds, device), slowest(group, wrong, device) == 0

    timed(SMALL_BYTES)  # makes connections
    first, correct = timed(SMALL_BYTES)
    size = LARGE_BYTES if first < FAST_S else SMALL_BYTES
    times = []
    for _ in range(REPETITIONS):
        seconds, right = timed(size)
        times.append(seconds)
        correct = correct and right
    taken = median(times)
    bus = size / taken / 1e9 * bus_factor("all_reduce", world)
    return AllReduce(size, taken, bus, accelerator.backend, correct)


def measure_pairs(group: dist.ProcessGroup, accelerator: Accelerator, leaders: Sequence[int]) -> list[Pair]:
    """Measure every pair of nodes, one after the other. All ranks of `group` call it.

    `leaders` are the first rank of each node, which sends and receives for it.
    """
    pairs = []
    for first, second in combinations(range(len(leaders)), 2):
        other = neighbour(group.rank(), [[leaders[first], leaders[second]]])
        size, seconds = _exchange_much(group, accelerator, other)
        pairs.append(Pair(first, second, size, seconds, size / seconds / 1e9))
    return pairs


def _exchange_much(
    group: dist.ProcessGroup, accelerator: Accelerator, other: int | None
) -> tuple[int, float]:
    """The size of messages, larger where the wire is fast, and the time of an exchange."""
    size = LARGE_BYTES if _exchange(group, accelerator, other, SMALL_BYTES) < FAST_S else SMALL_BYTES
    return size, _exchange(group, accelerator, other, size)


def _exchange(
    group: dist.ProcessGroup, accelerator: Accelerator, other: int | None, size_bytes: int
) -> float:
    """The time of an exchange with `other`, the slowest rank's median. Collective."""
    import torch
    import torch.distributed as dist

    outgoing, incoming = (torch.zeros(size_bytes // 4, device=accelerator.device) for _ in range(2))
    times = []
    for _ in range(REPETITIONS + 1):  # the first makes connections
        dist.barrier(group)
        if other is not None:
            times.append(_timed(lambda: _swap(outgoing, incoming, other, group), accelerator))
    return slowest(group, median(times[1:]) if times else 0.0, accelerator.device)


def _swap(outgoing: torch.Tensor, incoming: torch.Tensor, other: int, group: dist.ProcessGroup) -> None:
    import torch.distributed as dist

    operations = [  # receives come first: gloo may receive nothing while it sends
        dist.P2POp(dist.irecv, incoming, other, group),
        dist.P2POp(dist.isend, outgoing, other, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def _timed(call: Callable[[], object], accelerator: Accelerator) -> float:
    accelerator.synchronize()
    started = time.perf_counter()
    call()
    accelerator.synchronize()
    return time.perf_counter() - started


def judge_all_reduce(measured: AllReduce | None, link_mbit: int | None) -> Verdict:
    """ZD701; `link_mbit` is what the interface between machines promises, None where unknown, or on one machine."""
    if measured is None:
        return Verdict.skipped("one rank: nothing to send")
    listed = (
        f"{measured.bus_gb_per_s:.2f} GB/s bus bandwidth, {measured.size_bytes / 2**20:g} MiB in "
        f"{measured.time_s * 1000:.1f} ms ({measured.backend})"
    )
    if not measured.correct:
        return Verdict.fault(
            f"a wrong sum; {listed}",
            "Ranks do not get what they should: gradients would be wrong silently.",
            "try other memory, cards or cables; test with NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1",
        )
    remedy = "check the interface in use (ZD301, ZD302), MTU, load and other traffic; try --pairs"
    link = None if link_mbit is None else link_mbit / 8000
    if link is not None and measured.bus_gb_per_s < SHARE_OF_LINK * link:
        return Verdict.warning(
            listed,
            f"Less than a quarter of the {link:.2f} GB/s that the interface promises.",
            remedy,
        )
    if measured.bus_gb_per_s < SLOW_GB_PER_S:
        return Verdict.warning(listed, "Slower than gigabit Ethernet: steps will wait for gradients.", remedy)
    return Verdict.ok(listed)


def judge_pairs(pairs: Sequence[Pair], seats: Sequence[Seat]) -> Verdict:
    """ZD702, for one pair or more."""
    hosts = {seat.node: seat.host for seat in seats}
    fastest = max(pairs, key=lambda pair: pair.gb_per_s)
    slow = [pair for pair in pairs if pair.gb_per_s < SLOW_PAIR * fastest.gb_per_s]
    slow.sort(key=lambda pair: pair.gb_per_s)
    if not slow:
        slowest = min(pair.gb_per_s for pair in pairs)
        speeds = f"{slowest:.2f} to {fastest.gb_per_s:.2f}" if len(pairs) > 1 else f"{slowest:.2f}"
        number = f"{len(pairs)} pairs" if len(pairs) > 1 else "one pair, nothing to compare"
        return Verdict.ok(f"{number}: {speeds} GB/s in each direction")
    worst = slow[0]
    listed = (
        f"nodes {worst.first} ({hosts[worst.first]}) and {worst.second} ({hosts[worst.second]}): "
        f"{worst.gb_per_s:.3g} GB/s; the fastest pair, {fastest.first} and {fastest.second}: {fastest.gb_per_s:.3g}"
    )
    common = set.intersection(*({pair.first, pair.second} for pair in slow))
    if len(slow) > 1 and len(common) == 1:
        node = common.pop()
        # All pairs with this node are slow, and no others: the node is, and not a link between two.
        meaning = f"All {len(slow)} slow pairs have node {node} ({hosts[node]}): it holds up every ring."
        remedy = (
            f"look at the cable, the port and the interface of node {node} ({hosts[node]}), or leave it out"
        )
    else:
        meaning = (
            f"{len(slow)} of {len(pairs)} pairs are less than half as fast as the fastest: rings wait there."
        )
        remedy = "look at the link between these nodes, or choose nodes that are closer to each other"
    return Verdict.warning(listed, meaning, remedy)
