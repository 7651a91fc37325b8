"""Metrics by name, and statistics of known numbers with their noise."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, replace
from statistics import fmean, median, stdev

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.records import make_cell, make_record
from zerokit.bench.record.metrics import METRICS, Measured, measure, metrics_of
from zerokit.bench.record.record import Record, summarise
from zerokit.bench.record.statistics import STEADY_LIMIT, Summary, drift, median_interval, quantile, steady

P50 = METRICS["step/p50_ms"]


def test_figures_of_a_known_record() -> None:
    assert metrics_of(make_record()) == pytest.approx(
        {
            "step/p50_ms": 200.0,
            "step/p10_ms": 120.0,
            "step/p90_ms": 280.0,
            "step/p99_ms": 298.0,
            "step/mean_ms": 200.0,
            "step/spread": 0.8,
            "step/drift": 1.0,
            "step/skew_p50_ms": 0.0,
            "step/skew_p90_ms": 8.0,
            "throughput/tokens_per_s": 640.0,
            "throughput/tokens_per_s_per_rank": 320.0,
            "memory/peak_host_mib": 301.0,
            "memory/peak_host_minimum_mib": 300.0,
            "memory/state_mib": 9.0,
            "memory/state_predicted_mib": 9.0,
            "traffic/mib_per_step": 4.0,
            "traffic/predicted_mib_per_step": 4.0,
            "traffic/elements_per_step": 1000.0,
            "loss_first": 5.5,
            "loss_last": 3.5,
            "skipped_steps": 0.0,
            "build_ms": 50.0,
        }
    )


def test_a_full_record_has_fewer_than_sixty_names_that_mlflow_takes() -> None:
    cell = make_cell(device="cuda", precision="bf16")
    found = metrics_of(cell)
    assert {"mfu", "comm/cost_ms", "comm/exposed_ms", "phase/forward_ms", "bus/all_gather_gb_per_s"} <= set(
        found
    )
    assert {"memory/peak_allocated_mib", "memory/setup_allocated_mib", "memory/device_used_mib"} <= set(found)
    assert found["step/wall_mean_ms"] == pytest.approx(1.001 * found["step/mean_ms"], rel=0.02)
    assert found["throughput/tokens_per_s_per_device"] == found["throughput/tokens_per_s_per_rank"]
    of_a_unit = [name for name in METRICS if "images" not in name and "samples" not in name]
    assert len(found) < len(of_a_unit) < 60
    assert all(re.fullmatch(r"[A-Za-z0-9_\-./: ]+", name) for name in METRICS)
    assert all(math.isfinite(value) for value in found.values())
    assert cell.model is not None
    images = metrics_of(replace(cell, model=replace(cell.model, unit="images")))
    assert "throughput/images_per_s" in images
    assert "throughput/tokens_per_s" not in images


def test_the_noise_of_rounds_is_student_s_and_that_within_a_run_is_none() -> None:
    def run(step_ms: list[float]) -> Record:
        cell = make_cell(twin=False, steps=len(step_ms))
        assert cell.model is not None
        ranks = [replace(rank, step_ms=step_ms) for rank in cell.ranks]
        return replace(cell, ranks=ranks, results=summarise(cell.settings, cell.model, ranks, cell.loss))

    measured = measure(P50, [run([base] * 30) for base in (100.0, 110.0, 120.0)])
    assert measured is not None
    logarithms = [math.log(base) for base in (100.0, 110.0, 120.0)]
    assert measured.value == pytest.approx(math.exp(fmean(logarithms)))
    half = 4.3027 * stdev(logarithms) / math.sqrt(3)  # t of 2 degrees of freedom
    assert measured.error == pytest.approx(half * measured.value, rel=1e-4)
    assert measure(P50, [run([float(ms) for ms in range(100, 131)])]) == Measured(115.0, None)
    counted = measure(METRICS["memory/state_mib"], [make_cell()])
    assert counted is not None
    assert counted.error == 0.0


def test_communication_has_the_noise_of_its_pairs_in_one_run() -> None:
    cell = make_cell()
    assert cell.twin is not None
    measured = measure(METRICS["comm/cost_ms"], [cell])
    assert measured is not None
    costs = sorted(cell.twin.costs_ms)
    assert measured.value == pytest.approx(median(costs))
    assert measured.error == pytest.approx((costs[20] - costs[9]) / 2)  # the 10th smallest and largest of 30


def test_tokens_to_a_loss_count_from_the_first_five_steps_that_come_down_to_it() -> None:
    cell = make_cell(device="cpu", precision="fp32")
    losses: list[float | None] = [9.0, 5.0, 4.0, 3.0, 3.0, 3.0, 2.0, 2.0]
    record = replace(cell, loss=losses, settings=replace(cell.settings, target_loss=3.0))
    tokens = cell.settings.samples_per_step * cell.settings.seq_len
    assert metrics_of(record)["to_target/tokens"] == 7 * tokens
    never = replace(record, settings=replace(cell.settings, target_loss=1.0))
    assert "to_target/tokens" not in metrics_of(never)
    assert "to_target/tokens" not in metrics_of(cell)


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


@pytest.mark.parametrize("count", [1023, 1024])
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
    assert drift([1.0 + step for step in range(30_000)]) == pytest.approx(2.0, rel=1e-3)  # a day's steps


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
