"""The cells of a sweep, the product of its options in the order in which they run, and how they are run.

Nothing but records is remembered: a sweep goes on where the records of its cells end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from zerokit.bench.catalogue.engines import ENGINES, require_known, unsupported
from zerokit.bench.catalogue.workloads import WORKLOADS
from zerokit.bench.record import Record, Status
from zerokit.bench.record.schema import SchemaError, from_plain
from zerokit.bench.record.settings import DIMENSIONS, Settings
from zerokit.bench.record.sweep import RecordFile, Sweep, SweepError, SweepFolder, Trial
from zerokit.bench.run.session import Host, Watch, run_cell
from zerokit.errors import UsageError

_DEFAULTS = Settings()


def product(
    options: Mapping[str, Sequence[Any]],
    fixed: Mapping[str, Any],
    repeats: int = 1,
    *,
    devices: int = 0,
    shared: bool = True,
) -> list[Settings]:
    """Every combination of `options`, `repeats` times.

    Args:
        options: values by dimension, of which a value counts once; one that is left out, or empty, has its default.
            Without a stage an engine takes its own; a model of fewer positions than the default has sequences of them.
        fixed: the other fields of `Settings`, equal in all cells.
        repeats: rounds through all cells. Every second one goes backwards, so that a steady drift of the machine
            weighs equally on the first and the last.
        devices: of this machine. Where `nproc_per_node` is left out, a node has as many ranks as devices, and at least
            one.
        shared: whether nodes have equal shares of these devices; else each has as many.

    Raises `UsageError` for settings that do not fit together, or that no record could hold.
    """
    values = [tuple(dict.fromkeys(options.get(name) or (None,))) for name in DIMENSIONS]
    once = []
    for combination in itertools.product(*values):
        chosen = {
            name: value for name, value in zip(DIMENSIONS, combination, strict=True) if value is not None
        }
        engine = chosen.setdefault("engine", _DEFAULTS.engine)
        if "stage" not in chosen and engine in ENGINES:
            chosen["stage"] = ENGINES[engine].default_stage
        if "nproc_per_node" not in chosen:
            chosen["nproc_per_node"] = max(1, devices // (chosen.get("nodes", 1) if shared else 1))
        given = {**fixed, **chosen}
        workload = WORKLOADS.get(given.get("model", _DEFAULTS.model))
        if "seq_len" not in given and workload is not None and workload.text is not None:
            given["seq_len"] = min(_DEFAULTS.seq_len, workload.text.positions)
        once.append(_checked(Settings(**given)))
    once = list(dict.fromkeys(once))
    rounds = []
    for number in range(repeats):
        cells = once if number % 2 == 0 else once[::-1]
        # What cannot run has one record.
        rounds += [replace(cell, repeat=number) for cell in cells if number == 0 or unsupported(cell) is None]
    return rounds


def _checked(settings: Settings) -> Settings:
    try:
        from_plain(Settings, asdict(settings))
    except SchemaError as error:
        raise UsageError(str(error)) from error
    return require_known(settings)


class SweepWatch(Watch, Protocol):
    """Receives the progress of a sweep."""

    def began(self, cell: Trial) -> None:
        """A cell starts."""

    def ended(self, cell: Trial, record: Record, *, before: bool) -> None:
        """A cell has its record; `before` if an earlier process wrote it."""


def read_sweep(folder: SweepFolder) -> Sweep:
    """The sweep started in this folder; raises `SweepError`, also for unknown engines and models."""
    sweep = folder.read()
    try:
        for cell in sweep.cells:
            require_known(cell.settings)
    except UsageError as error:
        raise SweepError(f"{folder.path}: malformed sweep: {error}") from error
    return sweep


def prepare(folder: SweepFolder, asked: Sweep) -> Sweep:
    """The sweep to run in a folder: the one started there if it has the same cells, otherwise a new one.

    Raises `UsageError` where a sweep of other cells is in the way.
    """
    if not folder.exists():
        folder.write(asked)
        return asked
    begun = read_sweep(folder)
    if not begun.same_cells(asked):
        raise UsageError(
            f"{folder.path} has a sweep of other cells: continue it by --continue {folder.path} alone, "
            "or choose another --output"
        )
    return begun


def run_sweep(
    sweep: Sweep,
    files: SweepFolder | RecordFile,
    host: Host,
    watch: SweepWatch,
    track: Callable[[Path, Record], None] = lambda path, record: None,
) -> list[Record]:
    """Run the cells that have no result yet, one after the other; returns the records of all cells, in order.

    `track` receives each new record of a sweep, after its ranks have ended. A cell that fails, or does not fit, does
    not end the sweep. Raises what `run_cell` raises.
    """
    parent = sweep.id if isinstance(files, SweepFolder) else None
    records = []
    for cell in sweep.cells:
        host.interrupted()
        record = files.existing(cell)
        done = record is not None and record.status.final
        if record is None or not done:
            watch.began(cell)
            path = files.record(cell)
            record = run_cell(cell.settings, path, host, sweep=parent, identity=files.identity)
            if parent is not None:
                track(path, record)
        watch.ended(cell, record, before=done)
        records.append(record)
    return records


def exit_code(records: Sequence[Record]) -> int:
    """The command's exit code: 1 if a cell failed, 4 if none ran, else 0."""
    statuses = {record.status for record in records}
    if not all(status.final for status in statuses):
        return 1
    return 0 if Status.OK in statuses else 4
