"""Differences beside their noise, also of runs that were recorded, the gate, and losses beside each other."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.bench.records import make_cell, make_failure, paced
from zerokit.bench.comparison.cells import Cell, make_cells
from zerokit.bench.comparison.differences import (
    Difference,
    Regression,
    Rounds,
    Rule,
    difference,
    disagreements,
    loss_note,
    regressions,
)
from zerokit.bench.comparison.tables import percent, scale_of
from zerokit.bench.record.metrics import METRICS, PACED, Metric
from zerokit.bench.record.record import Record, Run
from zerokit.errors import ZerokitError

STEP, THROUGHPUT, COST = (
    METRICS[name] for name in ("step/p50_ms", "throughput/tokens_per_s", "comm/cost_ms")
)


def over(*values: float) -> list[float]:
    return [math.log(value) for value in values]


def judge(
    before: list[float], after: list[float], metric: Metric = STEP, *, paired: bool = False
) -> Difference:
    return Rounds(metric, before, after, paired).difference()


def test_the_interval_is_student_s() -> None:
    before, after = [100.0, 104.0, 97.0], [118.0, 121.0, 112.0]
    interval = stats.ttest_ind(over(*after), over(*before)).confidence_interval()
    found = judge(before, after)
    assert found.noise == pytest.approx((interval.high - interval.low) / 2)
    assert math.log1p(found.relative) == pytest.approx((interval.high + interval.low) / 2)
    assert (found.verdict, found.worsening) == ("worse", found.relative)


def test_rounds_of_one_sweep_are_compared_pair_by_pair() -> None:
    """The machine's pace doubles, and a tenth is found all the same."""
    before, after = [100.0, 150.0, 200.0], [110.0, 166.0, 219.0]
    interval = stats.ttest_rel(over(*after), over(*before)).confidence_interval()
    found = judge(before, after, paired=True)
    assert found.noise == pytest.approx((interval.high - interval.low) / 2)
    assert found.verdict == "worse"
    assert judge(before, after).verdict == "within noise"


ROUNDS = st.lists(st.floats(1, 1e6), min_size=2, max_size=5)


@given(ROUNDS, ROUNDS)
def test_a_verdict_and_a_percentage_never_contradict_the_numbers_beside_them(
    before: list[float], after: list[float]
) -> None:
    """And a throughput is the work over the step beside it, however many rounds there are."""
    found = judge(before, after)
    assert 1 + found.relative == pytest.approx(STEP.centre(after) / STEP.centre(before))
    assert THROUGHPUT.centre([512 / one for one in before]) == pytest.approx(512 / STEP.centre(before))
    assert found.noise is not None
    if found.verdict == "worse":
        assert found.relative > found.noise  # the logarithm is the stricter for a rise
    elif found.verdict == "better":
        assert found.relative < 0
    rates = judge([1 / one for one in before], [1 / one for one in after], THROUGHPUT)
    assert rates.verdict == found.verdict or math.log1p(found.relative) == pytest.approx(found.noise)


def test_costs_around_zero_are_compared_by_their_distance() -> None:
    before = [2.0, 4.0, 0.0]
    assert judge(before, [-3.0, 2.0, 5.0], COST).verdict == "within noise"
    assert judge(before, [30.0, 32.0, 29.0], COST).verdict == "worse"


def test_the_pace_of_the_machine_cancels() -> None:
    """Yesterday's runs were on a machine that was a third faster: a tenth is found, nothing is not."""
    base, same, slower = (
        [paced(pace, ms, repeat=repeat, jitter=0.0, seed=seed) for repeat in range(3)]
        for pace, ms, seed in ((1.0, 700.0, 0), (1.33, 700.0, 1), (1.33, 770.0, 1))
    )
    assert judged("step/paced:6%", base, same) == []
    (message,) = judged("step/paced:6%", base, slower)
    assert "is 10.0% worse than" in message
    # The step itself is what the clock showed, and so is the throughput.
    (message,) = judged("step/p50_ms:6%", base, same)
    assert re.search(r"is 3[23]\.\d% worse", message)


def test_a_noisy_step_is_answered_with_the_paced_one() -> None:
    base = [paced(pace, repeat=n, jitter=0.0) for n, pace in enumerate((1.0, 1.4, 0.8))]
    other = [paced(pace, repeat=n, jitter=0.0, seed=1) for n, pace in enumerate((1.3, 0.9, 1.1))]
    (undecided,) = found("step/p50_ms:6%", base, other)
    assert not undecided.known
    assert "step/paced, from which the machine's pace cancels, has less" in undecided.message
    assert found("step/paced:6%", base, other) == []


def found(rule: str, *runs: list[Record]) -> list[Regression]:
    named = [Run(str(place), tuple(records)) for place, records in enumerate(runs)]
    cells = make_cells(named)
    return regressions([Rule.parse(rule)], cells)


def judged(rule: str, *runs: list[Record]) -> list[str]:
    """What is known to break the rule."""
    return [one.message for one in found(rule, *runs) if one.known]


def rounds(step_ms: float, spread: float = 0.005, **options: object) -> list[Record]:
    """Three without a twin, so that nothing but their own spread tells the noise."""
    values = [step_ms * (1 + spread * (place - 1)) for place in range(3)]
    return [
        make_cell(step_ms=value, repeat=repeat, twin=False, jitter=0.0, **options)  # type: ignore[arg-type]
        for repeat, value in enumerate(values)
    ]


def test_the_gate_needs_both_the_threshold_and_the_noise() -> None:
    base, slower = rounds(700.0), rounds(780.0, seed=1)
    (message,) = judged("step/p50_ms:3%", base, slower)
    assert "is 11." in message
    assert "allowed 3%, noise" in message
    assert found("step/p50_ms:30%", base, slower) == []
    assert found("step/p50_ms:3%", slower, base) == []
    assert found("step/p50_ms:3%", base, rounds(710.0, seed=1)) == []


def test_single_benches_of_equal_settings_have_no_rounds_to_pair() -> None:
    """Nor do those beside a sweep's: their order says nothing, whatever their values."""
    base, other = (
        [
            replace(one, sweep=None, settings=replace(one.settings, repeat=0))
            for one in rounds(ms, 0.1, stage=n)
        ]
        for n, ms in ((2, 700.0), (3, 735.0))
    )
    mixed = [replace(base[0], sweep="a sweep"), *base[1:]]
    for first in (base, mixed):
        _, cell = make_cells([Run("", (*first, *other))])
        change = difference(cell, cell.baseline, "step/p50_ms")
        assert change is not None
        assert (change.verdict, len(cell.records)) == ("within noise", 3)


def test_what_the_noise_hides_is_neither_passed_nor_failed() -> None:
    base, noisy = rounds(700.0), rounds(735.0, spread=0.1, seed=1)
    (undecided,) = found("step/p50_ms:8%", base, noisy)
    assert not undecided.known
    assert "is not known within 8%" in undecided.message
    assert "bench both with --repeats 8" in undecided.message
    (hopeless,) = found("step/p50_ms:1%", base, noisy)
    assert "no reasonable number of repeats would do" in hopeless.message
    # What is much better passes, however noisy.
    assert found("step/p50_ms:8%", noisy, rounds(350.0, seed=2)) == []


def test_single_runs_decide_nothing_that_is_measured() -> None:
    base, slower = [make_cell(step_ms=700.0)], [make_cell(step_ms=930.0, stage=2, seed=1)]
    (undecided,) = found("step/p50_ms:3%", base, slower)
    assert not undecided.known
    assert "bench both with --repeats 3" in undecided.message
    assert [one.known for one in found("memory/peak_host_mib:3%", base, slower)] == [False]
    assert found("memory/state_mib:3%", base, slower) == []  # counted, not measured
    (message,) = judged("skipped_steps:0%", base, [replace(slower[0], skipped_steps=2)])
    assert ": skipped_steps is worse than that of " in message


def test_a_stage_that_an_engine_never_had_breaks_no_rule_beside_its_own_run() -> None:
    lacking = make_failure("unsupported", "it has no such stage", engine="ddp", stage=1, seed=1)
    assert judged("step/p50_ms:3%", [make_cell(), make_cell(seed=2), lacking]) == []
    assert len(judged("step/p50_ms:3%", [make_cell()], [make_failure("unsupported", "gone", seed=1)])) == 1


def test_a_cell_that_a_run_lacks_is_undecided() -> None:
    base = [*rounds(700.0), *rounds(800.0, stage=3)]
    (undecided,) = found("step/p50_ms:3%", base, rounds(700.0, seed=1))
    assert not undecided.known
    assert re.search("zerokit 3.* has no cell to compare with in 1: bench it there, too", undecided.message)
    # A cell that is new, and one whose baseline failed, have nothing to be worse than.
    assert found("step/p50_ms:3%", base, [*base, *rounds(990.0, stage=1)]) == []
    failed = [*base[:3], make_failure("failed", "why", stage=3)]
    assert found("step/p50_ms:3%", failed, rounds(700.0, seed=1)) == []


def test_a_rule_that_cannot_be_checked_is_an_error() -> None:
    with pytest.raises(ZerokitError, match=r"mfu cannot be checked: .* has no such figure"):
        judged("mfu:3%", [make_cell()], [make_cell(seed=1)])
    with pytest.raises(ZerokitError, match="nothing to check"):
        judged("step/p50_ms:3%", [make_cell()])
    with pytest.raises(ZerokitError, match="nothing to check"):
        judged("step/p50_ms:3%", [make_failure("failed", "why")], [make_cell(seed=1)])


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
    scale = scale_of("step/p50_ms", [721.4, 1263.2, None])
    assert [scale.text(value) for value in (721.4, 1263.2, None, -3.0)] == ["721", "1,263", "–", "−3"]
    assert scale_of("memory/state_mib", [40_000.0, 20_000.0]).text(40_000.0) == "39.1"
    assert scale_of("step/p50_ms", [0.01234]).text(0.01234) == "0.0123"
    assert scale_of("step/p50_ms", []).text(-0.0) == "0"
    assert scale_of("mfu", [0.412]).text(0.412) == "41.2"


def test_a_step_of_more_work_is_not_called_slower() -> None:
    base, larger = [make_cell(step_ms=700.0)], [make_cell(step_ms=1390.0, batch_size=4)]
    for name in ("step/p50_ms", "step/paced"):
        with pytest.raises(ZerokitError, match="did not do the same work"):
            judged(f"{name}:3%", base, larger)
    assert judged("throughput/tokens_per_s:3%", base, larger) == []
    runs = [Run(str(place), tuple(records)) for place, records in enumerate((base, larger))]
    first, second = make_cells(runs)
    assert difference(second, first, "step/p50_ms") is None
    assert difference(second, first, "memory/peak_host_mib") is not None
    longer = replace(base[0], id="longer", loss=[*base[0].loss, 1.0])
    first, second = make_cells([Run("0", (base[0],)), Run("1", (longer,))])
    assert difference(second, first, "loss_last") is None
    assert difference(second, first, "loss_first") is not None


def training(precision: str, **factors: float) -> list[Cell]:
    """A cell an engine and stage, such as `ddp_0`, whose losses are the same ones times a factor."""
    records = []
    for name, factor in factors.items():
        engine, _, stage = name.rpartition("_")
        record = make_cell(engine.replace("_", "-"), int(stage), precision=precision)
        records.append(replace(record, id=name, loss=[5.0 * factor, 4.0 * factor]))
    return make_cells([Run("", tuple(records))])


def test_engines_are_compared_in_half_precision_by_a_tolerance_that_allows_their_rounding() -> None:
    half = training("bf16", ddp_0=1.0, zerokit_2=1.005, zerokit_3=1.005)
    assert disagreements(half, 1e-5) == []
    assert disagreements(half, 2e-2) == []
    far = training("bf16", ddp_0=1.0, zerokit_2=1.1, zerokit_3=1.1)
    assert len(disagreements(far, 2e-2)) == 2
    assert disagreements(far, 1e-5) == []
    alone = training("bf16", ddp_0=1.0, zerokit_2=1.0)
    with pytest.raises(ZerokitError, match="no losses to compare"):
        disagreements(alone, 1e-5)


def test_the_floor_trains_something_else() -> None:
    found = training("fp32", compute_only_0=3.0, ddp_0=1.0, zerokit_2=1.0)
    assert disagreements(found, 1e-5) == []
    assert loss_note(found) == "Losses of cells with equal training are bitwise identical."


def test_the_note_tells_engines_from_stages() -> None:
    found = training("fp32", ddp_0=1.0, zerokit_2=1.001, zerokit_3=1.001, fsdp2_3=0.999)
    assert loss_note(found) == (
        "Losses of cells with equal training differ by at most 2.0e-03 of them; "
        "those of one engine are bitwise identical."
    )
    assert loss_note(training("fp32", zerokit_2=1.0)) == ""


def test_local_steps_are_never_said_to_train_the_same() -> None:
    every_step = training("fp32", zerokit_2=1.0, ddp_0=1.0)
    local = training("fp32", zerokit_1=1.0)
    (record,) = local[0].measured_records
    local = make_cells([Run("", (replace(record, settings=replace(record.settings, every=8)),))])
    assert loss_note([*every_step[:1], *local]) == ""
    with pytest.raises(ZerokitError, match="no losses to compare"):
        disagreements([*every_step[:1], *local], 1e-5)


# Runs of equal code, one after the other, in fresh processes: zerokit at stage 2, gpt-5m in fp32, batch 1×64, two ranks
# of a machine with two cores, on which one to a dozen other processes came and went. Of each run: the steps that took
# turns with the twin's (`own`, `pace`), in tenths of a millisecond.
RUNS = json.loads(Path(__file__).with_name("recorded_rounds.json").read_text())
DRAWS = 200


def ratios() -> list[float]:
    """What a comparison of speed takes from each run."""
    record = make_cell()
    assert record.twin is not None
    twins = [replace(record.twin, own_ms=run["own"], pace_ms=run["pace"]) for run in RUNS]
    found = [METRICS[PACED].value(replace(record, twin=twin)) for twin in twins]
    return [ratio for ratio in found if ratio is not None]


def told_apart(values: list[float], slower_by: float, rounds: int = 3) -> float:
    """The share of comparisons with a verdict: of each round, two runs that followed each other."""
    draw, count = random.Random(0), 0
    for _ in range(DRAWS):
        before, after = [], []
        for number, first in enumerate(draw.sample(range(0, len(values), 2), rounds)):
            pair = values[first], values[first + 1]
            one, other = pair if number % 2 == 0 else pair[::-1]
            before.append(one)
            after.append(other * (1 + slower_by))
        found = Rounds(STEP, before, after, paired=False).difference()
        count += found.verdict != "within noise"
    return count / DRAWS


@pytest.mark.parametrize("rounds", [2, 3, 5])
def test_equal_code_is_seldom_told_apart(rounds: int) -> None:
    assert told_apart(ratios(), 0.0, rounds) <= 0.05


def test_slower_code_is_found() -> None:
    assert told_apart(ratios(), 0.2) >= 0.9
    assert told_apart(ratios(), 0.1) >= 0.4
    assert told_apart(ratios(), 0.1, rounds=5) >= 0.8
    assert told_apart(ratios(), 0.1, rounds=6) >= 0.9
