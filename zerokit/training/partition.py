"""Divides samples of unequal cost among ranks and micro-batches, so that all of them take about as long.

Longest first, as in scheduling (Graham 1969): each sample goes to the bin that would be done first without it. Then
samples leave the bin that takes longest, or change places with smaller ones of another bin, while that helps.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Costs = NDArray[np.float64]
Bin = NDArray[np.int64]
"""Positions of samples."""

_MOST_MOVES = 200
_CANDIDATES = 256
"""Samples of a bin that are considered for a move."""
_CLOSE = 1e-3
"""Bins this much above the mean are as good as even: the real times of batches differ by more."""


def divide(costs: Costs, speeds: Sequence[float]) -> list[Bin]:
    """Positions of `costs` in bins, one for each of `speeds`, so that cost ÷ speed is as equal as it can be made.

    Each position is in one bin, ascending there. Equal arguments give equal bins, on every machine.
    """
    pace = np.asarray(speeds, dtype=np.float64)
    order = np.argsort(-costs, kind="stable")
    owners = _deal(costs, order, pace)
    _refine(costs, owners, pace)
    by_owner = np.argsort(owners, kind="stable")
    return np.split(by_owner, np.searchsorted(owners[by_owner], np.arange(1, len(pace))))


def share_out(
    costs: Costs, lengths: Costs, speeds: Sequence[float], count: int, most: float = math.inf
) -> list[list[Bin]]:
    """Micro-batches of ranks with these `speeds`, `count` on each, so that those of a time take all ranks as long.

    At stage 3 ranks wait for each other in every micro-batch. A sample that costs more than an even part of what is
    left makes a micro-batch of its own, beside which the other ranks get as much; the rest is divided evenly. There are
    as many samples as micro-batches, at least, and no micro-batch is empty. One of several samples beside such a long
    one has at most `most` of `lengths`; others have what an even division gives them.
    """
    pace = np.asarray(speeds, dtype=np.float64)
    ranks = range(len(pace))
    left = np.argsort(-costs, kind="stable")
    parts: list[list[Bin]] = [[] for _ in ranks]
    spent = np.zeros(len(pace))

    def give(rank: int, samples: Bin) -> None:
        parts[rank].append(np.sort(samples))
        spent[rank] += costs[samples].sum()

    while count > 1 and costs[left[0]] / pace.max() > (1 + _CLOSE) * costs[left].sum() / pace.sum() / count:
        count -= 1
        first = min(ranks, key=lambda rank: (-pace[rank], spent[rank]))
        time = costs[left[0]] / pace[first]
        give(first, left[:1])
        left = left[1:]
        others = [rank for rank in ranks if rank != first]
        for number, rank in enumerate(others, 1):
            spare = len(left) - count * len(pace) - (len(others) - number)
            taken = _filling(costs[left], lengths[left], time * pace[rank], most, spare)
            give(rank, left[taken])
            left = np.delete(left, taken)
    bins = [left[each] for each in divide(costs[left], [speed for speed in speeds for _ in range(count)])]
    _fill_empty(bins, costs)
    loads = [costs[each].sum() for each in bins]
    for speed in dict.fromkeys(speeds):
        alike = [rank for rank in ranks if speeds[rank] == speed]
        shared = [at for rank in alike for at in range(rank * count, (rank + 1) * count)]
        shared.sort(key=lambda at: -loads[at])
        for first in range(0, len(shared), len(alike)):
            waiting = sorted(alike, key=lambda rank: spent[rank])
            for rank, at in zip(waiting, shared[first : first + len(alike)], strict=True):
                give(rank, bins[at])
    return parts


def _filling(costs: Costs, lengths: Costs, room: float, most: float, spare: int) -> list[int]:
    """Positions of at most `spare` samples, of descending costs, that cost nearly `room` together; one at least."""
    taken: list[int] = []
    at, shortest, ascending = 0, lengths.min(), -costs
    while len(taken) < spare and (shortest <= most or not taken):
        at = max(at, int(np.searchsorted(ascending, -room)))  # the first that fits
        if at == len(costs):
            break
        if lengths[at] <= most or not taken:
            taken.append(at)
            room, most = room - costs[at], most - lengths[at]
        at += 1
    return taken or [len(costs) - 1]


def _fill_empty(bins: list[Bin], costs: Costs) -> None:
    """Give each empty bin the cheapest sample of the bin with the most, so that every rank has a batch."""
    for at, each in enumerate(bins):
        if not len(each):
            giver = max(range(len(bins)), key=lambda one: len(bins[one]))
            cheapest = int(costs[bins[giver]].argmin())
            bins[at], bins[giver] = bins[giver][cheapest : cheapest + 1], np.delete(bins[giver], cheapest)


def _deal(costs: Costs, order: Bin, pace: Costs) -> Bin:
    """The bin of each sample: the one that would be done first without it."""
    to = []
    heap = [(0.0, at) for at in range(len(pace))]
    speeds = pace.tolist()
    for cost in costs[order].tolist():
        time, at = heap[0]
        to.append(at)
        heapq.heapreplace(heap, (time + cost / speeds[at], at))
    owners = np.empty(len(costs), dtype=np.int64)
    owners[order] = to
    return owners


def _refine(costs: Costs, owners: Bin, pace: Costs) -> None:
    """Move samples out of the bin that takes longest, or exchange them for smaller ones, while it helps."""
    loads = np.bincount(owners, weights=costs, minlength=len(pace))
    ideal = costs.sum() / pace.sum()
    for _ in range(_MOST_MOVES):
        times = loads / pace
        longest = int(times.argmax())
        if times[longest] <= ideal * (1 + _CLOSE):
            return
        own = _candidates(owners, longest)
        for other in np.argsort(times, kind="stable").tolist():
            theirs = _candidates(owners, other)
            # What each sample of the bin, less each of the other one or nothing, would change.
            moved = costs[own][:, None] - np.append(costs[theirs], 0.0)[None, :]
            after = np.maximum((loads[longest] - moved) / pace[longest], (loads[other] + moved) / pace[other])
            best = int(after.argmin()) if other != longest and after.size else 0
            if other != longest and after.size and after.flat[best] < times[longest] * (1 - 1e-9):
                mine, back = divmod(best, len(theirs) + 1)
                owners[own[mine]] = other
                if back < len(theirs):
                    owners[theirs[back]] = longest
                loads[longest] -= moved.flat[best]
                loads[other] += moved.flat[best]
                break
        else:
            return


def _candidates(owners: Bin, at: int) -> Bin:
    members = np.flatnonzero(owners == at)
    return members[:: -(-len(members) // _CANDIDATES) or 1]
