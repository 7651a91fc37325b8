"""The difference of two measurements, beside the noise of both; and the gate that only what exceeds both can fail."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zerokit.bench.comparison.cells import Cell
from zerokit.bench.record.metrics import METRICS, Measured, Metric
from zerokit.errors import UsageError, ZerokitError

Verdict = Literal["better", "worse", "within noise", "noise unknown"]

_RULE = re.compile(r"(?P<metric>.+):(?P<percent>\d+(?:\.\d+)?)\s*%?")


@dataclass(frozen=True, slots=True)
class Difference:
    """Of a metric between a cell and its baseline, as shares of the baseline.

    Attributes:
        relative: (value − baseline) ÷ |baseline|; infinite if only the baseline is 0.
        noise: half of the 95 % interval of that difference: the root of the sum of the squares of both relative errors;
            None where neither side's error is known. What only one side knows is taken for both.
        worsening: `relative` if a higher value is worse, else −`relative`.
        verdict: what may be said of it: nothing, where it does not exceed the noise. Ratios are measured by their
            logarithm, so that a time and the rate that is its inverse get the same verdict.
    """

    relative: float
    noise: float | None
    worsening: float
    verdict: Verdict

    @classmethod
    def of(cls, metric: Metric, baseline: Measured, measured: Measured) -> Difference:
        before, after = baseline.value, measured.value
        relative = _share(after - before, before)
        worsening = relative if metric.better == "lower" else -relative
        one, other = baseline.error, measured.error
        one, other = (other if one is None else one), (one if other is None else other)
        if one is None or other is None:
            return cls(relative, None, worsening, "noise unknown" if relative else "within noise")
        if one < before and other < after:
            noise = math.hypot(one / before, other / after)
            exceeds = abs(math.log(after / before)) > noise
        else:  # a difference of two times may be about 0, or below it
            spread = math.hypot(one, other)
            noise = abs(_share(spread, before))
            exceeds = abs(after - before) > spread
        verdict: Verdict = ("worse" if worsening > 0 else "better") if exceeds else "within noise"
        return cls(relative, noise, worsening, verdict)


def _share(change: float, whole: float) -> float:
    if change == 0.0:
        return 0.0
    return change / abs(whole) if whole else math.copysign(math.inf, change)


# What a step of another batch, or of another model, is not compared by. Memory and rates a second always are.
_OF_A_STEP = ("step/", "comm/", "phase/", "traffic/", "loss")
_WORK = ("model", "batch_size", "accumulate", "seq_len", "image_size")


def comparable(cell: Cell, baseline: Cell, name: str) -> bool:
    """Whether both values are of the same work.

    A step of twice the batch is not slower because it takes longer, nor the last loss of more steps better.
    """
    own, other = cell.settings, baseline.settings
    if own["model"] != other["model"]:
        return not name.startswith((*_OF_A_STEP, "throughput/"))
    if name == "loss_last" and len(cell.first.loss) != len(baseline.first.loss):
        return False
    return not name.startswith(_OF_A_STEP) or all(own[work] == other[work] for work in _WORK)


def difference(cell: Cell, baseline: Cell | None, name: str) -> Difference | None:
    """Of one metric; None without a baseline, for other work, or where one side does not have the metric."""
    if baseline is None or not comparable(cell, baseline, name):
        return None
    before, after = baseline.measure(name), cell.measure(name)
    return None if before is None or after is None else Difference.of(METRICS[name], before, after)


@dataclass(frozen=True, slots=True)
class Rule:
    """What must not happen: a metric worse than the baseline's by more than `percent`, and by more than the noise."""

    metric: str
    percent: float

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Of "step/p50_ms:3%"; raises `UsageError` for another form or an unknown metric."""
        if (match := _RULE.fullmatch(text.strip())) is None:
            raise UsageError(f"{text!r} is no METRIC:PERCENT, such as step/p50_ms:3%")
        return cls(known_metric(match["metric"].strip()), float(match["percent"]))


def known_metric(name: str) -> str:
    """The name, if there is such a metric; raises `UsageError` with its nearest relatives."""
    if name in METRICS:
        return name
    near = difflib.get_close_matches(name, METRICS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(METRICS)}"
    raise UsageError(f"there is no metric {name!r}: {hint}")


@dataclass(frozen=True, slots=True)
class Regression:
    """A rule that a cell broke, in words."""

    cell: str
    rule: Rule
    message: str


def regressions(
    rules: Sequence[Rule], cells: Sequence[Cell], partners: Mapping[int, Cell | None]
) -> list[Regression]:
    """Every broken rule. A cell that came to nothing although its baseline went well breaks all of them.

    Raises `ZerokitError` where a rule cannot be checked: nothing to compare, or a metric that a side does not have.
    """
    pairs = [(cell, partner) for cell in cells if (partner := partners[id(cell)]) is not None]
    if rules and not any(partner.status == "ok" for _, partner in pairs):
        raise ZerokitError("nothing to check: no cell has a baseline that went well")
    found = []
    for rule in rules:
        metric = METRICS[rule.metric]
        for cell, partner in pairs:
            # What an engine never had is no loss beside another cell of the same run.
            if partner.status != "ok" or (cell.status == "unsupported" and cell.run == partner.run):
                continue
            if cell.status != "ok":
                message = f"{cell.label}: {cell.status}, and {partner.label} was ok"
                found.append(Regression(cell.label, rule, message))
                continue
            if not comparable(cell, partner, rule.metric):
                raise ZerokitError(
                    f"{rule.metric} cannot be checked: {cell.label} and {partner.label} did not do the same work "
                    "(model, batch, number of steps)"
                )
            if (change := difference(cell, partner, rule.metric)) is None:
                lacking = " and ".join(
                    one.label for one in (partner, cell) if one.measure(rule.metric) is None
                )
                raise ZerokitError(f"{rule.metric} cannot be checked: {lacking} has no such figure")
            if change.worsening > rule.percent / 100 and change.verdict != "within noise":
                before, after = partner.value(rule.metric), cell.value(rule.metric)
                known = "unknown" if change.noise is None else f"{change.noise:.1%}"
                message = (
                    f"{cell.label}: {rule.metric} {after:,.6g} {metric.unit}".rstrip()
                    + f" is {change.worsening:.1%} worse than {before:,.6g} of {partner.label} "
                    f"(allowed {rule.percent:g}%, noise {known})"
                )
                found.append(Regression(cell.label, rule, message))
    return found
