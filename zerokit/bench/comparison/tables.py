"""Tables of cells as text, rendered by the command line and the page: the main figures, or all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from zerokit.bench.comparison.cells import Cell
from zerokit.bench.comparison.differences import Difference, difference, steps_of
from zerokit.bench.comparison.figures import percent, scale_of, within_noise
from zerokit.bench.comparison.roles import memory_metric, roles_of
from zerokit.bench.record.metrics import METRICS, PACED, UNITS, instrumented

WITHIN_NOISE = "within noise"
EXTRA_STEPS = "in extra steps"
INSTRUMENTED = "with a wait after each part, so parts take longer than in measured steps"
FEW = 4
"""Up to so many cells are compared in detail."""
_REASON = 400
"""Letters of a failure's reason that the table shows; the record has it whole."""
_DETAILS = (
    "step/p90_ms",
    "step/skew_p50_ms",
    "memory/state_mib",
    "comm/exposed_ms",
    *("phase/forward_ms", "phase/backward_ms", "phase/optimizer_ms", "traffic/mib_per_step", "loss_last"),
)
_OF_A_PAGE = ("memory/state_mib", "loss_last")


def usual_metrics(cells: Sequence[Cell], details: Sequence[str] | None = None) -> list[str]:
    """The main metrics; with `details`, which is the default for few cells, more of them."""
    if details is None:
        details = _DETAILS if len(cells) <= FEW else ()
    wanted = {"step/p50_ms", "mfu", memory_metric(cells)[0], "comm/cost_ms", *details}
    if len(cells) > 1:
        wanted.add(PACED)
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


def columns_of(
    cells: Sequence[Cell], partners: Mapping[int, Cell | None], names: Sequence[str]
) -> list[Column]:
    """A column for each of these metrics that any cell has; a column has one unit and equal decimals."""
    columns = []
    for name in names:
        values = [cell.value(name) for cell in cells]
        if any(value is not None for value in values):
            scale = scale_of(name, METRICS[name].unit, values)
            rate, entries = name.startswith("throughput"), []
            for cell in cells:
                measured, partner = cell.measure(name), partners[id(cell)]
                if measured is not None and within_noise(name, measured):
                    entries.append(Entry(WITHIN_NOISE))
                    continue
                error = measured.error if measured else None
                entries.append(
                    Entry(
                        scale.text(measured.value if measured else None),
                        f"±{scale.text(error)}" if error and not rate else "",
                        # That of a throughput is that of the step beside it, the other way round.
                        *_change(
                            None if rate and "step/p50_ms" in names else difference(cell, partner, name)
                        ),
                    )
                )
            columns.append(Column(name, METRICS[name].title, scale.unit, tuple(entries)))
    return columns


def _change(change: Difference | None) -> tuple[str, str]:
    if change is None:
        return "", ""
    text = percent(change)
    if change.verdict == "within noise":
        return f"≈ {text}" if change.relative else text, ""
    if change.verdict == "noise unknown":
        return f"{text} ?", ""
    return text, change.verdict


@dataclass(frozen=True, slots=True)
class Head:
    """A heading over `span` columns."""

    title: str
    unit: str
    span: int = 1


@dataclass(frozen=True, slots=True)
class Item:
    """One cell of a table as text; `look` is its class."""

    text: str
    look: str


@dataclass(frozen=True, slots=True)
class Line:
    """A row: its items, or the cell's status and reason."""

    label: str
    role: str
    items: tuple[Item, ...] = ()
    said: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Headings and rows; `corner` stands over the rows' labels."""

    corner: str
    heads: tuple[Head, ...]
    rows: tuple[Line, ...]

    @property
    def width(self) -> int:
        return sum(head.span for head in self.heads)


def results_table(cells: Sequence[Cell], partners: Mapping[int, Cell | None]) -> Table:
    """One row per cell and one column per metric, with columns for errors and differences if there are any."""
    roles, heads = roles_of(cells), []
    by_cell: list[list[Item]] = [[] for _ in cells]
    for column in columns_of(cells, partners, usual_metrics(cells, _OF_A_PAGE)):
        looks = [
            look for look in ("error", "change") if any(getattr(entry, look) for entry in column.entries)
        ]
        heads.append(Head(column.title, column.unit, 1 + len(looks)))
        for items, entry in zip(by_cell, column.entries, strict=True):
            items.append(Item(entry.value, "value"))
            for look in looks:
                verdict = f" {entry.verdict}" if look == "change" and entry.verdict else ""
                items.append(Item(getattr(entry, look), look + verdict))
    rows = [
        Line(cell.label, roles[id(cell)], tuple(items))
        if cell.status == "ok"
        else Line(cell.label, roles[id(cell)], (), cell.status, shortened(cell.first.reason))
        for cell, items in zip(cells, by_cell, strict=True)
        if cell.status != "unsupported"
    ]
    return Table("cell", tuple(heads), tuple(rows))


def shortened(reason: str | None) -> str:
    """The reason on one line."""
    text = " ".join((reason or "").split())
    return text if len(text) <= _REASON else text[:_REASON] + "…"


def figures_table(cells: Sequence[Cell]) -> Table:
    """Every metric that any cell has: one row per metric, one column per cell."""
    well = [cell for cell in cells if cell.status == "ok"]
    rows: list[Line] = []
    for column in columns_of(well, {id(cell): None for cell in well}, in_order(METRICS)):
        if instrumented(column.metric) and not any(row.said for row in rows):
            rows.append(Line(EXTRA_STEPS, "", (), INSTRUMENTED))
        label = f"{column.metric} ({', '.join(filter(None, (column.title, column.unit)))})"
        rows.append(Line(label, "", tuple(Item(entry.value, "value") for entry in column.entries)))
    return Table("metric", tuple(Head(cell.label, "") for cell in well), tuple(rows))
