"""The table that `zerokit bench` and `zerokit compare` print, and a comparison as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from zerokit.bench.comparison.cells import Cell, common_words, conditions, unsupported, warnings_of
from zerokit.bench.comparison.differences import Regression, difference, loss_note
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
from zerokit.bench.record.metrics import METRICS
from zerokit.bench.record.schema import to_plain
from zerokit.cli.details import NARROWEST, annotate, detailed_metrics, notes, record_rows
from zerokit.text import printable

_ANY_WIDTH = 1000
_WIDE = Console(width=_ANY_WIDTH)
_STYLES = {"better": "green", "worse": "red", "": "dim"}


def show(console: Console, cells: Sequence[Cell], metrics: Sequence[str] = ()) -> None:
    """Print the common conditions, the table, the differences, and the meaning of the marks.

    A single run is shown with what each figure means. Without `metrics`, those that matter most.
    """
    # No line of a pipe is folded.
    console.width = max(console.width, NARROWEST) if console.is_terminal else _ANY_WIDTH
    ran = [cell for cell in cells if cell.status != "unsupported"]
    single = len(cells) == 1 and len(cells[0].records) == 1 and cells[0].status == "ok"
    usual = detailed_metrics(cells) if single else usual_metrics(cells)
    columns = columns_of(ran, metrics or usual)
    console.print(Text(printable(", ".join(common_words(cells))), style="bold"))
    for note in warnings_of(cells):
        console.print(Text(printable(note), style="yellow"), soft_wrap=True)
    if single:
        console.print(_annotated(cells[0], columns))
    elif columns:
        table = (_by_metric if len(ran) <= FEW else _by_cell)(ran, columns)
        wide = Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), table).minimum
        console.print(table if wide <= console.width else _list(ran, columns))
    shown = {column.metric for column in columns}
    for text in [*_failures(cells), *(f"{name}: no cell has it" for name in metrics if name not in shown)]:
        console.print(Text(printable(text)), soft_wrap=True)
    _show_conditions(console, cells)
    if note := loss_note(cells):
        console.print(Text(printable(note)))
    if marks := marks_of(cells, shown):
        console.print(Text(marks, style="dim"))


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
    return annotate(
        [
            ((Text(printable(name), "bold"), Text(printable(value))), Text(printable(note), "dim"))
            for name, value, note in rows
        ],
        right=1,
    )


def _measured(columns: Sequence[Column]) -> int:
    """How many are of the measured steps; the others follow."""
    return sum(not column.instrumented for column in columns)


def _by_metric(cells: Sequence[Cell], columns: Sequence[Column]) -> Table:
    """A row a metric, a column a cell: some runs in detail."""
    table = _table("", "")
    table.columns[1].style = "dim"
    changed = [any(column.entries[place].change for column in columns) for place in range(len(cells))]
    for place, cell in enumerate(cells):
        # A label may wrap, a figure may not.
        figures = max(_figure(column, place).cell_len for column in columns)
        table.add_column(Text(printable(cell.label)), justify="right", min_width=figures)
        if changed[place]:
            table.add_column("", no_wrap=True)
    for number, column in enumerate(columns):
        if number == _measured(columns):
            table.add_row(Text(EXTRA_STEPS, "dim"))
        row = [Text(column.title), Text(column.unit)]
        for place, change in enumerate(changed):
            row += [_figure(column, place), *([_change(column, place)] if change else [])]
        table.add_row(*row)
    return _unbroken(table)


def _by_cell(cells: Sequence[Cell], columns: Sequence[Column]) -> Table:
    """A row a cell, a column a metric: a sweep at a glance."""
    table = _table("cell")
    changed = [column.metric != "comm/cost_ms" and "change" in column.looks for column in columns]
    for column, change in zip(columns, changed, strict=True):
        table.add_column(f"{column.title}\n{column.unit}", justify="right", no_wrap=True)
        if change:
            table.add_column("", no_wrap=True)
    for position, cell in enumerate(cells):
        row = [Text(printable(cell.label)), *([] if cell.status == "ok" else [Text(cell.status, "yellow")])]
        for column, change in zip(columns if cell.status == "ok" else (), changed, strict=False):
            row += [_figure(column, position), *([_change(column, position)] if change else [])]
        table.add_row(*row)
    return _unbroken(table)


def _list(cells: Sequence[Cell], columns: Sequence[Column]) -> Group:
    """Cell after cell, a line a metric: what fits where no table does."""
    parts: list[RenderableType] = []
    for position, cell in enumerate(cells):
        lines = Table.grid(padding=(0, 2, 0, 0))
        for justify in ("left", "right", "left"):
            lines.add_column(justify=justify, overflow="fold")
        for column in columns:
            if column.entries[position].value != "–":
                figure = Text.assemble(_figure(column, position), " ", (column.unit, "dim"))
                lines.add_row(Text(column.title), figure, _change(column, position))
        parts.append(Text(printable(cell.label), "bold", overflow="fold"))
        parts.append(lines if cell.status == "ok" else Text(cell.status, style="yellow"))
    return Group(*parts)


def _table(*heads: str) -> Table:
    """A table that begins with these columns."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for head in heads:
        table.add_column(head, no_wrap=True)
    return table


def _unbroken(table: Table) -> Table:
    """Columns that may not wrap get the width of their contents, which rich would cut where there is too little."""
    for column in table.columns:
        if column.no_wrap:
            texts = [Text(cell) if isinstance(cell, str) else cell for cell in (column.header, *column.cells)]
            column.min_width = max(Measurement.get(_WIDE, _WIDE.options, text).maximum for text in texts)
    return table


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
    if not differing:
        return
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    for name, values in differing:
        table.add_row(Text(printable(name)), Text(_line(" · ".join(dict.fromkeys(values)))))
    console.print(Text(), Text("what differs", style="bold dim"), table, Text(), sep="\n")


def _line(text: str | None) -> str:
    return printable(" ".join((text or "").split()))


def comparison_json(
    cells: Sequence[Cell],
    broken: Sequence[Regression],
    differing: Sequence[str] = (),
) -> str:
    """Every figure of every cell, its error, and its difference from the baseline; shares, not percent."""

    def rules(known: bool) -> list[dict[str, object]]:
        return [
            {"cell": one.cell, "metric": one.rule.metric, "percent": one.rule.percent, "message": one.message}
            for one in broken
            if one.known is known
        ]

    content = {
        "cells": [_plain(cell) for cell in cells],
        "differing": dict(conditions(cells)[0]),
        "warnings": warnings_of(cells),
        "regressions": rules(True),
        "not_known": rules(False),
        "losses_differ": list(differing),
    }
    return json.dumps(to_plain(content), indent=2, allow_nan=False)


def _plain(cell: Cell) -> dict[str, object]:
    metrics = {}
    for name, metric in METRICS.items():
        if (measured := cell.measure(name)) is None:
            continue
        metrics[name] = {"value": measured.value, "error": measured.error, "unit": metric.unit}
        if (change := difference(cell, cell.baseline, name)) is not None:
            metrics[name] |= {"relative": change.relative, "noise": change.noise, "verdict": change.verdict}
    return {
        "label": cell.label,
        "run": cell.run,
        "status": cell.status,
        "reason": cell.first.reason,
        "records": [record.id for record in cell.records],
        "baseline": None if cell.baseline is None else cell.baseline.label,
        "settings": cell.settings,
        "metrics": metrics,
    }
