"""Benchmarks that take turns with their peers, and which pytest-benchmark only puts into its tables.

    ranks, or pytest at the first test of a group      pytest
    round 1: zerokit, torch                            test_gather[zerokit]: replay(benchmark, times of zerokit)
    round 2: torch, zerokit        ── times ──►        test_gather[torch]:   replay(benchmark, times of torch)

So a machine that is slow for a while is so for all of a group. Ranks start once for a group, do the same rounds and
begin each at a barrier. A round takes as long as on its slowest rank. No message between pytest and the ranks is inside
a measured interval.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.measuring import in_rounds

InTurns = Callable[..., None]
"""Measures a benchmark and its peers: the fixture `in_turns`."""
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
    seconds: float = 0.0,
) -> dict[str, list[float]]:
    """Seconds of each call on this rank, round by round, after one round that is not counted.

    `before` is called before each, outside of its time, and should end with a barrier of the ranks. There are more than
    `rounds` where all take less than these `seconds` a call, which is for one process: ranks would not agree.
    """

    def measure(name: str) -> float:
        before(name)
        begun = time.perf_counter()
        calls[name]()
        return time.perf_counter() - begun

    once = sum(times[0] for times in in_rounds(list(calls), 1, measure).values())
    return in_rounds(list(calls), max(rounds, int(seconds * len(calls) / once)), measure)


def slowest(by_rank: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Each round's seconds on its slowest rank, from what `take_turns` returned on each rank."""
    return {
        name: [max(times) for times in zip(*(rank[name] for rank in by_rank), strict=True)]
        for name in by_rank[0]
    }
