"""Run the cells of a sweep one after the other.

Nothing but records is remembered: a sweep goes on where the records of its cells end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from zerokit.bench.catalogue.check import require_known
from zerokit.bench.record import Record, Status
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.sweep import RecordFile, Sweep, SweepError, SweepFolder, Trial
from zerokit.bench.run.session import Host, Watch, run_cell
from zerokit.errors import UsageError


class SweepWatch(Watch, Protocol):
    """Receives the progress of a sweep."""

    def began(self, cell: Trial) -> None:
        """A cell runs now."""

    def ended(self, cell: Trial, record: Record, *, before: bool) -> None:
        """A cell has its record; `before`: it was there already."""


class Tracker(Protocol):
    """Keeps records elsewhere while they are made: MLflow's `Live`."""

    def open_sweep(self, sweep: str, name: str, options: Mapping[str, Any]) -> None:
        """A sweep begins."""

    def during(
        self,
        settings: Settings,
        sweep: str | None,
        work: Callable[[str], Record],
        identity: str | None = None,
    ) -> Record:
        """Do the work of a cell, with the id that its record is to have."""

    def ensure(self, record: Record) -> None:
        """The record was there already."""


def read_sweep(folder: SweepFolder) -> Sweep:
    """The sweep that was begun there; raises `SweepError`, also for engines and models that do not exist."""
    sweep = folder.read()
    try:
        for cell in sweep.cells:
            require_known(cell.settings)
    except UsageError as error:
        raise SweepError(f"{folder.path}: malformed sweep: {error}") from error
    return sweep


def prepare(folder: SweepFolder, asked: Sweep) -> Sweep:
    """The sweep to run in a folder: the one that was begun there, if it has the same cells, else a new one.

    Raises `UsageError` where a sweep of other cells is in the way.
    """
    if not folder.exists():
        folder.write(asked)
        return asked
    begun = read_sweep(folder)
    if not begun.same_cells(asked):
        raise UsageError(
            f"{folder.path} holds a sweep of other cells: go on with it by --continue {folder.path} alone, "
            "or choose another --output"
        )
    return begun


def run_sweep(
    sweep: Sweep, files: SweepFolder | RecordFile, host: Host, watch: SweepWatch, live: Tracker
) -> list[Record]:
    """Run the cells that have no result yet, one after the other; the records of all of them, in their order.

    A cell that fails, or does not fit, does not end the sweep. Raises what `run_cell` raises.
    """
    parent = sweep.id if isinstance(files, SweepFolder) else None
    if parent is not None:
        live.open_sweep(parent, sweep.title, sweep.options)
    records = []
    for cell in sweep.cells:
        host.interrupted()
        record = files.existing(cell)
        done = record is not None and record.status.final
        if record is None or not done:
            watch.began(cell)
            record = live.during(
                cell.settings,
                parent,
                lambda identity, cell=cell: run_cell(  # type: ignore[misc]
                    cell.settings, files.record(cell), host, sweep=parent, identity=identity
                ),
                files.identity,
            )
        else:
            live.ensure(record)
        watch.ended(cell, record, before=done)
        records.append(record)
    return records


def exit_code(records: Sequence[Record]) -> int:
    """The command's exit code: 1 if a cell failed, 4 if none ran, else 0."""
    statuses = {record.status for record in records}
    if not all(status.final for status in statuses):
        return 1
    return 0 if Status.OK in statuses else 4
