"""What a reader of a comparison wants to know first: who is best at what, or what changed against the baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerokit.bench.comparison.cells import ALONE, Cell
from zerokit.bench.comparison.differences import Verdict, difference
from zerokit.bench.comparison.figures import percent, scale_of, within_noise
from zerokit.bench.comparison.roles import memory_metric
from zerokit.bench.record.metrics import METRICS, UNITS


@dataclass(frozen=True, slots=True)
class Headline:
    """One thing that a reader wants to know first."""

    title: str
    who: str
    what: str
    also: str = ""


def listed(words: Sequence[str]) -> str:
    """As in a sentence: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _best(cells: Sequence[Cell], name: str) -> Cell | None:
    found = [cell for cell in cells if cell.value(name) is not None]
    sign = 1.0 if METRICS[name].better == "lower" else -1.0
    return min(found, key=lambda cell: sign * (cell.value(name) or 0.0), default=None)


def _figure(cell: Cell, name: str) -> str:
    """A value with its unit."""
    scale = scale_of(name, METRICS[name].unit, [cell.value(name)])
    return f"{scale.text(cell.value(name))} {scale.unit}".rstrip()


def best_headlines(cells: Sequence[Cell]) -> list[Headline]:
    """Which cell is best at what; none where different models, or units, were measured.

    Ranks that train alone are a floor, and no competitor.
    """
    cells = [cell for cell in cells if cell.settings["engine"] != ALONE] or cells
    units = [
        unit for unit in UNITS if any(cell.value(f"throughput/{unit}_per_s") is not None for cell in cells)
    ]
    if len(units) != 1 or len({cell.settings["model"] for cell in cells}) > 1:
        return []
    speed, (memory, memory_words) = f"throughput/{units[0]}_per_s", memory_metric(cells)
    fastest, smallest = _best(cells, speed), _best(cells, memory)
    if fastest is None:
        return []
    several = sum(cell.value(speed) is not None for cell in cells) > 1
    single = several and any(len(cell.measured_records) == 1 for cell in cells)
    doubt = "single runs tell no winner: take several rounds" if single else ""

    def title(best: str, alone: str) -> str:
        return f"{alone}, best single run" if single else best if several else alone

    found = [
        Headline(
            title("Fastest", "Throughput"),
            fastest.label,
            f"{_figure(fastest, speed)}, {_figure(fastest, 'step/p50_ms')} a step",
            doubt or _equals(cells, fastest, speed),
        )
    ]
    if smallest is not None:
        found.append(
            Headline(
                title("Least memory", "Memory"),
                smallest.label,
                f"{_figure(smallest, memory)} a rank ({memory_words.removesuffix(' memory')})",
                doubt or _trade(smallest, fastest, memory, speed),
            )
        )
    costly = [cell for cell in cells if cell.measure("comm/cost_ms") and cell.first.settings.world > 1]
    cheapest = min(costly, key=_share, default=None)
    cost = None if cheapest is None else cheapest.measure("comm/cost_ms")
    # A cost that is not above its error, or negative, is no achievement.
    if cheapest is not None and cost is not None and not within_noise("comm/cost_ms", cost):
        found.append(
            Headline(
                title("Cheapest communication", "Communication"),
                cheapest.label,
                f"{100 * _share(cheapest):.0f} % of a step, {_figure(cheapest, 'comm/cost_ms')}",
                doubt or _equals(cells, cheapest, "comm/cost_ms"),
            )
        )
    if (busiest := _best(cells, "mfu")) is not None and busiest.first.results is not None:
        use = busiest.first.results.utilisation
        peak = f"of {use.peak_flops_per_s / 1e12:g} TFLOP/s" if use is not None else ""
        found.append(
            Headline("Model FLOPs utilisation", busiest.label, f"{_figure(busiest, 'mfu')} {peak}".rstrip())
        )
    return found


def _share(cell: Cell) -> float:
    """Of communication in the step."""
    return (cell.value("comm/cost_ms") or 0.0) / (cell.value("step/p50_ms") or 1.0)


def _equals(cells: Sequence[Cell], best: Cell, name: str) -> str:
    """Who cannot be told from the best, by the same differences as everywhere."""
    changes = [(cell, difference(cell, best, name)) for cell in cells if cell is not best]
    labels = [
        cell.label for cell, change in changes if change is not None and change.verdict == "within noise"
    ]
    others = sum(cell is not best and cell.measure(name) is not None for cell in cells)
    if labels and len(labels) == others:
        return "no verdict: all others are within the noise of it"
    return f"within the noise of it: {listed(labels)}" if labels else ""


def _trade(smallest: Cell, fastest: Cell, memory: str, speed: str) -> str:
    if smallest is fastest:
        return ""
    less = 1.0 - (smallest.value(memory) or 0.0) / (fastest.value(memory) or 1.0)
    share = (smallest.value(speed) or 0.0) / (fastest.value(speed) or 1.0)
    if less <= 0.0 or share == 0.0:
        return ""
    return f"{less:.0%} less than {fastest.label}, at {share:.0%} of its throughput".replace("%", " %")


def change_headlines(cells: Sequence[Cell], partners: Mapping[int, Cell | None]) -> list[Headline]:
    """How many cells changed against the first run, and the largest change."""
    found = []
    for title, name in (
        ("Step time", "step/p50_ms"),
        ("Memory", memory_metric(cells)[0]),
        ("Communication", "comm/cost_ms"),
    ):
        changes = [
            (change, cell)
            for cell in cells
            if (change := difference(cell, partners[id(cell)], name)) is not None
            and not _hidden(cell, partners[id(cell)], name)
        ]
        if not changes:
            continue
        verdicts = Counter(change.verdict for change, _ in changes)
        words = [f"{verdicts[verdict]} {word}" for verdict, word in _VERDICTS.items() if verdicts[verdict]]
        change, cell = max(changes, key=lambda item: abs(item[0].relative))
        noise = "" if change.noise is None else f", noise ±{change.noise:.1%}".replace("%", " %")
        unknown = " ?" if change.verdict == "noise unknown" else ""
        most = f"{'most: ' if len(changes) > 1 else ''}{percent(change)}{unknown}{noise}"
        found.append(
            Headline(
                f"{title} against the baseline",
                ", ".join(words),
                most,
                cell.label if len(changes) > 1 else "",
            )
        )
    return found


_VERDICTS: Mapping[Verdict, str] = {
    "worse": "worse",
    "better": "better",
    "within noise": "within the noise",
    "noise unknown": "not known: single runs",
}


def _hidden(cell: Cell, partner: Cell | None, name: str) -> bool:
    """Whether either value lies within its own noise: a share of it says nothing."""
    both = [one.measure(name) for one in (cell, partner) if one is not None]
    return any(one is not None and within_noise(name, one) for one in both)


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which (cost, gain) no other beats: none has less cost at no less gain, or more gain at no more cost."""
    return [
        not any((x <= cost and y > gain) or (x < cost and y >= gain) for x, y in points)
        for cost, gain in points
    ]
