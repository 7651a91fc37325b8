"""Divides samples of unequal cost among ranks and micro-batches, so that all of them take about as long.

Longest first, as in scheduling (Graham 1969): each sample goes to the bin that would be done first without it. Then
samples leave the bin that takes longest, or change places with smaller ones of another bin, while that helps.
"""

from __future__ import annotations

import heapq
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
