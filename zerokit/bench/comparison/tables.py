"""Tables of cells: the figures that most readers want, and all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerokit.bench.comparison.cells import Cell
from zerokit.bench.comparison.differences import Difference, difference, steps_of
from zerokit.bench.comparison.figures import percent, scale_of, within_noise
from zerokit.bench.comparison.roles import memory_metric, roles_of
from zerokit.bench.record.metrics import METRICS, UNITS

_REASON = 400
"""Letters of a failure's reason that the table shows; the record has it whole."""


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
    """A row: its places, or what is said instead of them."""

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
    """The figures that most readers want, with noise and difference where they help."""
    compared = any(partner is not None for partner in partners.values())
    columns = [
        ("step/p50_ms", True, compared),
        ("step/p90_ms", False, False),
        *((f"throughput/{unit}_per_s", False, compared) for unit in UNITS),
        (memory_metric(cells)[0], False, compared),
        ("memory/state_mib", False, False),
        ("comm/cost_ms", True, False),
        ("mfu", False, False),
        ("traffic/mib_per_step", False, False),
    ]
    if len(steps_of(cells)) == 1:
        columns.append(("loss_last", False, False))
    return _table(cells, partners, columns)


def _table(
    cells: Sequence[Cell], partners: Mapping[int, Cell | None], columns: Sequence[tuple[str, bool, bool]]
) -> Table:
    roles = roles_of(cells)
    heads: list[Head] = []
    by_cell: list[list[Item]] = [[] for _ in cells]
    for name, with_error, with_change in columns:
        values = [cell.value(name) for cell in cells]
        if all(value is None for value in values):
            continue
        metric = METRICS[name]
        scale = scale_of(name, metric.unit, values)
        heads.append(Head(metric.title, scale.unit, 1 + with_error + with_change))
        for cell, items in zip(cells, by_cell, strict=True):
            measured = cell.measure(name)
            noise = measured is not None and within_noise(name, measured)
            text = "within noise" if noise else scale.text(measured.value if measured else None)
            items.append(Item(text, "value"))
            if with_error:
                known = measured is not None and measured.error and not noise
                items.append(Item(f"±{scale.text(measured.error)}" if measured and known else "", "error"))
            if with_change:
                items.append(_change(difference(cell, partners[id(cell)], name)))
    rows = [
        Line(cell.label, roles[id(cell)], tuple(items))
        if cell.status == "ok"
        else Line(cell.label, roles[id(cell)], (), cell.status, shortened(cell.first.reason))
        for cell, items in zip(cells, by_cell, strict=True)
        if cell.status != "unsupported"
    ]
    return Table("cell", tuple(heads), tuple(rows))


def _change(change: Difference | None) -> Item:
    if change is None:
        return Item("", "change")
    text = percent(change)
    if change.verdict == "within noise":
        return Item(f"≈ {text}" if change.relative else text, "change")
    if change.verdict == "noise unknown":
        return Item(f"{text} ?", "change")
    return Item(text, f"change {change.verdict}")


def shortened(reason: str | None) -> str:
    """A reason on one line."""
    text = " ".join((reason or "").split())
    return text if len(text) <= _REASON else text[:_REASON] + "…"


def figures_table(cells: Sequence[Cell]) -> Table:
    """Every metric that any cell has: a row a metric, a column a cell."""
    well = [cell for cell in cells if cell.status == "ok"]
    rows = []
    for name, metric in METRICS.items():
        values = [cell.value(name) for cell in well]
        if all(value is None for value in values):
            continue
        scale = scale_of(name, metric.unit, values)
        items = [Item(scale.text(value), "value") for value in values]
        label = f"{name} ({metric.title}, {scale.unit})" if scale.unit else f"{name} ({metric.title})"
        rows.append(Line(label, "", tuple(items)))
    return Table("metric", tuple(Head(cell.label, "") for cell in well), tuple(rows))
