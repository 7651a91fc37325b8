"""The table that `zerokit bench` and `zerokit compare` print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from zerokit.bench.comparison.cells import Cell, common_words, conditions, unsupported, warnings_of
from zerokit.bench.comparison.details import detailed_metrics, notes, record_rows
from zerokit.bench.comparison.differences import loss_note
from zerokit.bench.comparison.tables import (
    EXTRA_STEPS,
    FEW,
    INSTRUMENTED,
    WITHIN_NOISE,
    Column,
    columns_of,
    marks_of,
    usual_metrics,
)
from zerokit.terminal.screen import ANY_WIDTH, NARROWEST, Head, grid, headed, line, text, unfolded
from zerokit.text import printable

_STYLES = {"better": "green", "worse": "red", "": "dim"}
_LOOK: dict[str, Any] = {"padding": (0, 2, 0, 0), "header_style": "bold"}


def show(console: Console, cells: Sequence[Cell], metrics: Sequence[str] = ()) -> None:
    """Print the common conditions, the table, the differences, and the meaning of the marks.

    A single run is shown with what each figure means. Without `metrics`, those that matter most.
    """
    unfolded(console, at_least=NARROWEST)
    ran = [cell for cell in cells if cell.status != "unsupported"]
    single = len(cells) == 1 and len(cells[0].records) == 1 and cells[0].status == "ok"
    usual = detailed_metrics(cells) if single else usual_metrics(cells)
    columns = columns_of(ran, metrics or usual)
    console.print(text(", ".join(common_words(cells)), "bold"))
    for note in warnings_of(cells):
        line(console, note, "yellow")
    if single:
        console.print(_annotated(cells[0], columns))
    elif columns:
        table = (_by_metric if len(ran) <= FEW else _by_cell)(ran, columns)
        wide = Measurement.get(console, console.options.update(max_width=ANY_WIDTH), table).minimum
        console.print(table if wide <= console.width else _list(ran, columns))
    shown = {column.metric for column in columns}
    for problem in [*_failures(cells), *(f"{name}: no cell has it" for name in metrics if name not in shown)]:
        line(console, problem)
    _show_conditions(console, cells)
    if note := loss_note(cells):
        console.print(text(note))
    if marks := marks_of(cells, shown):
        console.print(Text(marks, "dim"))


def _failures(cells: Sequence[Cell]) -> list[str]:
    """Why cells, or some of their rounds, have no figures."""
    lines = [f"{labels}: unsupported: {_line(reason)}" for labels, reason in unsupported(cells)]
    for cell in cells:
        failed = [record for record in cell.records if record.status not in ("ok", "unsupported")]
        reasons = dict.fromkeys((record.status, _line(record.reason)) for record in failed)
        some = (
            f" ({len(failed)} of {len(cell.records)} rounds)" if 0 < len(failed) < len(cell.records) else ""
        )
        lines += [f"{cell.label}{some}: {status}: {reason}" for status, reason in reasons]
    return lines


def _annotated(cell: Cell, columns: Sequence[Column]) -> Table:
    """A single run: each figure with what it means, then what is no figure."""
    meaning = notes(cell.first)
    rows = []
    for column in columns:
        unit = "" if column.entries[0].value == WITHIN_NOISE else column.unit
        rows.append((column.title, f"{_figure(column, 0)} {unit}".rstrip(), meaning.get(column.metric, "")))
    measured = _measured(columns)
    extra = [(EXTRA_STEPS, "", INSTRUMENTED)] if rows[measured:] else []
    rows = [*rows[:measured], *record_rows(cell.first), *extra, *rows[measured:]]
    return grid([(text(name, "bold"), text(value), text(note, "dim")) for name, value, note in rows], right=1)


def _measured(columns: Sequence[Column]) -> int:
    """How many are of the measured steps; the others follow."""
    return sum(not column.instrumented for column in columns)


def _by_metric(cells: Sequence[Cell], columns: Sequence[Column]) -> Table:
    """A row a metric, a column a cell: some runs in detail."""
    heads, changed = [Head(), Head(style="dim")], []
    for place, cell in enumerate(cells):
        changed.append(any(column.entries[place].change for column in columns))
        heads += [Head(printable(cell.label), right=True, wraps=True), *([Head()] if changed[place] else [])]
    rows = [
        [Text(column.title), Text(column.unit), *_figures(column, enumerate(changed))] for column in columns
    ]
    if any(column.instrumented for column in columns):
        rows.insert(_measured(columns), [Text(EXTRA_STEPS, "dim")])
    return headed(heads, rows, **_LOOK)


def _by_cell(cells: Sequence[Cell], columns: Sequence[Column]) -> Table:
    """A row a cell, a column a metric: a sweep at a glance."""
    heads, changed = [Head("cell")], []
    for column in columns:
        changed.append(column.metric != "comm/cost_ms" and "change" in column.looks)
        heads += [Head(f"{column.title}\n{column.unit}", right=True), *([Head()] if changed[-1] else [])]
    rows = []
    for place, cell in enumerate(cells):
        row = [text(cell.label)]
        if cell.status == "ok":
            for column, change in zip(columns, changed, strict=True):
                row += _figures(column, [(place, change)])
        else:
            row.append(Text(cell.status, "yellow"))
        rows.append(row)
    return headed(heads, rows, **_LOOK)


def _list(cells: Sequence[Cell], columns: Sequence[Column]) -> Group:
    """Cell after cell, a line a metric: what fits where no table does."""
    parts: list[RenderableType] = []
    for place, cell in enumerate(cells):
        rows = [
            (Text(one.title), Text.assemble(_figure(one, place), " ", (one.unit, "dim")), _change(one, place))
            for one in columns
            if one.entries[place].value != "–"
        ]
        parts.append(Text(printable(cell.label), "bold", overflow="fold"))
        parts.append(grid(rows, right=1) if cell.status == "ok" else Text(cell.status, style="yellow"))
    return Group(*parts)


def _figures(column: Column, places: Iterable[tuple[int, bool]]) -> Iterator[Text]:
    """The values of these cells, each with its change where there is a column for it."""
    for place, change in places:
        yield _figure(column, place)
        if change:
            yield _change(column, place)


def _figure(column: Column, position: int) -> Text:
    """A value, with its error where one is known."""
    entry = column.entries[position]
    style = "dim" if entry.value in ("–", WITHIN_NOISE) else ""
    return Text.assemble((entry.value, style), (f" {entry.error}" if entry.error else "", "dim"))


def _change(column: Column, position: int) -> Text:
    entry = column.entries[position]
    return Text(entry.change, style="" if entry.change.endswith("?") else _STYLES[entry.verdict])


def _show_conditions(console: Console, cells: Sequence[Cell]) -> None:
    """What differs and no label says: a line each, each value once."""
    differing, _ = conditions(cells)
    if differing:
        rows = [
            (text(name, "bold"), Text(_line(" · ".join(dict.fromkeys(values))))) for name, values in differing
        ]
        console.print(Text(), Text("what differs", "bold dim"), grid(rows), Text(), sep="\n")


def _line(text: str | None) -> str:
    return printable(" ".join((text or "").split()))
