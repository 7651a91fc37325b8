"""Benchmarks whose rounds other processes measure, as ranks do, and which pytest-benchmark only puts into its tables.

    ranks, started once for all of a group             pytest
    round 1: zerokit, torch                            test_gather[zerokit]: replay(benchmark, times of zerokit)
    round 2: torch, zerokit        ── times ──►        test_gather[torch]:   replay(benchmark, times of torch)

All ranks do the same rounds and begin each at a barrier. A round takes as long as on its slowest rank. No message
between pytest and the ranks is inside a measured interval, and those of a group take turns in the same processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.measuring import in_rounds

_now = 0.0


def elsewhere() -> float:
    """The timer of these benchmarks: it goes on, in seconds, by what a round took where it was measured."""
    return _now


def replay(benchmark: BenchmarkFixture, seconds: Sequence[float]) -> None:
    """Give a benchmark, which has the timer `elsewhere`, the seconds of its rounds."""
    measured = iter(seconds)

    def one_round() -> None:
        global _now
        _now += next(measured)

    benchmark.pedantic(one_round, rounds=len(seconds))


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    rounds: int,
    before: Callable[[str], object] = lambda name: None,
) -> dict[str, list[float]]:
    """Seconds of each call on this rank, round by round, after one round that is not counted.

    `before` is called before each, outside of its time, and should end with a barrier of the ranks.
    """

    def measure(name: str) -> float:
        before(name)
        begun = time.perf_counter()
        calls[name]()
        return time.perf_counter() - begun

    return {name: times[1:] for name, times in in_rounds(list(calls), rounds + 1, measure).items()}


def slowest(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Each round's seconds on its slowest rank, from what `take_turns` returned on each rank."""
    return {
        name: [max(times) for times in zip(*(rank[name] for rank in by_rank), strict=True)]
        for name in by_rank[0]
    }
