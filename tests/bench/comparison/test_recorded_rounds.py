"""Verdicts on series that were recorded on a drifting machine, resampled.

`recorded_rounds.json` holds runs of equal code, one after the other, in fresh processes: zerokit at stage 2, gpt-5m in
fp32, batch 1×64, two ranks of a machine with two cores, on which one to a dozen other processes came and went. Of each
run: the steps that took turns with the twin's (`own`, `pace`), in tenths of a millisecond.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.records import make_cell
from zerokit.bench.comparison.differences import Rounds
from zerokit.bench.record.metrics import METRICS, PACED

RUNS = json.loads(Path(__file__).with_name("recorded_rounds.json").read_text())
STEP = METRICS["step/p50_ms"]
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
