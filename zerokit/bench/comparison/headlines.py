"""The headlines of a comparison: the best cell in each respect, or the changes against the baseline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from zerokit.bench.comparison.cells import ALONE, Cell
from zerokit.bench.comparison.differences import Verdict, comparable, difference
from zerokit.bench.comparison.figures import percent, scale_of, within_noise
from zerokit.bench.comparison.tables import memory_metric
from zerokit.bench.record.metrics import METRICS, UNITS

_STEP, _COST = "step/p50_ms", "comm/cost_ms"
_UNDECIDED: tuple[Verdict, ...] = ("within noise", "noise unknown")


@dataclass(frozen=True, slots=True)
class Headline:
    """One headline of a comparison."""

    title: str
    who: str
    what: str
    also: str = ""


def listed(words: Sequence[str]) -> str:
    """The items as in a sentence: "a", "a and b", "a, b and c"."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _best(cells: Sequence[Cell], name: str) -> Cell | None:
    found = [cell for cell in cells if cell.value(name) is not None]
    sign = 1.0 if METRICS[name].better == "lower" else -1.0
    return min(found, key=lambda cell: sign * (cell.value(name) or 0.0), default=None)


def best_headlines(cells: Sequence[Cell]) -> list[Headline]:
    """The best cell in each respect; empty if models or units differ.

    Nothing is called best unless it differs from all others by more than the noise. Ranks that train alone are a floor,
    and no competitor.
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
    found = [_contest("Fastest", "Throughput", cells, fastest, speed)]
    found[0] = replace(
        found[0], what=f"{found[0].what}, {_range(_unbeaten(cells, fastest, speed), _STEP)} a step"
    )
    if smallest is not None:
        held = _contest("Least memory", "Memory", cells, smallest, memory)
        trade = "" if _rivals(cells, fastest, speed) else _trade(smallest, fastest, memory, speed)
        what = f"{held.what} a rank ({memory_words.removesuffix(' memory')})"
        found.append(replace(held, what=what, also=held.also or trade))
    costly = [cell for cell in cells if cell.measure(_COST) and cell.first.settings.world > 1]
    cheapest = _best(costly, _COST)
    cost = None if cheapest is None else cheapest.measure(_COST)
    # A cost that is not above its error, or negative, is no achievement.
    if (
        cheapest is not None
        and cost is not None
        and not within_noise(_COST, cost)
        and all(comparable(cell, cheapest, _COST) for cell in costly)
    ):
        tile = _contest("Cheapest communication", "Communication", costly, cheapest, _COST)
        if not tile.also:
            share = cost.value / (cheapest.value(_STEP) or 1.0)
            tile = replace(tile, what=f"{100 * share:.0f} % of a step, {tile.what}")
        found.append(tile)
    if (busiest := _best(cells, "mfu")) is not None and busiest.first.results is not None:
        tile = _contest("Highest MFU", "Model FLOPs utilisation", cells, busiest, "mfu")
        use = busiest.first.results.utilisation
        peak = f" of {use.peak_flops_per_s / 1e12:g} TFLOP/s" if use is not None else ""
        found.append(replace(tile, what=tile.what + peak))
    return found


def _rivals(cells: Sequence[Cell], best: Cell, name: str) -> list[Cell]:
    """Who is not known to differ from the best, by the same differences as everywhere."""
    changes = [(cell, difference(cell, best, name)) for cell in cells if cell is not best]
    return [cell for cell, change in changes if change is not None and change.verdict in _UNDECIDED]


def _unbeaten(cells: Sequence[Cell], best: Cell, name: str) -> list[Cell]:
    """The best and its rivals."""
    return [best, *_rivals(cells, best, name)]


def _contest(superlative: str, plain: str, cells: Sequence[Cell], best: Cell, name: str) -> Headline:
    """The tile of one metric: the winner, or that the noise leaves several."""
    unbeaten = _unbeaten(cells, best, name)
    if len(unbeaten) > 1:
        single = any(len(cell.measured_records) == 1 for cell in unbeaten)
        also = f"within the noise: {listed([cell.label for cell in unbeaten])}"
        if single:
            also = "single runs do not decide: run several rounds (--repeats 3)"
        return Headline(superlative, "no clear winner", _range(unbeaten, name), also)
    contested = sum(cell.measure(name) is not None for cell in cells) > 1
    return Headline(superlative if contested else plain, best.label, _range([best], name))


def _range(cells: Sequence[Cell], name: str) -> str:
    """The least and the largest value with their unit."""
    values = [value for cell in cells if (value := cell.value(name)) is not None]
    scale = scale_of(name, METRICS[name].unit, values)
    ends = dict.fromkeys(scale.text(value) for value in (min(values), max(values)))
    return f"{' to '.join(ends)} {scale.unit}".rstrip()


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
