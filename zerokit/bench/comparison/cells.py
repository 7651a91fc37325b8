"""Records grouped into cells: records with equal settings on an equal machine are repetitions of one cell.

A cell's label says what tells it from the others beside it, and no more. `conditions` are the settings and
properties of the machine that are equal, or differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from statistics import median
from typing import Any

from zerokit.bench.catalogue.engines import ENGINES, cell_label
from zerokit.bench.comparison.unequal import by_rank
from zerokit.bench.record.metrics import METRICS, Measured, measure, values_of
from zerokit.bench.record.record import Record, Run
from zerokit.bench.record.schema import to_plain
from zerokit.bench.record.status import Status
from zerokit.bench.record.words import count, identity, title_of, unusual, value_in_words, varying
from zerokit.text import printable

_RUNS = ("first", "second", "third", "fourth")
ALONE = "compute-only"
"""The engine whose ranks train alone, each with its own losses."""

WORK = ("model", "batch_size", "accumulate", "seq_len", "image_size")
_LEFT_OPEN = ("precision", "device", "bucket_mb", "data", "image_size")
"""The settings that a rank fills in: a record without ranks lacks them."""
PACE = (*WORK, "precision", "device", "nodes", "nproc_per_node", "pace", "cores_per_rank")
"""The settings that decide what forward and backward of a compute-only twin take."""


@dataclass(slots=True)
class Cell:
    """One cell of a comparison: equal settings on an equal machine, with all repetitions, those that went well first.

    `run` is the user's name for where its records are, `settings` have no duration and repetition; `label` tells it
    from the others made together; `role` is its colour: its engine's, or its run's if all engines are equal.
    """

    run: str
    settings: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    label: str = ""
    baseline: Cell | None = field(default=None, repr=False)
    role: str = ""
    _measured: dict[str, Measured | None] = field(default_factory=dict, repr=False)

    @property
    def first(self) -> Record:
        """A successful record, if there is one."""
        return self.records[0]

    @property
    def measured_records(self) -> list[Record]:
        """The successful repetitions."""
        return [record for record in self.records if record.status == "ok" and record.results is not None]

    @property
    def status(self) -> Status:
        """The cell's status: "ok" if any repetition succeeded."""
        return self.first.status

    @property
    def machine(self) -> str | None:
        """The digest of its environment; None where no rank has looked at it."""
        return None if self.first.environment is None else self.first.environment.digest

    def measure(self, name: str) -> Measured | None:
        """A figure over the repetitions; None if no repetition has it."""
        if name not in self._measured:
            self._measured[name] = measure(METRICS[name], self.measured_records)
        return self._measured[name]

    def value(self, name: str) -> float | None:
        """The figure's value without its error interval."""
        return None if (measured := self.measure(name)) is None else measured.value


def make_cells(runs: Sequence[Run], baseline: str | None = None) -> list[Cell]:
    """The cells of all runs in display order, with their labels and baselines. Repetitions are grouped within a run.

    The cell whose label is `baseline` is that of everything, else the first run is. If that is one cell (or the only
    run: then its first that went well), everything is compared with it. Otherwise cells are matched by the settings
    that vary within any run, and each baseline is followed by the cells compared with it.
    """
    cells = [cell for run in runs for cell in _group(run)]
    _label(cells)
    engines = {cell.settings["engine"] for cell in cells}
    colours = dict(zip(dict.fromkeys(cell.run for cell in cells), cycle(_RUNS), strict=False))
    for cell in cells:
        engine = cell.settings["engine"]
        by_run = len(engines) == 1 and len(colours) > 1
        cell.role = colours[cell.run] if by_run else engine if engine in ENGINES else ALONE
    own = [cell for cell in cells if cell.run == runs[0].name]
    chosen = next((cell for cell in cells if cell.label == baseline), None)
    if chosen is None and own and (len(runs) == 1 or len(own) == 1):
        chosen = next((cell for cell in own if cell.status == "ok"), own[0])
    names = {
        name
        for run in runs
        for name in varying(cell.first.settings for cell in cells if cell.run == run.name)
    }
    for cell in cells:
        if chosen is not None:
            cell.baseline = None if cell is chosen else chosen
        elif cell.run != runs[0].name:
            alike = (
                one for one in own if all(_same(cell.settings[name], one.settings[name]) for name in names)
            )
            cell.baseline = next(alike, None)
    if len({id(cell.baseline) for cell in cells if cell.baseline is not None}) > 1:
        positions = {id(cell): position for position, cell in enumerate(cells)}
        cells.sort(key=lambda cell: (positions[id(cell.baseline or cell)], positions[id(cell)]))
    return cells


def _group(run: Run) -> list[Cell]:
    """The cells of a run, in the order of their first records."""
    cells: dict[tuple[tuple[Any, ...], tuple[Any, ...]], Cell] = {}
    for record in sorted(run.records, key=lambda one: one.results is None):
        settings, place = identity(record.settings), record.environment
        asked = tuple(value for name, value in settings.items() if name not in _LEFT_OPEN)
        found = (place and place.digest, place and place.git_commit, *(settings[name] for name in _LEFT_OPEN))
        key = asked, found
        if place is None:  # no rank has looked: a repetition of whatever agrees with what is known
            key = next((one for one in cells if one[0] == asked and all(map(_same, one[1], found))), key)
        cells.setdefault(key, Cell(run.name, settings)).records.append(record)
    positions = {id(record): position for position, record in enumerate(run.records)}
    return sorted(cells.values(), key=lambda cell: min(positions[id(record)] for record in cell.records))


def unsupported(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Cells that could not run, as names and a reason; an engine's unsupported stages are joined."""
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        if cell.status == "unsupported":
            # "ddp has no stage 1: it has stage 0 only": of several stages, what they have in common is enough.
            common = (cell.first.reason or "").rpartition(": ")[2]
            groups.setdefault((cell.settings["engine"], common), []).append(cell)
    return [
        (", ".join(cell.label for cell in group), common if len(group) > 1 else group[0].first.reason or "")
        for (_, common), group in groups.items()
    ]


def _label(cells: Sequence[Cell]) -> None:
    names = varying(cell.first.settings for cell in cells)
    runs = short_names(list(dict.fromkeys(cell.run for cell in cells)))
    for cell in cells:
        cell.label = cell_label(cell.first.settings, names)
    if any(len({cell.run for cell in alike}) > 1 for alike in _by_label(cells)):
        for cell in cells:
            cell.label = f"{runs[cell.run]}: {cell.label}"
    # Equal settings on another machine, another commit or another day: say which.
    for alike in (group for group in _by_label(cells) if len(group) > 1):
        for mark in (_commit, lambda record: record.created[:19], lambda record: record.id[:8]):
            marks = [mark(cell.first) for cell in alike]
            if len(set(marks)) == len(alike):
                break
        for cell, text in zip(alike, marks, strict=True):
            cell.label = f"{cell.label} · {text}"


def _by_label(cells: Sequence[Cell]) -> list[list[Cell]]:
    found: dict[str, list[Cell]] = {}
    for cell in cells:
        found.setdefault(cell.label, []).append(cell)
    return list(found.values())


def _commit(record: Record) -> str:
    commit = (record.environment.git_commit if record.environment else None) or ""
    return commit[:8] + "-dirty" * commit.endswith("-dirty")


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Short distinct names for paths, without common ends: "a/x/run.json", "a/y/run.json" → "x", "y"."""
    # A path may have bytes that are no text, which no page can hold.
    parts = {name: printable(name).removesuffix(".json").strip("/").split("/") for name in names}
    shortest = min((len(pieces) for pieces in parts.values()), default=1)
    rows = list(parts.values())
    start = next((n for n in range(shortest) if len({row[n] for row in rows}) > 1), 0)
    rest = shortest - start - 1
    end = next((n for n in range(rest) if len({row[-1 - n] for row in rows}) > 1), rest)
    short = {name: "/".join(row[start : len(row) - end]) for name, row in parts.items()}
    return short if len(set(short.values())) == len(short) else {name: printable(name) for name in names}


def _same(one: object, other: object) -> bool:
    return one == other or one is None or other is None


_SHOWN_APART = ("model", "precision", "nodes", "nproc_per_node", "batch_size", "seq_len", "bucket_mb")
DRIFT = 0.1
"""A larger change of the machine's pace is noted above all figures."""


def conditions(cells: Sequence[Cell]) -> tuple[list[tuple[str, list[str]]], list[tuple[str, str]]]:
    """Differing conditions with one value per cell ("–" if it has none), and equal ones, as names and values.

    The settings that vary are left out: labels say them.
    """
    rows, labelled = [_rows(cell) for cell in cells], set(varying(cell.first.settings for cell in cells))
    differing, equal = [], []
    for name in dict.fromkeys(name for row in rows for name in row if name not in labelled):
        values = [row.get(name, "") for row in rows]
        known = {value for value in values if value}
        if len(known) > 1:
            differing.append((title_of(name), [value or "–" for value in values]))
        elif known:
            equal.append((title_of(name), known.pop()))
    return differing, equal


def common_words(cells: Sequence[Cell]) -> list[str]:
    """What all cells have in common, for the line above their table."""
    names = varying(cell.first.settings for cell in cells)
    first = next((cell.first for cell in cells if cell.status == "ok"), cells[0].first)
    settings, words = first.settings, []
    if "model" not in names:
        size = f" ({count(first.model.parameters)} parameters)" if first.model else ""
        words.append(settings.model + size)
    if len(cells) == 1:
        words.append(f"{settings.engine} stage {settings.stage}")
    if "precision" not in names and settings.precision:
        words.append(settings.precision)
    words += unusual(settings, without=(*names, *_SHOWN_APART))
    if not {"nodes", "nproc_per_node"} & set(names):
        ranks = f"{settings.world} rank{'' if settings.world == 1 else 's'}"
        words.append(f"{ranks} on {value_in_words('nodes', settings.nodes)}")
    if "batch_size" not in names:
        words.append(f"batch {settings.batch_size}")
    if first.environment is not None:
        words.append(first.environment.backend)
    rounds = sorted({len(cell.measured_records) for cell in cells if cell.measured_records})
    if rounds and rounds != [1]:
        words.append(f"means of {' or '.join(map(str, rounds))} rounds")
    return words


def warnings_of(cells: Sequence[Cell]) -> list[str]:
    """What a reader has to know before all figures: losses that were not finite, and the machine's drift."""
    found = []
    for cell in cells:
        steps = [record.loss.index(None) + 1 for record in cell.measured_records if None in record.loss]
        if steps:
            found.append(f"{cell.label}: the loss was not finite at step {min(steps)}.")
    return found + _drift(cells)


def _drift(cells: Sequence[Cell]) -> list[str]:
    """Warnings if the machine's speed changed by more than `DRIFT` between runs or during one.

    The pace is that of the compute-only twins, else that of equal cells in several rounds.
    """
    paces: dict[tuple[object, ...], list[float]] = {}
    drifts = [0.0]
    for cell in cells:
        work = (cell.machine, *(cell.settings[name] for name in PACE))
        for record in cell.measured_records:
            drifts += [abs(value) for value in values_of(METRICS["step/drift"], [record])]
            if record.twin is not None:
                paces.setdefault(work, []).append(median(record.twin.pace_ms))
            else:
                paces.setdefault((id(cell), *work), []).extend(values_of(METRICS["step/p50_ms"], [record]))
    change = max((max(one) / min(one) - 1 for one in paces.values() if min(one) > 0), default=0.0)
    if change > DRIFT:
        found = [f"The machine's speed changed between runs: the same work took up to {change:.0%} longer."]
    elif max(drifts) > DRIFT:
        found = [f"The machine's speed changed during a run, by up to {max(drifts):.0%} of a step."]
    else:
        return []
    if any(len(cell.measured_records) == 1 for cell in cells):
        found.append("Run several rounds (--repeats 3), and do not compare single runs.")
    return [note.replace("%", " %") for note in found]


def _rows(cell: Cell) -> dict[str, str]:
    record = cell.first
    rows = {
        name: f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in cell.settings.items()
        if value is not None
    }
    if (model := record.model) is not None:
        rows["parameters"] = count(model.parameters)
        if model.flops_per_unit is not None:
            rows["model FLOPs"] = f"{count(model.flops_per_unit)} a {model.unit.removesuffix('s')}"
            rows["FLOPs counted as"] = model.flops_convention or ""
    if record.results is not None:
        counts = dict.fromkeys(one.results.step.count for one in cell.measured_records if one.results)
        rows["measured steps"] = ", ".join(map(str, counts))
        rows |= by_rank(record)
        if any(one.restarts for one in cell.records):
            rows["restarted"] = ", ".join(f"{one.restarts}×" for one in cell.records)
        if len(cell.measured_records) > 1:
            rows["repetitions"] = str(len(cell.measured_records))
        if (use := record.results.utilisation) is not None:
            rows["peak of MFU"] = f"{use.peak_flops_per_s / 1e12:g} TFLOP/s ({use.device}, {use.precision})"
    if (environment := record.environment) is not None:
        for name, value in to_plain(environment).items():
            if isinstance(value, dict):  # "packages.transformers"
                rows |= {f"{name}.{key}": str(item) for key, item in value.items()}
            elif value not in (None, 0) and name != "world":  # of the settings already
                rows[name] = str(value)
        rows["memory_bytes"] = f"{environment.memory_bytes / 2**30:.1f} GiB"
        if record.ranks:
            rows["device"] = ", ".join(dict.fromkeys(rank.device for rank in record.ranks))
            rows["hosts"] = ", ".join(dict.fromkeys(rank.host for rank in record.ranks))
    return rows
