"""The table that a sweep ends with: a row a cell, its repetitions together, beside the first that came to numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

from zerokit.bench.catalogue.engines import ENGINES
from zerokit.bench.record import Record
from zerokit.bench.record.metrics import METRICS, UNITS, Measured, measure
from zerokit.bench.record.settings import Settings
from zerokit.bench.sweeps.cells import value_in_words, varying
from zerokit.bench.sweeps.sweep import Sweep
from zerokit.cli.columns import Column, fitting, make_table
from zerokit.cli.numbers import MIB, mib, rate
from zerokit.cli.text import counted
from zerokit.text import printable

_HEADINGS = {
    "seq_len": "seq",
    "nproc_per_node": "ranks a node",
    "batch_size": "batch",
    "bucket_mb": "bucket",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A cell and the records of its repetitions."""

    settings: Settings
    records: tuple[Record, ...]

    @property
    def successes(self) -> list[Record]:
        """The records with numbers."""
        return [record for record in self.records if record.status == "ok"]

    @property
    def status(self) -> str:
        """One word for all repetitions, or how many came to numbers and what became of the others."""
        statuses = list(dict.fromkeys(record.status for record in self.records))
        if len(statuses) == 1:
            return statuses[0]
        others = ", ".join(status for status in statuses if status != "ok")
        return f"{len(self.successes)} of {len(self.records)} ok, {others}"

    def figure(self, name: str) -> Measured | None:
        """A metric over the repetitions."""
        return measure(METRICS[name], self.successes) if self.successes else None


def sweep_table(sweep: Sweep, records: Sequence[Record], width: int) -> list[RenderableType]:
    """What all cells have in common, the table, what it means, and why cells have no numbers.

    Args:
        sweep: with the settings as they were asked for.
        records: of its cells.
        width: of the terminal, in characters.
    """
    rows = _rows(sweep, records)
    dimensions = tuple(
        name for name in varying(row.settings for row in rows) if name not in ("engine", "stage")
    )
    every = _columns(rows, dimensions)
    columns = fitting(every, width)
    body: list[RenderableType]
    if columns is None:
        columns = every
        body = list(_blocks(rows, every, dimensions))
    else:
        body = [make_table(columns, [not row.successes for row in rows])]
    return [_common(rows, dimensions), Text(), *body, *_notes(columns, rows), *_reasons(rows, dimensions)]


def _rows(sweep: Sweep, records: Sequence[Record]) -> list[Row]:
    """In the order of the first round, with the settings as they were asked for: ranks resolve what was left open."""
    by_key: dict[str, list[Record]] = {}
    for record in records:
        by_key.setdefault(record.cell, []).append(record)
    found: dict[Settings, list[Record]] = {}
    for cell in sorted(sweep.cells, key=lambda cell: cell.settings.repeat):
        found.setdefault(replace(cell.settings, repeat=0), []).extend(by_key.get(cell.key, []))
    return [Row(settings, tuple(same)) for settings, same in found.items() if same]


def _columns(rows: list[Row], dimensions: Sequence[str]) -> list[Column]:
    reference = next((row for row in rows if row.successes), None)
    on_cuda = any(row.figure("memory/peak_allocated_mib") for row in rows)
    memory = "memory/peak_allocated_mib" if on_cuda else "memory/peak_host_mib"
    units = sorted({record.model.unit for row in rows for record in row.successes if record.model})

    def relative(name: str, row: Row) -> str:
        """Of a metric, to the first row's."""
        if reference is None or row is reference or not row.successes:
            return ""
        mine, first = row.figure(name), reference.figure(name)
        return f"{mine.value / first.value:.2f}×" if mine and first and first.value else ""

    def speed(row: Row) -> tuple[str, Measured] | None:
        for unit in UNITS:
            if (found := row.figure(f"throughput/{unit}_per_s")) is not None:
                return unit, found
        return None

    def throughput(row: Row) -> str:
        found = speed(row)
        if found is None:
            return ""
        return rate(found[1].value) + (f" {found[0]}/s" if len(units) > 1 else "")

    def relative_throughput(row: Row) -> str:
        found = speed(row)
        return relative(f"throughput/{found[0]}_per_s", row) if found else ""

    def value(name: str, words: Callable[[float], str]) -> Callable[[Row], str]:
        return lambda row: words(found.value) if (found := row.figure(name)) is not None else ""

    def step(row: Row) -> str:
        """The median and its error in milliseconds; of a cell without numbers, why."""
        found = row.figure("step/p50_ms")
        if found is None:
            return row.status
        return f"{found.value:,.1f}" + ("" if found.error is None else f" ± {found.error:,.1f}")

    def made(heading: str, read: Callable[[Row], str], rank: int, *, left: bool = False) -> Column:
        return Column(heading, [read(row) for row in rows], rank, left)

    columns = [
        made("engine", lambda row: row.settings.engine, 0, left=True),
        made("stage", lambda row: str(row.settings.stage), 0),
    ]
    for name in dimensions:
        left = name in ("model", "precision", "wire")
        columns.append(made(_HEADINGS.get(name, name), _reader(name), 0, left=left))
    columns += [
        made("step p50, ms", step, 0),
        made(f"{units[0]}/s" if len(units) == 1 else "throughput", throughput, 0),
        made("", relative_throughput, 2),
        made("peak CUDA" if on_cuda else "peak host", value(memory, lambda size: mib(size * MIB)), 0),
        made("", lambda row: relative(memory, row), 4),
        made("comm., ms", value("comm/cost_ms", lambda cost: f"{cost:,.1f}"), 3),
        made("exposed, ms", value("comm/exposed_ms", lambda waited: f"{waited:,.1f}"), 6),
        made("MFU", value("mfu", lambda share: f"{share:.1%}"), 5),
    ]
    return [column for column in columns if column.rank == 0 or any(column.values)]


def _reader(name: str) -> Callable[[Row], str]:
    def read(row: Row) -> str:
        value = getattr(row.settings, name)
        return "default" if value is None else f"{value:g}" if isinstance(value, float) else str(value)

    return read


def _blocks(rows: list[Row], columns: list[Column], dimensions: Sequence[str]) -> Iterator[RenderableType]:
    """For a terminal that is too narrow for a table: a few lines a cell."""
    for place, row in enumerate(rows):
        yield Text(_where(row.settings, dimensions), style="bold" if row.successes else "dim")
        told: list[str] = []
        for column in columns[2 + len(dimensions) :]:
            name, _, unit = column.heading.partition(", ")
            value = column.values[place]
            if value and name:
                told.append(" ".join(part for part in (name, value, unit) if part))
            elif value:
                told[-1] += f" ({value})"
        yield Padding(Text(", ".join(told) if row.successes else row.status), (0, 0, 0, 2))


def _common(rows: list[Row], dimensions: Sequence[str]) -> Text:
    """What does not vary, in one line."""
    settings, text = rows[0].settings, Text()
    if "model" not in dimensions:
        text.append(settings.model, style="bold")
    resolved = next((record for row in rows for record in row.successes), None)
    parts = []
    if "precision" not in dimensions:
        parts.append(resolved.settings.precision if resolved else settings.precision)
    if "wire" not in dimensions and settings.wire != "own":
        parts.append(value_in_words("wire", settings.wire))
    if not {"nodes", "nproc_per_node"} & set(dimensions):
        parts.append(f"{counted(settings.world, 'rank')} on {counted(settings.nodes, 'node')}")
    for name in ("batch_size", "seq_len", "accumulate"):
        if name not in dimensions and (name != "accumulate" or settings.accumulate > 1):
            parts.append(value_in_words(name, getattr(settings, name)))
    if resolved is not None and resolved.environment is not None:
        parts.append(printable(resolved.environment.backend))
    repeats = max(len(row.records) for row in rows)
    if repeats > 1:
        parts.append(f"medians of {repeats} rounds")
    return text.append((", " if text else "") + ", ".join(part for part in parts if part))


def _notes(columns: list[Column], rows: list[Row]) -> list[Text]:
    notes = []
    if any("±" in value for column in columns for value in column.values):
        notes.append("±: half of the 95 % interval of the median")
    if any(value.endswith("×") for column in columns for value in column.values):
        notes.append("×: of the first row with numbers")
    if any(column.heading.startswith("comm.") for column in columns):
        notes.append("comm.: the step less its compute-only twin's")
    if any(column.heading.startswith("exposed") for column in columns):
        notes.append("exposed: waiting for communication alone")
    return [Text(". ".join(notes), style="dim")] if notes else []


def _reasons(rows: list[Row], dimensions: Sequence[str]) -> list[Text]:
    """Why cells have no numbers; a reason that several share is told once."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        for record in row.records:
            if record.status != "ok":
                found.setdefault((record.status, _reason(record)), []).append(
                    _where(row.settings, dimensions)
                )
    lines = [
        Text.assemble(f"{'; '.join(dict.fromkeys(cells))}: ", (status, "bold"), f": {reason}")
        for (status, reason), cells in found.items()
    ]
    return [Text(), *lines] if lines else []


def _reason(record: Record) -> str:
    """In a line; of a stage that the engine does not have, such that all such stages share it."""
    stages = ENGINES[record.settings.engine].stages
    if record.status == "unsupported" and record.settings.stage not in stages:
        return f"it has stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))}"
    return printable((record.reason or "").partition("\n")[0])


def _where(settings: Settings, dimensions: Sequence[str]) -> str:
    return ", ".join(
        [f"{settings.engine} stage {settings.stage}", *(_words(settings, name) for name in dimensions)]
    )


def _words(settings: Settings, name: str) -> str:
    value: Any = getattr(settings, name)
    return value_in_words(name, value)
