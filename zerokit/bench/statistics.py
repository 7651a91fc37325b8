"""What a list of measurements says, in the numbers that records and tables show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def quantile(values: Sequence[float], fraction: float) -> float:
    """The `fraction` quantile, linear between neighbours (numpy's default, type 7 of Hyndman and Fan).

    Raises ValueError for no values or a fraction outside [0, 1].
    """
    if not values or not 0.0 <= fraction <= 1.0:
        raise ValueError(f"a quantile needs values and a fraction in [0, 1], not {fraction} of {len(values)}")
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Summary:
    """Of some measurements, in their own unit."""

    count: int
    mean: float
    minimum: float
    p10: float
    p50: float
    p90: float
    p99: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Raises ValueError for no values."""
        return cls(
            count=len(values),
            mean=math.fsum(values) / max(1, len(values)),
            minimum=quantile(values, 0.0),
            p10=quantile(values, 0.1),
            p50=quantile(values, 0.5),
            p90=quantile(values, 0.9),
            p99=quantile(values, 0.99),
            maximum=quantile(values, 1.0),
        )


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Each step's time on the rank that took longest: nobody can start the next one earlier.

    Raises ValueError when ranks measured different numbers of steps.
    """
    return [max(step) for step in zip(*by_rank, strict=True)]


def skew(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Each step's difference between the slowest and the fastest rank."""
    return [max(step) - min(step) for step in zip(*by_rank, strict=True)]
