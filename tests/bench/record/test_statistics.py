"""Statistics of known numbers."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerokit.bench.record.statistics import (
    STEADY_LIMIT,
    Summary,
    drift,
    median_interval,
    quantile,
    skew,
    slowest,
    steady,
)


def test_summary_of_a_hundred_and_one_numbers_is_known() -> None:
    summary = Summary.of([float(number) for number in range(100, -1, -1)])
    places = {"minimum": 0, "p10": 10, "p50": 50, "p90": 90, "p99": 99, "maximum": 100}
    others = {"count": 101, "mean": 50, "median_low": 40, "median_high": 60, "spread": 1.6, "drift": -2.0}
    assert asdict(summary) == places | others


@pytest.mark.parametrize(
    ("count", "place"), [(5, 0), (6, 0), (8, 0), (9, 1), (12, 2), (17, 4), (25, 7), (30, 9), (100, 39)]
)
def test_the_interval_of_the_median_has_the_tabulated_ranks(count: int, place: int) -> None:
    """Two-sided 95 % sign-test intervals: Conover, Practical Nonparametric Statistics, table of the binomial."""
    low, high = median_interval([float(number) for number in range(count)])
    assert (low, high) == (place, count - 1 - place)


@pytest.mark.parametrize("count", [1023, 1024, 5000])
def test_the_interval_of_thousands_of_values_is_the_binomials(count: int) -> None:
    """2^1024 is no float."""
    from scipy.stats import binom

    below = int(binom.ppf(0.025, count, 0.5)) - 1
    assert median_interval([float(number) for number in range(count)]) == (below, count - 1 - below)


def test_drift_is_the_rise_as_a_share_of_the_median() -> None:
    assert drift([100.0 + step for step in range(21)]) == pytest.approx(20 / 110)
    assert drift([5.0]) == 0.0
    outliers = [100.0] * 30
    outliers[3] = outliers[20] = 900.0
    assert drift(outliers) == 0.0


def test_warm_up_ends_when_the_medians_of_two_windows_agree() -> None:
    falling = [1000.0, 400.0, 300.0, 200.0, 150.0, 120.0, 110.0, 105.0, 100.0, 101.0, 99.0]
    assert not any(steady(falling[:count]) for count in range(len(falling) + 1))
    assert steady([*falling, 100.0, 102.0, 100.0, 99.0])
    assert steady([2.0**step for step in range(STEADY_LIMIT)])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_quantiles_are_numpys(values: list[float], fraction: float) -> None:
    assert quantile(values, fraction) == pytest.approx(
        float(np.quantile(values, fraction)), rel=1e-9, abs=1e-6
    )


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    by_rank = [[1.0, 5.0, 3.0], [2.0, 4.0, 3.0]]
    assert slowest(by_rank) == [2.0, 5.0, 3.0]
    assert skew(by_rank) == [1.0, 1.0, 0.0]
