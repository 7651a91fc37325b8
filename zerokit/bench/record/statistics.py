"""Statistics of a list of measurements, as records and tables show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean, median, stdev, variance

from zerokit.bench.record.schema import Count, Number

CONFIDENCE = 0.95
FEWEST = 6
"""The fewest values whose range is a 95 % interval of their median."""
# Warm-up is over when the medians of the last two windows of this many steps agree within the tolerance.
STEADY_WINDOW = 5
STEADY_TOLERANCE = 0.05
STEADY_LIMIT = 50


def quantile(values: Sequence[float], fraction: float) -> float:
    """The `fraction` quantile, linear between neighbours (numpy's default, type 7 of Hyndman and Fan)."""
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below, above = math.floor(position), math.ceil(position)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """A confidence interval of the median between two order statistics, whatever the distribution.

    The number of values below the true median is binomial(n, 1/2), so the k-th smallest and the k-th largest of n
    independent values enclose it with probability 1 − 2·P(X < k): the largest k that keeps `confidence`. Fewer than
    six values cannot reach 95 %: the interval is then their range. Steps that follow each other are not quite
    independent; compare repeated runs where that matters.
    """
    ordered, count = sorted(values), len(values)
    # Whole numbers: 2^count is no float from 1,024 values on.
    limit = Fraction(str(1 - confidence)).limit_denominator(10**6) * 2**count
    ways, tail, below = 1, 0, 0  # of choosing `below` values; P(X < below) · 2^count
    while below < count // 2 and 2 * (tail + ways) <= limit:
        tail += ways
        ways = ways * (count - below) // (below + 1)
        below += 1
    position = max(below - 1, 0)
    return ordered[position], ordered[count - 1 - position]


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean of independent values, and half of its 95 % interval by Student's t; at least two."""
    return fmean(values), _student(len(values) - 1) * stdev(values) / math.sqrt(len(values))


def difference_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """The difference of means, `after` minus `before`, and half of its 95 % interval by Student's t; two or more each.

    The variance is taken as equal on both sides, as it is where both ran on one machine: with three values each,
    Welch's interval would find a fifth less of what there is.
    """
    freedom = len(before) + len(after) - 2
    pooled = sum((len(values) - 1) * variance(values) for values in (before, after)) / freedom
    width = _student(freedom) * math.sqrt(pooled * (1 / len(before) + 1 / len(after)))
    return fmean(after) - fmean(before), width


def repeats_for(before: Sequence[float], after: Sequence[float], half_width: float) -> int | None:
    """The number of values per side that narrows the interval of `difference_interval` this far; None for over 50."""
    spread = math.sqrt(variance(before) + variance(after))
    enough = (n for n in range(2, 51) if _student(2 * n - 2) * spread / math.sqrt(n) <= half_width)
    return next(enough, None)


def _student(freedom: float) -> float:
    """The quantile of Student's t that 2.5 % exceed."""
    from scipy.special import stdtrit  # not at import: SciPy takes longer than all else of a command

    return float(stdtrit(freedom, (1.0 + CONFIDENCE) / 2))


def drift(values: Sequence[float]) -> float:
    """The rise from the first to the last value, as a share of the median: Theil and Sen's slope × length.

    0 for fewer than two values, or a median of 0.
    """
    middle = median(values) if values else 0.0
    if len(values) < 2 or middle == 0.0:
        return 0.0
    # Pairs at least half the length apart: the slope of near neighbours is noise, and n²/8 pairs do; of thousands of
    # values every k-th, since all pairs would take minutes and gigabytes.
    apart, stride = len(values) // 2, 1 + len(values) // 1000
    slopes = [
        (values[later] - values[earlier]) / (later - earlier)
        for earlier in range(0, len(values) - apart, stride)
        for later in range(earlier + apart, len(values), stride)
    ]
    return median(slopes) * (len(values) - 1) / middle


def steady(values: Sequence[float]) -> bool:
    """Whether warm-up may end after steps of these times.

    The first step is never looked at, and `STEADY_LIMIT` steps are enough however the times go.
    """
    if len(values) >= STEADY_LIMIT:
        return True
    if len(values) < 2 * STEADY_WINDOW + 1:
        return False
    before = median(values[-2 * STEADY_WINDOW : -STEADY_WINDOW])
    return abs(median(values[-STEADY_WINDOW:]) - before) <= STEADY_TOLERANCE * before


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of some measurements, in their own unit.

    `median_low` and `median_high` enclose the true median with 95 % confidence; of fewer than six values they are the
    least and the largest. `spread` is p90 − p10 and `drift` the rise from first to last, both as a share of the median.
    """

    count: Count
    mean: Number
    minimum: Number
    p10: Number
    p50: Number
    p90: Number
    p99: Number
    maximum: Number
    median_low: Number
    median_high: Number
    spread: Number
    drift: Number

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """The statistics of at least one value."""
        p10, p50, p90 = (quantile(values, fraction) for fraction in (0.1, 0.5, 0.9))
        low, high = median_interval(values)
        return cls(
            count=len(values),
            mean=math.fsum(values) / len(values),
            minimum=min(values),
            p10=p10,
            p50=p50,
            p90=p90,
            p99=quantile(values, 0.99),
            maximum=max(values),
            median_low=low,
            median_high=high,
            spread=(p90 - p10) / p50 if p50 else 0.0,
            drift=drift(values),
        )


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Each step's time on its slowest rank, for which the others wait."""
    return [max(step) for step in zip(*by_rank, strict=True)]


def skew(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Each step's difference between the slowest and the fastest rank."""
    return [max(step) - min(step) for step in zip(*by_rank, strict=True)]
