"""Statistics of known numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerokit.bench.statistics import Summary, quantile, skew, slowest


def test_summary_of_a_hundred_and_one_numbers_is_known() -> None:
    summary = Summary.of([float(number) for number in range(100, -1, -1)])
    assert summary == Summary(count=101, mean=50, minimum=0, p10=10, p50=50, p90=90, p99=99, maximum=100)


def test_quantiles_lie_between_neighbours() -> None:
    assert quantile([4.0, 1.0], 0.25) == 1.75
    assert quantile([7.0], 0.9) == 7.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 1))
def test_quantiles_are_numpys(values: list[float], fraction: float) -> None:
    assert quantile(values, fraction) == pytest.approx(
        float(np.quantile(values, fraction)), rel=1e-9, abs=1e-6
    )


@pytest.mark.parametrize(("values", "fraction"), [([], 0.5), ([1.0], 1.5), ([1.0], -0.1)])
def test_quantiles_of_nothing_or_outside_are_refused(values: list[float], fraction: float) -> None:
    with pytest.raises(ValueError, match="a quantile needs values"):
        quantile(values, fraction)


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    by_rank = [[1.0, 5.0, 3.0], [2.0, 4.0, 3.0]]
    assert slowest(by_rank) == [2.0, 5.0, 3.0]
    assert skew(by_rank) == [1.0, 1.0, 0.0]


def test_ranks_with_different_numbers_of_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        slowest([[1.0, 2.0], [1.0]])
