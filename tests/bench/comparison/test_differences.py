"""Differences beside their noise, and the gate."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench.records import make_cell, make_failure
from zerokit.bench.comparison.cells import Cell, baselines, make_cells
from zerokit.bench.comparison.differences import Difference, Rule, difference, known_metric, regressions
from zerokit.bench.comparison.figures import Scale, percent, scale_of
from zerokit.bench.comparison.runs import Run
from zerokit.bench.record import Record
from zerokit.bench.record.metrics import METRICS, Measured
from zerokit.errors import UsageError, ZerokitError

STEP, THROUGHPUT = METRICS["step/p50_ms"], METRICS["throughput/tokens_per_s"]


def test_noise_is_the_root_of_the_sum_of_squares() -> None:
    found = Difference.of(STEP, Measured(100.0, 3.0), Measured(110.0, 4.0))
    assert (found.relative, found.worsening) == pytest.approx((0.1, 0.1))
    assert found.noise == pytest.approx(math.hypot(3 / 100, 4 / 110))
    assert found.verdict == "worse"
    assert Difference.of(STEP, Measured(100.0, 3.0), Measured(104.0, 4.0)).verdict == "within noise"
    assert Difference.of(STEP, Measured(100.0, 3.0), Measured(90.0, 4.0)).verdict == "better"


def test_more_throughput_is_better_and_more_time_worse() -> None:
    assert Difference.of(THROUGHPUT, Measured(100.0, 1.0), Measured(110.0, 1.0)).verdict == "better"
    assert Difference.of(THROUGHPUT, Measured(100.0, 1.0), Measured(90.0, 1.0)).worsening == pytest.approx(
        0.1
    )


def test_an_error_that_only_one_side_knows_is_taken_for_both() -> None:
    memory = METRICS["memory/peak_host_mib"]
    assert Difference.of(memory, Measured(1000.0, None), Measured(1013.0, 10.0)).verdict == "within noise"
    assert Difference.of(memory, Measured(1000.0, 10.0), Measured(1020.0, None)).verdict == "worse"


def test_an_unknown_noise_is_said_and_a_zero_baseline_survived() -> None:
    assert Difference.of(STEP, Measured(100.0, None), Measured(110.0, None)).verdict == "noise unknown"
    assert Difference.of(STEP, Measured(0.0, 0.0), Measured(1.0, 0.0)).relative == math.inf
    assert Difference.of(STEP, Measured(0.0, 0.0), Measured(0.0, 0.0)).verdict == "within noise"


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.floats(0, 1e3), st.floats(0, 1e3))
def test_a_verdict_never_contradicts_its_numbers(
    before: float, after: float, one: float, other: float
) -> None:
    found = Difference.of(STEP, Measured(before, one), Measured(after, other))
    assert found.noise is not None
    if found.verdict == "worse":
        assert after > before
        assert found.relative > found.noise  # the logarithm is the stricter for a rise
    elif found.verdict == "better":
        assert after < before
    if one == other == 0.0:
        assert (found.verdict == "within noise") == (before == after)


@given(st.floats(1, 1e6), st.floats(1, 1e6), st.floats(0, 0.9), st.floats(0, 0.9))
def test_a_time_and_its_rate_get_the_same_verdict(
    before: float, after: float, one: float, other: float
) -> None:
    time = Difference.of(STEP, Measured(before, before * one), Measured(after, after * other))
    rates = (1e6 / before, 1e6 / after)
    rate = Difference.of(THROUGHPUT, Measured(rates[0], rates[0] * one), Measured(rates[1], rates[1] * other))
    # But for rounding at the very edge of the noise.
    assert time.verdict == rate.verdict or abs(math.log(after / before)) == pytest.approx(
        math.hypot(one, other)
    )


def test_costs_around_zero_are_compared_by_their_distance() -> None:
    cost = METRICS["comm/cost_ms"]
    assert Difference.of(cost, Measured(2.0, 5.0), Measured(-3.0, 5.0)).verdict == "within noise"
    assert Difference.of(cost, Measured(2.0, 5.0), Measured(30.0, 5.0)).verdict == "worse"


@pytest.mark.parametrize("text", ["step/p50_ms:3%", "step/p50_ms:3", " step/p50_ms:3 % "])
def test_a_rule_is_read(text: str) -> None:
    assert Rule.parse(text) == Rule("step/p50_ms", 3.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step/p50_ms", "no METRIC:PERCENT"),
        ("step/p50_ms:-3%", "no METRIC:PERCENT"),
        ("step/p50_ms:nan", "no METRIC:PERCENT"),
        ("step/p50:3%", "did you mean step/p50_ms"),
        ("xyzzy:3%", "one of step/p50_ms"),
    ],
)
def test_a_wrong_rule_is_refused_with_advice(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Rule.parse(text)
    with pytest.raises(UsageError):
        known_metric("throughput")


def judged(rule: str, *runs: list[Record]) -> list[str]:
    named = [Run(str(place), tuple(records)) for place, records in enumerate(runs)]
    cells = make_cells(named)
    return [one.message for one in regressions([Rule.parse(rule)], cells, baselines(cells, named))]


def test_the_gate_needs_both_the_threshold_and_the_noise() -> None:
    base = [make_cell(step_ms=700.0)]
    slower, noisy = [make_cell(step_ms=780.0, seed=1)], [make_cell(step_ms=735.0, jitter=0.35, seed=1)]
    (message,) = judged("step/p50_ms:3%", base, slower)
    assert "worse than" in message
    assert "allowed 3%, noise" in message
    assert judged("step/p50_ms:30%", base, slower) == []
    assert judged("step/p50_ms:3%", base, noisy) == []
    assert judged("step/p50_ms:3%", slower, base) == []


def test_a_cell_that_no_longer_runs_breaks_every_rule() -> None:
    base, broken = [make_cell()], [make_failure("out of memory", "too much", seed=1)]
    (message,) = judged("step/p50_ms:3%", base, broken)
    assert "out of memory, and" in message


def test_a_stage_that_an_engine_never_had_breaks_no_rule_beside_its_own_run() -> None:
    lacking = make_failure("unsupported", "it has no such stage", engine="ddp", stage=1, seed=1)
    assert judged("step/p50_ms:3%", [make_cell(), make_cell(seed=2), lacking]) == []
    assert len(judged("step/p50_ms:3%", [make_cell()], [make_failure("unsupported", "gone", seed=1)])) == 1


def test_a_rule_that_cannot_be_checked_is_an_error() -> None:
    with pytest.raises(ZerokitError, match=r"mfu cannot be checked: .* has no such figure"):
        judged("mfu:3%", [make_cell()], [make_cell(seed=1)])
    with pytest.raises(ZerokitError, match="nothing to check"):
        judged("step/p50_ms:3%", [make_cell()])
    with pytest.raises(ZerokitError, match="nothing to check"):
        judged("step/p50_ms:3%", [make_failure("failed", "why")], [make_cell(seed=1)])


def test_repetitions_widen_the_noise_of_a_gate() -> None:
    steady = [make_cell(step_ms=700.0, repeat=repeat) for repeat in range(3)]
    jumping = [
        make_cell(step_ms=step_ms, seed=1, repeat=repeat)
        for repeat, step_ms in enumerate((650.0, 760.0, 900.0))
    ]
    assert judged("step/p50_ms:3%", steady, [replace(jumping[1])]) != []
    assert judged("step/p50_ms:3%", steady, jumping) == []


@pytest.mark.parametrize(
    ("relative", "text"),
    [
        (0.065, "+6.5 %"),
        (-0.12, "−12 %"),
        (2.2, "×3.2"),
        (20.0, "×21"),
        (0.0, "="),
        (math.inf, "from 0"),
        (0.0996, "+10 %"),
    ],
)
def test_changes_are_written_shortly(relative: float, text: str) -> None:
    assert percent(Difference(relative, 0.0, relative, "worse")) == text


def test_a_column_has_one_number_of_decimals() -> None:
    scale = Scale.of("ms", [721.4, 1263.2, None])
    assert [scale.text(value) for value in (721.4, 1263.2, None, -3.0)] == ["721", "1,263", "–", "−3"]
    assert Scale.of("MiB", [40_000.0, 20_000.0]).text(40_000.0) == "39.1"
    assert Scale.of("ms", [0.01234]).text(0.01234) == "0.0123"
    assert Scale.of("ms", []).text(-0.0) == "0"
    assert scale_of("mfu", "", [0.412]).text(0.412) == "41.2"


def test_a_cell_without_records_that_went_well_has_no_figures() -> None:
    (cell,) = make_cells([Run("", (make_failure("failed", "why"),))])
    assert isinstance(cell, Cell)
    assert cell.measure("step/p50_ms") is None


def test_a_step_of_more_work_is_not_called_slower() -> None:
    base, larger = [make_cell(step_ms=700.0)], [make_cell(step_ms=1390.0, batch_size=4)]
    with pytest.raises(ZerokitError, match="did not do the same work"):
        judged("step/p50_ms:3%", base, larger)
    assert judged("throughput/tokens_per_s:3%", base, larger) == []
    runs = [Run(str(place), tuple(records)) for place, records in enumerate((base, larger))]
    first, second = make_cells(runs)
    assert difference(second, first, "step/p50_ms") is None
    assert difference(second, first, "memory/peak_host_mib") is not None


def test_the_last_loss_of_more_steps_is_not_compared() -> None:
    longer = make_cell(seed=1)
    longer = replace(longer, loss=[*longer.loss, 1.0])
    runs = [Run("0", (make_cell(),)), Run("1", (longer,))]
    first, second = make_cells(runs)
    assert difference(second, first, "loss_last") is None
    assert difference(second, first, "loss_first") is not None
