"""Differences between two cells relative to the noise between rounds, and the gates that use them.

The noise within a run is not the noise between runs: a machine that is 30 % slower for ten minutes is so for a whole
run. So from one repetition no difference is known, and of several each counts as one value.

    step of a cell      120 ms    168 ms    121 ms      each round, and its compute-only twin beside it:
    its twin's pace     100 ms    141 ms    100 ms      when the machine is slower, both are
    their ratio           1.20      1.19      1.21      the paced step, a metric of its own

A difference is that of the two values which a table shows, never of others.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from zerokit.bench.comparison.cells import ALONE, PACE, WORK, Cell
from zerokit.bench.record.metrics import METRICS, PACED, Metric, values_of
from zerokit.bench.record.options import DEFAULT_REPEATS, LOSSY_WIRES
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.statistics import difference_interval, mean_interval, repeats_for
from zerokit.errors import UsageError, ZerokitError

Verdict = Literal["better", "worse", "within noise", "noise unknown"]

_RULE = re.compile(r"(?P<metric>.+):(?P<percent>\d+(?:\.\d+)?)\s*%?")


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of a metric between a cell and its baseline, as shares of the baseline.

    `relative` is (value − baseline) ÷ |baseline|, infinite if only the baseline is 0, and `worsening` has its sign
    where a higher value is worse. `noise` is half of the 95 % interval of that difference; None where it is not known,
    as with one repetition. Nothing is said of a difference that does not exceed it. Ratios are measured by their
    logarithm, so that a time and the rate that is its inverse get the same verdict.
    """

    relative: float
    noise: float | None
    worsening: float
    verdict: Verdict


def _share(change: float, whole: float) -> float:
    if change == 0.0:
        return 0.0
    return change / abs(whole) if whole else math.copysign(math.inf, change)


# What a step of another batch, or of another model, is not compared by. Memory and rates a second always are.
_OF_A_STEP = ("step/", "comm/", "phase/", "traffic/", "loss")


def comparable(cell: Cell, baseline: Cell, name: str) -> bool:
    """Whether both cells did the same work.

    A step of twice the batch is not slower because it takes longer, nor the last loss of more steps better,
    nor that of ranks which train alone worse.
    """
    own, other = cell.settings, baseline.settings
    if own["model"] != other["model"]:
        return not name.startswith((*_OF_A_STEP, "throughput/"))
    if name == PACED and (cell.machine != baseline.machine or any(own[one] != other[one] for one in PACE)):
        return False  # their twins do not do the same
    if name == "loss_last" and len(steps_of([cell, baseline])) > 1:
        return False
    if name.startswith("loss_") and (own["engine"] == ALONE) != (other["engine"] == ALONE):
        return False
    return not name.startswith(_OF_A_STEP) or all(own[work] == other[work] for work in WORK)


def steps_of(cells: Sequence[Cell]) -> set[int]:
    """The numbers of steps that the runs trained, warm-up included; losses are comparable only at equal numbers."""
    return {len(record.loss) for cell in cells for record in cell.measured_records}


def difference(cell: Cell, baseline: Cell | None, name: str) -> Difference | None:
    """The difference in one metric; None without a baseline, for different work, or if a side lacks the metric."""
    if baseline is None or not comparable(cell, baseline, name):
        return None
    found = Rounds.of(baseline, cell, name)
    return None if found is None else found.difference()


@dataclass(frozen=True, slots=True)
class Rounds:
    """A metric's values in the rounds of two cells, `before` being the baseline's.

    Attributes:
        paired: whether values at the same position are of the same round, and so of nearly the same time.
    """

    metric: Metric
    before: list[float]
    after: list[float]
    paired: bool

    @classmethod
    def of(cls, baseline: Cell, cell: Cell, name: str) -> Rounds | None:
        """The values by round; None if a cell lacks the metric."""
        metric, records = METRICS[name], (baseline.measured_records, cell.measured_records)
        before, after = (values_of(metric, one) for one in records)
        if not before or not after:
            return None
        if metric.counted and len({*before}) == len({*after}) == 1:
            return cls(metric, before[:1], after[:1], paired=False)
        turns = [
            {
                (one.sweep or "", one.settings.repeat): value
                for one in some
                for value in values_of(metric, [one])
            }
            for some in records
        ]
        # The twin of a paced step is closer to it in time than another cell of the same round. Single benches have no
        # rounds: to pair the least with the least would hide their noise.
        paired = name != PACED and all(record.sweep for one in records for record in one)
        if paired and turns[0].keys() == turns[1].keys() and len(turns[0]) == len(before) == len(after):
            before, after = ([one[turn] for turn in sorted(one)] for one in turns)
            return cls(metric, before, after, paired=True)
        return cls(metric, before, after, paired=False)

    def _scaled(self) -> tuple[list[float], list[float]]:
        """The values as they are compared: their logarithms, where they have ratios."""
        if not self.metric.has_ratios([*self.before, *self.after]):
            return self.before, self.after
        return [*map(math.log, self.before)], [*map(math.log, self.after)]

    def difference(self) -> Difference:
        """The difference with its noise, by Student's t over the rounds; one round has no noise."""
        before, after = map(self.metric.centre, (self.before, self.after))
        scaled, noise = self._scaled(), 0.0 if self.metric.counted else None
        if min(map(len, scaled)) > 1:
            differences = [b - a for a, b in zip(*scaled, strict=False)]
            noise = (mean_interval(differences) if self.paired else difference_interval(*scaled))[1]
        by_logarithm = scaled[0] is not self.before
        relative = _share(after - before, before)
        if noise is not None and not by_logarithm:
            noise = abs(_share(noise, before))
        worsening = relative if self.metric.better == "lower" else -relative
        if noise is None:
            return Difference(relative, None, worsening, "noise unknown" if relative else "within noise")
        apart = math.log(after) - math.log(before) if by_logarithm else relative
        verdict: Verdict = "within noise"
        if abs(apart) > noise:
            verdict = "worse" if worsening > 0 else "better"
        return Difference(relative, noise, worsening, verdict)

    def repeats_for(self, percent: float) -> int | None:
        """The number of repetitions that would resolve this difference; None if it is unreasonably high."""
        scaled = self._scaled()
        if min(map(len, scaled)) < 2 or scaled[0] is self.before:
            return DEFAULT_REPEATS
        return repeats_for(*scaled, math.log1p(percent / 100))


@dataclass(frozen=True, slots=True)
class Rule:
    """A gate: a metric must not be worse than the baseline's by more than `percent` and by more than the noise."""

    metric: str
    percent: float

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Parse a rule such as "step/p50_ms:3%"; raises `UsageError` for a malformed rule or an unknown metric."""
        if (match := _RULE.fullmatch(text.strip())) is None:
            raise UsageError(f"{text!r} is not METRIC:PERCENT, such as step/p50_ms:3%")
        return cls(known_metric(match["metric"].strip()), float(match["percent"]))


def known_metric(name: str) -> str:
    """The metric's name; raises `UsageError` with similar names if it is unknown."""
    if name in METRICS:
        return name
    near = difflib.get_close_matches(name, METRICS, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"one of {', '.join(METRICS)}"
    raise UsageError(f"there is no metric {name!r}: {hint}")


@dataclass(frozen=True, slots=True)
class Regression:
    """A rule that a cell broke, or one that cannot be decided because of noise (`known` is False)."""

    cell: str
    rule: Rule
    message: str
    known: bool = True


def regressions(rules: Sequence[Rule], cells: Sequence[Cell]) -> list[Regression]:
    """Every rule that is broken or undecided.

    A cell that failed although its baseline went well breaks all of them; one that a run lacks leaves them undecided.
    Raises `ZerokitError` where a rule cannot be checked: nothing to compare, or a metric that a side does not have.
    """
    pairs = [(cell, partner) for cell in cells if (partner := cell.baseline) is not None]
    if rules and not any(partner.status == "ok" for _, partner in pairs):
        raise ZerokitError("nothing to check: no cell has a successful baseline")
    found, lacking = list[Regression](), list(_lacking(cells))
    for rule in rules:
        found += [Regression(label, rule, message, known=False) for label, message in lacking]
        for cell, partner in pairs:
            # What an engine never had is no loss beside another cell of the same run.
            if partner.status != "ok" or (cell.status == "unsupported" and cell.run == partner.run):
                continue
            if cell.status != "ok":
                message = f"{cell.label}: {cell.status}, and {partner.label} was ok"
                found.append(Regression(cell.label, rule, message))
            elif (broken := _check(rule, cell, partner)) is not None:
                found.append(broken)
    return found


def _lacking(cells: Sequence[Cell]) -> Iterator[tuple[str, str]]:
    """The baseline's cells that went well and that another run does not have, with a sentence that says so."""
    own = next((cell.baseline.run for cell in cells if cell.baseline is not None), None)
    for run in dict.fromkeys(cell.run for cell in cells if cell.run != own):
        met = {id(cell.baseline) for cell in cells if cell.run == run}
        for one in cells:
            if one.run == own and one.baseline is None and one.status == "ok" and id(one) not in met:
                yield one.label, f"{one.label} has no cell to compare with in {run}: bench it there, too"


def _check(rule: Rule, cell: Cell, partner: Cell) -> Regression | None:
    if not comparable(cell, partner, rule.metric):
        raise ZerokitError(
            f"{rule.metric} cannot be checked: {cell.label} and {partner.label} did not do the same work "
            "(model, batch, number of steps)"
        )
    values = Rounds.of(partner, cell, rule.metric)
    if values is None:
        lacking = " and ".join(one.label for one in (partner, cell) if one.measure(rule.metric) is None)
        raise ZerokitError(f"{rule.metric} cannot be checked: {lacking} has no such figure")
    change, allowed, who = values.difference(), rule.percent / 100, partner.label
    said, broken = f"{cell.label}: {rule.metric}", partial(Regression, cell.label, rule)
    if change.noise is None:
        return broken(
            f"{said} is not known to differ from that of {who}: a single run does not show the noise "
            f"between runs; bench both with --repeats {values.repeats_for(rule.percent)}",
            known=False,
        )
    if change.worsening > allowed and change.verdict != "within noise":
        much = "" if math.isinf(change.worsening) else f"{change.worsening:.1%} "  # no share of 0
        return broken(
            f"{said} is {much}worse than that of {who} (allowed {rule.percent:g}%, noise {change.noise:.1%})"
        )
    if change.noise <= allowed or change.worsening + change.noise <= allowed:
        return None
    repeats = values.repeats_for(rule.percent)
    advice = f"bench both with --repeats {repeats}" if repeats else "no reasonable number of repeats would do"
    paced = difference(cell, partner, PACED) if rule.metric == "step/p50_ms" else None
    if paced is not None and (paced.noise or math.inf) < change.noise:
        advice += f"; {PACED}, from which the machine's pace cancels, has less"
    return broken(
        f"{said} is not known within {rule.percent:g}% of that of {who}: the noise between runs is "
        f"{change.noise:.1%}; {advice}",
        known=False,
    )


# What decides which losses come out, in exact arithmetic. How a step is divided among ranks does not.
_DECISIVE = (
    *("model", "batch_size", "accumulate", "seq_len", "image_size", "nodes", "nproc_per_node"),
    *("precision", "wire", "data", "seed", "optimizer", "lr", "clip", "every", "fragments", "delay"),
)


ROUNDING = 1e-2
"""A tolerance from which on engines are compared in half precision as well, where each rounds at other points."""

_Losses = tuple[str, Sequence[float | None]]


def disagreements(cells: Sequence[Cell], tolerance: float) -> list[str]:
    """A sentence for every cell whose losses differ by more than this share from those of the first comparable cell.

    In half precision engines round differently: a tolerance below `ROUNDING` is for the cells of one engine there. The
    steps that both have are compared, warm-up included. Raises `ZerokitError` where no two runs train the same.
    """
    groups = _alike(
        cells, lambda one: tolerance < ROUNDING and (one.precision != "fp32" or one.wire != "own")
    )
    if not groups:
        raise ZerokitError("no losses to compare: no two runs trained the same model on the same batches")
    found = []
    for (first, known), *others in groups:
        for label, losses in others:
            shares = [_apart(pair) for pair in zip(known, losses, strict=False)]
            if (share := max(shares, default=0.0)) > tolerance:
                step = shares.index(share) + 1
                found.append(
                    f"{label}: the loss of step {step} differs from that of {first} by {share:.2g} of it"
                )
    return list(dict.fromkeys(found))


def loss_note(cells: Sequence[Cell]) -> str:
    """The largest loss difference between cells with equal training, and within one engine; "" if there are none.

    Cells on a wire that changes the mathematics are left out.
    """
    cells = [cell for cell in cells if not any(r.settings.wire in LOSSY_WIRES for r in cell.measured_records)]

    def say(by_engine: bool) -> str | None:
        groups = [g for g in _alike(cells, lambda _: by_engine) if len({label for label, _ in g}) > 1]
        if not groups:
            return None
        steps = (step for group in groups for step in zip(*(losses for _, losses in group), strict=False))
        share = max((_apart(sorted(step, key=lambda loss: loss or 0.0)) for step in steps), default=0.0)
        return f"differ by at most {share:.1e} of them" if share else "are bitwise identical"

    among_all, of_one = say(False), say(True)
    if among_all is None:
        return ""
    within = "" if of_one in (None, among_all) else f"; those of one engine {of_one}"
    return f"Losses of cells with equal training {among_all}{within}."


def _alike(cells: Sequence[Cell], apart: Callable[[Settings], bool]) -> list[list[_Losses]]:
    """Labels and losses of runs that train the same, together; `apart`: only with others of the same engine."""
    groups: dict[tuple[object, ...], list[_Losses]] = {}
    for cell in cells:
        for record in cell.measured_records:
            settings = record.settings
            resumed = settings.elastic or record.checkpoints.resumed_from is not None
            if settings.engine != ALONE and not resumed:
                key = (*(getattr(settings, name) for name in _DECISIVE), settings.home == "fp8")
                # Islands that meet now and then are another training in each engine, and on each mesh.
                local = (settings.engine, settings.mesh) if settings.every is not None else None
                engine = settings.engine if apart(settings) else None
                groups.setdefault((*key, local, engine), []).append((cell.label, record.loss))
    return [group for group in groups.values() if len(group) > 1]


def _apart(losses: Sequence[float | None]) -> float:
    """By what share of the first the losses of a step differ from it; one that was not finite agrees with its like."""
    known = [loss for loss in losses if loss is not None]
    if 0 < len(known) < len(losses):
        return math.inf
    return max((abs(loss - known[0]) / max(abs(known[0]), 1e-12) for loss in known), default=0.0)
