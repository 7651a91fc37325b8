"""Run the cells of a sweep one after the other.

Nothing but records is remembered: a sweep goes on where the records of its cells end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from zerokit.bench.catalogue.check import require_known
from zerokit.bench.record import Record, Status
from zerokit.bench.record.sweep import RecordFile, Sweep, SweepError, SweepFolder, Trial
from zerokit.bench.run.session import Host, Watch, run_cell
from zerokit.errors import UsageError


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
