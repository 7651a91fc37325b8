"""A bench or a sweep with its results: records, MLflow runs and a page. Joins `run`, `tracking` and `report`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from zerokit.bench.catalogue.engines import cell_label
from zerokit.bench.record.journal import Journal
from zerokit.bench.record.record import Record, RecordError, Run, read_record, require_writable
from zerokit.bench.record.schema import to_plain
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.status import Status
from zerokit.bench.record.words import varying
from zerokit.bench.run.session import (
    DEFAULT_FOLDER,
    Host,
    record_path,
    refusal,
    require_data,
    run_cell,
    same_job,
    unused,
)
from zerokit.bench.run.sweep import Sweep, SweepFolder, exit_code, prepare
from zerokit.bench.run.sweep import run_sweep as run_cells
from zerokit.bench.run.traces import require_traces, traces_written
from zerokit.bench.tracking.push import Found, Tracker, find_records
from zerokit.bench.tracking.store import Tracking
from zerokit.errors import UsageError
from zerokit.files import path_of
from zerokit.text import printable


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The cells to run, and the places for their results.

    Attributes:
        cells: in the order of running; those of a sweep that goes on are in its folder.
        options: what the user chose, by the options' names.
        output: for the record or the sweep.
        continued: the folder of the sweep to go on with.
        tracking: MLflow; None without it.
        given: options of MLflow as given on the command line, for advice that repeats it.
        baseline: the label of the cell that the others are compared with; None for the first.
        timeline: the file of a step's timeline, or that by which those of several cells are named; None without.
    """

    cells: Sequence[Settings]
    options: dict[str, Any]
    output: Path | None
    continued: Path | None
    tracking: Tracking | None
    given: str
    baseline: str | None = None
    timeline: Path | None = None

    @property
    def single(self) -> bool:
        """Whether one cell runs once, without a sweep's folder."""
        return self.continued is None and len(self.cells) == 1


@dataclass(frozen=True)
class Results:
    """What a bench or a sweep has come to.

    Attributes:
        records: of the cells.
        files: where they are, by what they are.
        tracker: what is in MLflow.
        sweep: of which they are; None for a single bench.
        baseline: the label of the cell that the others are compared with.
        again: the command that runs failed cells again; None if none failed.
    """

    records: Sequence[Record]
    files: dict[str, str]
    tracker: Tracker
    sweep: Sweep | None = None
    baseline: str | None = None
    again: str | None = None

    @property
    def worth_a_table(self) -> bool:
        """Whether there are figures, or a sweep whose cells tell why not."""
        return self.sweep is not None or self.records[0].status is Status.OK

    def to_json(self) -> str:
        """The record, or the sweep with its records."""
        if self.sweep is None:
            return self.records[0].to_json()
        content = {"sweep": to_plain(self.sweep), "records": [to_plain(record) for record in self.records]}
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def require_baseline(baseline: str | None, cells: Sequence[Settings]) -> None:
    """Raise `UsageError` unless a cell has the name: hours later would be too late."""
    labels = dict.fromkeys(cell_label(cell, varying(cells)) for cell in cells)
    if baseline is not None and baseline not in labels:
        raise UsageError(
            f"--baseline {baseline!r} is no cell of this sweep: choose one of {', '.join(map(repr, labels))}"
        )


def run_single(asked: Asked, host: Host, running: AbstractContextManager[object]) -> Results:
    """Run one cell once; `running` is entered while there are ranks."""
    (settings,), warn = asked.cells, host.watch.warn
    require_data(settings, host)
    if asked.timeline is not None:
        require_traces(asked.timeline, [settings])
    path, identity, record = _record_file(settings, asked.output)
    tracker = Tracker(asked.tracking, warn, f"zerokit push {shlex.quote(str(path))}{asked.given}")
    if (refused := refusal(settings, host)) is not None:
        warn(refused.reason)  # before MLflow takes its seconds
    with running:
        try:
            record = record or run_cell(settings, path, host, identity=identity, trace=asked.timeline)
        except BaseException:
            with suppress(UsageError):  # nothing has been written yet
                tracker.push(find_records([path]))
            raise
        host.watch.phase("filling MLflow")
        tracker.push(Found([(path, record)], {}, []))
    if refused is None:
        _warn(record, warn)
    return Results([record], {"record": str(path)} | traces_written([record]), tracker)


def open_sweep(asked: Asked) -> tuple[Sweep, SweepFolder]:
    """The sweep, new or to go on with, and its folder."""
    default = unused(DEFAULT_FOLDER / f"{datetime.now():%Y%m%d-%H%M%S}-sweep")
    folder = SweepFolder(asked.continued or asked.output or default)
    sweep = Sweep.of(asked.cells, asked.options) if asked.continued is None else folder.read()
    require_baseline(asked.baseline or sweep.baseline, [cell.settings for cell in sweep.cells])
    return sweep, folder


def run_sweep(
    asked: Asked, sweep: Sweep, folder: SweepFolder, host: Host, running: AbstractContextManager[object]
) -> Results:
    """Run the cells without a result; `running` is entered while there are ranks."""
    baseline, watch = asked.baseline or sweep.baseline, host.watch
    for settings in dict.fromkeys(replace(cell.settings, repeat=0) for cell in sweep.cells):
        require_data(settings, host)
    if asked.timeline is not None:
        require_traces(asked.timeline, [cell.settings for cell in sweep.cells])
    place = f"{shlex.quote(str(folder.path))}{asked.given}"
    tracker = Tracker(asked.tracking, watch.warn, f"zerokit push {place}")
    timeline = f" --timeline {shlex.quote(str(asked.timeline))}" if asked.timeline else ""
    again = f"zerokit bench --continue {place}{timeline}"
    files = {"records": str(folder.path / "cells")}
    with running, folder.alone():
        sweep = prepare(folder, sweep)
        sweeps = {sweep.id: (sweep, folder)}

        def push(path: Path, record: Record) -> None:
            tracker.push(Found([(path, record)], sweeps, []), going_on=True)

        try:
            records = run_cells(sweep, folder, host, push, asked.timeline)
        except BaseException:
            watch.warn(f"to continue from here: {again}")
            with suppress(UsageError):  # nothing has been written yet
                tracker.push(find_records([folder.path]))
            raise
        watch.phase("writing the report")
        if write_report(records, folder.report, watch.warn, baseline):
            files["report"] = str(folder.report)
        watch.phase("filling MLflow")
        paths = map(folder.record, sweep.cells)
        tracker.push(Found(list(zip(paths, records, strict=True)), sweeps, []))
    failed = exit_code(records) == 1
    files |= traces_written(records)
    return Results(records, files, tracker, sweep, baseline, again if failed else None)


def write_report(
    records: Sequence[Record], path: Path, warn: Callable[[str], None], baseline: str | None = None
) -> bool:
    """Write the page of a sweep; False, with a warning, if it cannot be made."""
    try:
        from zerokit.bench.report.render import write_comparison  # a bare GPU machine has no altair

        write_comparison([Run("", tuple(records))], path, baseline)
    except Exception as error:  # a page is no reason to end a sweep whose records are whole
        warn(f"the report was not written: {type(error).__name__}: {error}")
        return False
    return True


def _record_file(settings: Settings, output: Path | None) -> tuple[Path, str | None, Record | None]:
    """The path of a single bench's record; of an elastic one that of its job, its identity, and what is finished."""
    if not settings.elastic:
        return record_path(output, settings, datetime.now()), None, None
    run = path_of(str(settings.save))
    with suppress(ModuleNotFoundError):  # where zlib-ng is missing, the ranks report it
        from zerokit.checkpoint.check import check_directory

        check_directory(run, overwrite=True)
    asked = output if output is not None and output.suffix == ".json" else None
    job = Journal(run).open_job(asked, lambda: record_path(output, settings, datetime.now()))
    require_writable(job.record.parent)
    finished, there = None, None
    with suppress(RecordError):
        there = read_record(job.record)
    if there is not None and there.id == job.identity and there.status is Status.OK:
        finished = there  # its launcher may have been killed before MLflow was filled, or since
    elif asked is None and job.record.exists() and (there is None or there.id != job.identity):
        raise UsageError(
            f"{run} names {job.record} as its record, which is another file: name one with --output FILE.json"
        )
    if finished is not None and not same_job(settings, finished.settings):
        Journal(run).finish()
        return _record_file(settings, output)
    return job.record, job.identity, finished


def _warn(record: Record, warn: Callable[[str], None]) -> None:
    """Warnings of a single bench."""
    settings = record.settings
    if record.status is not Status.OK:
        memory = record.status is Status.OUT_OF_MEMORY
        warn(f"{record.status}: {record.reason}" if memory else record.reason or record.status)
    elif settings.resume and record.checkpoints.resumed_from is None:
        warn(f"--resume: {settings.save} has no checkpoint yet: the bench started at step 0")
    for note in record.checkpoints.notes:
        warn(printable(note))
