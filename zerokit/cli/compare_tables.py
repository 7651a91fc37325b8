"""The table that a sweep ends with and that `zerokit compare` prints, and the same as JSON for a program."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from zerokit.bench.comparison.cells import Cell, unsupported, varying
from zerokit.bench.comparison.conditions import conditions, drift_notes
from zerokit.bench.comparison.differences import Difference, Regression, difference, steps_of
from zerokit.bench.comparison.figures import Scale, count, percent, scale_of, within_noise
from zerokit.bench.comparison.roles import memory_metric
from zerokit.bench.record.metrics import METRICS, UNITS
from zerokit.bench.record.schema import to_plain
from zerokit.cli.text import counted
from zerokit.text import printable

# Up to this many cells have a column each; more have a row each.
_COLUMNS = 4
_ANY_WIDTH = 1000
_STYLES = {"better": "green", "worse": "red"}


def show(
    console: Console, cells: Sequence[Cell], partners: Mapping[int, Cell | None], metrics: Sequence[str] = ()
) -> None:
    """What all cells have in common, the table, what differs, and what the marks mean.

    Without `metrics`, those that matter most.
    """
    if not console.is_terminal:
        console.width = _ANY_WIDTH  # no line of a pipe is folded
    names = [name for name in metrics or _usual(cells) if any(cell.value(name) is not None for cell in cells)]
    missing = [name for name in metrics if name not in names]
    scales = {
        name: scale_of(name, METRICS[name].unit, [cell.value(name) for cell in cells]) for name in names
    }
    run = [cell for cell in cells if cell.status != "unsupported"]
    console.print(Text(printable(_common(cells)), style="bold"), soft_wrap=True)
    for note in drift_notes(cells):
        console.print(Text(note, style="yellow"))
    build = _columns if len(run) <= _COLUMNS else _rows
    table = build(run, partners, scales)
    fits = (
        Measurement.get(console, console.options.update(max_width=_ANY_WIDTH), table).minimum <= console.width
    )
    console.print(table if fits else _list(run, partners, scales))
    for text in [*_failures(cells), *(f"{name}: no cell has it" for name in missing)]:
        console.print(Text(printable(text)), soft_wrap=True)
    _show_conditions(console, cells)
    console.print(Text(_marks(cells, partners, names), style="dim"))


def _common(cells: Sequence[Cell]) -> str:
    """What does not vary, in one line."""
    names, first = (
        varying(cell.first for cell in cells),
        next((c for c in cells if c.status == "ok"), cells[0]),
    )
    record, settings = first.first, first.first.settings
    words = []
    if "model" not in names:
        size = f" ({count(record.model.parameters)} parameters)" if record.model else ""
        words.append(settings.model + size)
    if "precision" not in names and settings.precision:
        words.append(settings.precision)
    if not {"nodes", "nproc_per_node"} & set(names):
        words.append(f"{counted(settings.world, 'rank')} on {counted(settings.nodes, 'node')}")
    if "batch_size" not in names:
        words.append(f"batch {settings.batch_size}")
    if record.environment is not None:
        words.append(record.environment.backend)
    rounds = sorted({len(cell.measured_records) for cell in cells if cell.measured_records})
    if rounds and rounds != [1]:
        words.append(f"medians of {' or '.join(map(str, rounds))} rounds")
    return ", ".join(words)


def _failures(cells: Sequence[Cell]) -> list[str]:
    """Why cells, or some of their rounds, have no figures."""
    lines = [f"{labels}: unsupported: {_line(reason)}" for labels, reason in unsupported(cells)]
    for cell in cells:
        failed = [record for record in cell.records if record.status not in ("ok", "unsupported")]
        told = dict.fromkeys((record.status, _line(record.reason)) for record in failed)
        some = (
            f" ({len(failed)} of {len(cell.records)} rounds)" if 0 < len(failed) < len(cell.records) else ""
        )
        lines += [f"{cell.label}{some}: {status}: {reason}" for status, reason in told]
    return lines


def _marks(cells: Sequence[Cell], partners: Mapping[int, Cell | None], names: Sequence[str]) -> str:
    """What a reader has to know of the signs above."""
    against = list(dict.fromkeys(partner.label for partner in partners.values() if partner is not None))
    several = any(len(cell.measured_records) > 1 for cell in cells)
    said = []
    if against:
        whose = printable(against[0]) if len(against) == 1 else "the same cell of the first run"
        said.append(f"Changes are against {whose}.")
        if several:
            said.append("≈ is within the noise between runs.")
        pairs = [(cell, partner) for cell in cells if (partner := partners[id(cell)]) is not None]
        if any(len(one.measured_records) == 1 for pair in pairs for one in pair):
            said.append(
                "? is not known: a single run does not tell the noise between runs; --repeats 3 does."
            )
        if any(record.twin and record.twin.pace_ms for cell in cells for record in cell.measured_records):
            said.append(
                "Speed is compared by the step against compute-only steps beside it: the machine's pace cancels."
            )
    if several:
        said.append("± is half of the 95 % interval over rounds.")
    if "comm/cost_ms" in names:
        said.append("Communication is what a step takes longer than a compute-only one beside it.")
    return " ".join(said)


def as_json_text(
    cells: Sequence[Cell],
    partners: Mapping[int, Cell | None],
    broken: Sequence[Regression],
    differing: Sequence[str] = (),
) -> str:
    """Every figure of every cell, its error, and its difference from the baseline; shares, not percent."""
    rules: dict[bool, list[dict[str, object]]] = {True: [], False: []}
    for one in broken:
        said = {
            "cell": one.cell,
            "metric": one.rule.metric,
            "percent": one.rule.percent,
            "message": one.message,
        }
        rules[one.known].append(said)
    content = {
        "cells": [_plain(cell, partners[id(cell)]) for cell in cells],
        "differing": dict(conditions(cells)[0]),
        "drift": drift_notes(cells),
        "regressions": rules[True],
        "not_known": rules[False],
        "losses_differ": list(differing),
    }
    return json.dumps(to_plain(content), indent=2, allow_nan=False)


def _plain(cell: Cell, partner: Cell | None) -> dict[str, object]:
    metrics = {}
    for name, metric in METRICS.items():
        if (measured := cell.measure(name)) is None:
            continue
        metrics[name] = {"value": measured.value, "error": measured.error, "unit": metric.unit}
        if (change := difference(cell, partner, name)) is not None:
            metrics[name] |= {"relative": change.relative, "noise": change.noise, "verdict": change.verdict}
    return {
        "label": cell.label,
        "run": cell.run,
        "status": cell.status,
        "reason": cell.first.reason,
        "records": [record.id for record in cell.records],
        "baseline": None if partner is None else partner.label,
        "settings": cell.settings,
        "metrics": metrics,
    }


def _usual(cells: Sequence[Cell]) -> list[str]:
    few = len(cells) <= _COLUMNS
    return [
        "step/p50_ms",
        *(["step/p90_ms", "step/skew_p50_ms"] if few else []),
        *(f"throughput/{unit}_per_s" for unit in UNITS),
        "mfu",
        memory_metric(cells)[0],
        *(["memory/state_mib"] if few else []),
        "comm/cost_ms",
        *(["comm/exposed_ms", "phase/forward_ms", "phase/backward_ms", "phase/optimizer_ms"] if few else []),
        *(["traffic/mib_per_step"] if few else []),
        *(["loss_last"] if few and len(steps_of(cells)) == 1 else []),
    ]


def _columns(
    cells: Sequence[Cell], partners: Mapping[int, Cell | None], scales: Mapping[str, Scale]
) -> Table:
    """A row a metric, a column a cell: two or three runs in detail."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("", no_wrap=True, style="dim")
    for cell in cells:
        # A label may wrap, a figure may not.
        figures = max((_figure(cell, name, scale).cell_len for name, scale in scales.items()), default=0)
        table.add_column(Text(printable(cell.label)), justify="right", min_width=figures)
        if partners[id(cell)] is not None:
            table.add_column("", no_wrap=True)
    for name, scale in scales.items():
        row = [Text(METRICS[name].title), Text(scale.unit)]
        for cell in cells:
            row.append(_figure(cell, name, scale))
            if partners[id(cell)] is not None:
                row.append(_change(difference(cell, partners[id(cell)], name)))
        table.add_row(*row)
    return _unbroken(table)


def _rows(cells: Sequence[Cell], partners: Mapping[int, Cell | None], scales: Mapping[str, Scale]) -> Table:
    """A row a cell, a column a metric: a sweep at a glance."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("cell", no_wrap=True)
    compared = any(partner is not None for partner in partners.values())
    for name, scale in scales.items():
        table.add_column(f"{METRICS[name].title}\n{scale.unit}", justify="right", no_wrap=True)
        if compared and name != "comm/cost_ms":
            table.add_column("", no_wrap=True)
    for cell in cells:
        row = [Text(printable(cell.label))]
        for name, scale in scales.items():
            first = name == next(iter(scales))
            told = cell.status if cell.status != "ok" and first else None
            row.append(Text(told, style="yellow") if told else _figure(cell, name, scale))
            if compared and name != "comm/cost_ms":
                row.append(_change(difference(cell, partners[id(cell)], name)))
        table.add_row(*row)
    return _unbroken(table)


def _unbroken(table: Table) -> Table:
    """Columns that may not wrap get the width of their contents, which rich would cut where there is too little."""
    for column in table.columns:
        if column.no_wrap:
            cells = [column.header, *column.cells]
            texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
            lines = [line for text in texts if isinstance(text, Text) for line in text.split("\n")]
            column.min_width = max((line.cell_len for line in lines), default=0)
    return table


def _list(cells: Sequence[Cell], partners: Mapping[int, Cell | None], scales: Mapping[str, Scale]) -> Group:
    """Cell after cell, a line a metric: what fits where no table does."""
    parts: list[RenderableType] = []
    for cell in cells:
        lines = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
        for justify in ("left", "right", "left"):
            lines.add_column(justify=justify, overflow="fold")
        for name, scale in scales.items():
            if cell.measure(name) is None:
                continue
            figure = Text.assemble(_figure(cell, name, scale), " ", (scale.unit, "dim"))
            lines.add_row(
                Text(METRICS[name].title), figure, _change(difference(cell, partners[id(cell)], name))
            )
        parts.append(Text(printable(cell.label), "bold", overflow="fold"))
        parts.append(lines if cell.status == "ok" else Text(cell.status, style="yellow"))
    return Group(*parts)


def _figure(cell: Cell, name: str, scale: Scale) -> Text:
    """A value, with its error where one is known."""
    measured = cell.measure(name)
    if measured is None:
        return Text("" if cell.status != "ok" else "–", style="dim")
    if within_noise(name, measured):
        return Text("within noise", style="dim")
    error = f" ±{scale.text(measured.error)}" if measured.error and not name.startswith("throughput") else ""
    return Text.assemble(scale.text(measured.value), (error, "dim"))


def _change(change: Difference | None) -> Text:
    if change is None:
        return Text("")
    text = percent(change)
    if change.verdict == "within noise":
        return Text(f"≈ {text}" if change.relative else text, style="dim")
    if change.verdict == "noise unknown":
        return Text(f"{text} ?")
    return Text(text, style=_STYLES[change.verdict])


def _show_conditions(console: Console, cells: Sequence[Cell]) -> None:
    """What differs: a line each, each value once."""
    differing, _ = conditions(cells)
    if not differing:
        return
    console.print()
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, values in differing:
        table.add_row(Text(printable(name)), Text(_line(" · ".join(dict.fromkeys(values)))))
    console.print(Text("what differs", style="bold dim"))
    console.print(table)
    console.print()


def _line(text: str | None) -> str:
    return printable(" ".join((text or "").split()))
