"""What is shown of cells, by the command line and the page: numbers, columns of metrics, headlines, colours."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from zerokit.bench.comparison.cells import ALONE, Cell
from zerokit.bench.comparison.differences import Difference, Verdict, comparable, difference, steps_of
from zerokit.bench.record.metrics import METRICS, PACED, UNITS, Measured, instrumented
from zerokit.bench.record.options import ON_DEVICE
from zerokit.text import printable

GIB_FROM = 10 * 1024.0
"""MiB from which GiB read better."""
_SHARES = ("idle/least", "idle/most", "mfu", "step/spread", "step/drift", "phase/optimizer_share")


@dataclass(frozen=True, slots=True)
class Scale:
    """The format of one column: a factor, decimals and a unit."""

    unit: str
    factor: float
    decimals: int

    def text(self, value: float | None) -> str:
        """A number with thousands separators and a real minus sign; "–" if there is no value."""
        if value is None:
            return "–"
        text = f"{value * self.factor:,.{self.decimals}f}"
        if not any(digit in text for digit in "123456789"):
            text = text.lstrip("-")
        return text.replace("-", "−")


def scale_of(name: str, values: Iterable[float | None]) -> Scale:
    """The format of a metric's column: three digits of the typical value, in a unit that keeps it readable."""
    found = [abs(value) for value in values if value and math.isfinite(value)]
    typical = median(found) if found else 0.0
    unit, factor, fewest, most = METRICS[name].unit, 1.0, 0, 4
    if unit == "MiB" and typical >= GIB_FROM:
        unit, factor = "GiB", 1 / 1024
    elif unit == "ms" and typical >= 10_000:
        unit, factor = "s", 1e-3
    elif name in _SHARES:
        unit, factor, fewest, most = "%", 100.0, 1, 2
    elif name.startswith("loss"):
        fewest = 4
    elif name in ("skipped_steps", "traffic/elements_per_step"):
        most = 0
    decimals = 2 - math.floor(math.log10(typical * factor)) if typical else 0
    return Scale(unit, factor, min(max(decimals, fewest), most))


def percent(difference: Difference) -> str:
    """A signed change: "+6.5 %", "−12 %", "×3.2" for large ratios; "=" for no change."""
    share = difference.relative
    if share == 0.0:
        return "="
    if not math.isfinite(share):
        return "from 0"
    if share >= 1.0:
        return f"×{1 + share:.2g}" if share < 9 else f"×{1 + share:,.0f}"
    digits = 0 if abs(share) >= 0.0995 else 1
    text = f"{share * 100:+.{digits}f} %".replace("-", "−")
    return "0.0 %" if text[1:] == "0.0 %" else text


def within_noise(name: str, measured: Measured) -> bool:
    """Whether a cost is within its error; communication never makes a step shorter."""
    return name == "comm/cost_ms" and measured.value <= (measured.error or 0.0)


WITHIN_NOISE = "within noise"
EXTRA_STEPS = "in extra steps"
INSTRUMENTED = "with a wait after each part, so parts take longer than in measured steps"
FEW = 4
"""Up to so many cells are compared in detail."""
_DETAILS = (
    "step/p90_ms",
    "step/skew_p50_ms",
    "idle/least",
    "idle/most",
    "memory/state_mib",
    "comm/exposed_ms",
    *("phase/forward_ms", "phase/backward_ms", "phase/optimizer_ms", "phase/optimizer_share"),
    *("traffic/mib_per_step", "loss_last"),
)
_UNEQUAL = ("shares", "pace", "cores_per_rank", "memory_per_rank")
OF_A_PAGE = ("memory/state_mib", "loss_last")


def usual_metrics(cells: Sequence[Cell], details: Sequence[str] | None = None) -> list[str]:
    """The main metrics; with `details`, which is the default for few cells, more of them.

    The optimizer's share of the step is among them once a cell has another optimizer than AdamW, or states that visit,
    and ranks' idle time once ranks are unequal.
    """
    if details is None:
        details = _DETAILS if len(cells) <= FEW else ()
    wanted = {"step/p50_ms", "mfu", memory_metric(cells)[0], "comm/cost_ms", *details}
    if len(cells) > 1:
        wanted.add(PACED)
    away = any(cell.settings["states"] != ON_DEVICE for cell in cells)
    if any(cell.settings[name] for name in _UNEQUAL for cell in cells):
        wanted |= {"idle/least", "idle/most"}
    if away or any(cell.settings["optimizer"] != "adamw" for cell in cells):
        wanted.add("phase/optimizer_share")
    if away:
        wanted |= {"memory/elsewhere_mib", "memory/state_mib"}
    wanted |= {f"throughput/{unit}_per_s" for unit in UNITS} | {f"to_target/{unit}" for unit in UNITS}
    if len(steps_of(cells)) > 1:
        wanted.discard("loss_last")
    return in_order(wanted)


def in_order(names: Iterable[str]) -> list[str]:
    """Figures of the measured steps, then figures of the extra profiled steps."""
    wanted = set(names)
    return sorted((name for name in METRICS if name in wanted), key=instrumented)


@dataclass(frozen=True, slots=True)
class Entry:
    """A metric of a cell: the value, "±" and its error, and the difference from the baseline; "" if unknown.

    `verdict`: "better" or "worse" where the difference exceeds the noise, else "".
    """

    value: str
    error: str = ""
    change: str = ""
    verdict: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A metric with its unit and one entry per cell."""

    metric: str
    title: str
    unit: str
    entries: tuple[Entry, ...]

    @property
    def instrumented(self) -> bool:
        """Whether it is not of the measured steps."""
        return instrumented(self.metric)

    @property
    def looks(self) -> list[str]:
        """What stands beside its values: "error", "change"."""
        return [look for look in ("error", "change") if any(getattr(entry, look) for entry in self.entries)]


def columns_of(cells: Sequence[Cell], names: Sequence[str], *, compared: bool = True) -> list[Column]:
    """A column for each of these metrics that any cell has; a column has one unit and equal decimals."""
    columns = []
    for name in names:
        values = [cell.value(name) for cell in cells]
        if any(value is not None for value in values):
            scale = scale_of(name, values)
            # The change of a throughput is that of the step beside it, the other way round.
            beside = compared and not (name.startswith("throughput") and "step/p50_ms" in names)
            entries = tuple(_entry(cell, name, scale, compared=beside) for cell in cells)
            columns.append(Column(name, METRICS[name].title, scale.unit, entries))
    return columns


def markdown(cells: Sequence[Cell], metrics: Iterable[str] = ()) -> list[str]:
    """The main metrics and these of all cells that could run, as lines of a Markdown table, and what its signs mean."""
    cells = [cell for cell in cells if cell.status != "unsupported"]
    if not cells:
        return []
    columns = columns_of(cells, in_order([*usual_metrics(cells, ()), *metrics]))
    heads = [
        "cell",
        *(f"{column.title}, {column.unit}" if column.unit else column.title for column in columns),
    ]
    rows = [heads, ["---"] * len(heads)]
    for place, cell in enumerate(cells):
        entries = (column.entries[place] for column in columns)
        figures = [" ".join(filter(None, (one.value, one.error, one.change))) for one in entries]
        rows.append([cell.label, *(figures if cell.status == "ok" else [str(cell.status)])])
    table = [f"| {' | '.join(map(markdown_text, row))} |" for row in rows]
    return [*table, "", markdown_text(marks_of(cells, {column.metric for column in columns}))]


def marks_of(cells: Sequence[Cell], shown: Collection[str]) -> str:
    """What a reader has to know of the signs above."""
    pairs = [(cell, partner) for cell in cells if (partner := cell.baseline) is not None]
    rounds = {len(cell.measured_records) for cell in cells}
    marks = []
    if pairs:
        against = list(dict.fromkeys(partner.label for _, partner in pairs))
        whose = printable(against[0]) if len(against) == 1 else "the same cell of the first run"
        marks.append(f"Changes are against {whose}.")
        if max(rounds) > 1:
            marks.append("≈ is within the noise between runs.")
        if any(len(one.measured_records) == 1 for pair in pairs for one in pair):
            marks.append(
                "? is not known: a single run does not show the noise between runs; --repeats 3 does."
            )
    if PACED in shown:
        marks.append(
            "The paced step is in units of compute-only passes next to it, so that the machine's speed cancels: it "
            "decides where milliseconds say otherwise."
        )
    if max(rounds) > 1:
        marks.append("± is half of the 95 % interval over rounds.")
    if "comm/cost_ms" in shown and len(cells) > 1:
        marks.append("Communication is the time that a step takes longer than a compute-only one next to it.")
    return " ".join(marks)


def markdown_text(text: str) -> str:
    """The text in one line of Markdown that has no markup, HTML, link, mention or end of a table's cell."""
    escaped = re.sub(r"([\\`*_\[\]<>|&~#$:]|(?<=www)\.)", r"\\\1", printable(text), flags=re.IGNORECASE)
    return escaped.replace("@", "@<!-- -->")  # no escape keeps GitHub from seeing a name after it


def within(lines: Iterable[str], most: int) -> str:
    """The lines as text of at most `most` bytes in UTF-8, with "…" for those that find no room."""
    text, room = "", most - len("…".encode())
    for line in lines:
        if (room := room - len(line.encode()) - 1) < 0:
            return f"{text}…"
        text += f"{line}\n"
    return text


def _entry(cell: Cell, name: str, scale: Scale, *, compared: bool) -> Entry:
    if (measured := cell.measure(name)) is None:
        return Entry(scale.text(None))
    if within_noise(name, measured):
        return Entry(WITHIN_NOISE)
    error = f"±{scale.text(measured.error)}" if measured.error and not name.startswith("throughput") else ""
    base = cell.baseline.measure(name) if compared and cell.baseline is not None else None
    if base is None or (
        METRICS[name].additive and base.value <= (base.error or 0.0)
    ):  # no ratio means anything
        return Entry(scale.text(measured.value), error)
    return Entry(scale.text(measured.value), error, *_change(difference(cell, cell.baseline, name)))


def _change(change: Difference | None) -> tuple[str, str]:
    if change is None:
        return "", ""
    text = percent(change)
    if change.verdict == "within noise":
        return f"≈ {text}" if change.relative else text, ""
    if change.verdict == "noise unknown":
        return f"{text} ?", ""
    return text, "" if text == "0.0 %" else change.verdict


def memory_metric(cells: Sequence[Cell]) -> tuple[str, str]:
    """The metric that limits the model's size here, and its display name."""
    if having(cells, "memory/peak_allocated_mib"):
        return "memory/peak_allocated_mib", "peak CUDA memory"
    return "memory/peak_host_mib", "peak host memory"


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


def best_headlines(cells: Sequence[Cell]) -> list[Headline]:
    """The best cell in each respect; empty if models or units differ.

    Nothing is called best unless it differs from all others by more than the noise. Ranks that train alone are a floor,
    and no competitor.
    """
    cells = [cell for cell in cells if cell.settings["engine"] != ALONE] or cells
    rates = [name for name in (f"throughput/{unit}_per_s" for unit in UNITS) if having(cells, name)]
    if len(rates) != 1 or len({cell.settings["model"] for cell in cells}) > 1:
        return []
    memory, called = memory_metric(cells)
    several = [cell for cell in cells if cell.first.settings.world > 1]
    found = [
        _contest("Fastest", cells, rates[0]),
        _contest("Least memory", cells, memory, f" a rank ({called.removesuffix(' memory')})"),
        _contest("Cheapest communication", several, "comm/cost_ms", " a step"),
        _contest("Highest MFU", cells, "mfu"),
    ]
    return [headline for headline in found if headline is not None]


def having(cells: Sequence[Cell], *names: str) -> list[Cell]:
    """The cells that have all of these metrics."""
    return [cell for cell in cells if all(cell.value(name) is not None for name in names)]


def _contest(superlative: str, cells: Sequence[Cell], name: str, behind: str = "") -> Headline | None:
    """The tile of one metric: the winner, or that the noise leaves several; `behind` follows the unit."""
    cells = having(cells, name)
    sign = 1.0 if METRICS[name].better == "lower" else -1.0
    best = min(cells, key=lambda cell: sign * (cell.value(name) or 0.0), default=None)
    measured = None if best is None else best.measure(name)
    if best is None or measured is None or not all(comparable(cell, best, name) for cell in cells):
        return None
    if within_noise(name, measured):  # no achievement
        return None
    changes = [(cell, difference(cell, best, name)) for cell in cells if cell is not best]
    unbeaten = [best, *(cell for cell, change in changes if change and change.verdict in _UNDECIDED)]
    values = [cell.value(name) or 0.0 for cell in unbeaten]
    scale = scale_of(name, values)
    ends = dict.fromkeys(scale.text(value) for value in (min(values), max(values)))
    what = f"{' to '.join(ends)} {scale.unit}{behind}"
    if len(unbeaten) == 1:
        title = METRICS[name].title
        return Headline(superlative if len(cells) > 1 else title[0].upper() + title[1:], best.label, what)
    also = f"within the noise: {listed([cell.label for cell in unbeaten])}"
    if any(len(cell.measured_records) == 1 for cell in unbeaten):
        also = "single runs do not decide: run several rounds (--repeats 3)"
    return Headline(superlative, "no clear winner", what, also)
