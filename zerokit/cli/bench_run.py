"""Cells of a bench from their launch to the last line: records, MLflow, the page, the table."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import click

from zerokit.bench.record import Record, Status, require_writable
from zerokit.bench.record.journal import Job, Journal
from zerokit.bench.record.schema import to_plain
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.sweep import Sweep, SweepFolder
from zerokit.bench.run.session import DEFAULT_FOLDER, Host, record_path, refusal, require_data, run_cell
from zerokit.bench.sweeps.sweep import exit_code, prepare, read_sweep, run_sweep
from zerokit.bench.tracking.content import sweep_files, sweep_status
from zerokit.bench.tracking.mirror import Live
from zerokit.cli.bench_request import Request
from zerokit.cli.display import Display
from zerokit.cli.pictures import pictures, write_report
from zerokit.errors import UsageError
from zerokit.launch.interrupts import Interrupted, Interrupts
from zerokit.launch.joined import Leader
from zerokit.text import printable

_INTERRUPTIONS = (Interrupted, KeyboardInterrupt)
HostOf = Callable[[Interrupts, Display], Host]
"""Where cells run, for the time of a command's work."""


def run_bench(request: Request, leader: Leader | None) -> int:
    """Run one cell or a sweep, show what came of it; the exit code. `leader` starts ranks that wait already."""

    def host(interrupts: Interrupts, display: Display) -> Host:
        host = Host(
            launch=request.chosen.launch(interrupts, leader),
            interrupted=interrupts.check,
            interruptions=_INTERRUPTIONS,
            watch=display,
            max_restarts=request.max_restarts,
        )
        # What other machines have is not known here.
        return host if request.chosen.here else replace(host, fits=lambda settings: None)

    return (_run_single if request.single else _run_sweep)(request, host)


def _run_single(request: Request, host_of: HostOf) -> int:
    (settings,) = request.cells
    display = Display()
    before = host_of(Interrupts(), display)
    refused = refusal(settings, before)
    require_data(settings, before)
    job = _open_job(settings, request.output) if settings.elastic else None
    path = job.record if job is not None else record_path(request.output, settings, datetime.now())
    if refused is not None:
        display.warn(refused[1])  # the answer, before MLflow takes its seconds
    push = request.push(path)
    with Interrupts() as interrupts, display:
        host = host_of(interrupts, display)
        if request.tracking is not None:
            display.phase("opening the MLflow run")
        live = _live(request, display, push)
        record = live.during(
            settings,
            None,
            lambda identity: run_cell(settings, path, host, identity=identity),
            None if job is None else job.identity,
        )
    if refused is None:
        _warn(record, display)
    if request.as_json:
        click.echo(record.to_json(), nl=False)
    elif record.status is Status.OK:
        display.table([record])
    silent = request.as_json or record.status is not Status.OK
    display.files({"record": str(path)}, live, push, to_stderr=silent)
    return exit_code([record])


def _run_sweep(request: Request, host_of: HostOf) -> int:
    """All cells that were asked for, or those that a folder's sweep still misses."""
    folder = SweepFolder(request.continued or request.output or _new_folder(DEFAULT_FOLDER))
    sweep = Sweep.of(request.cells, request.options) if request.continued is None else read_sweep(folder)
    for settings in dict.fromkeys(replace(cell.settings, repeat=0) for cell in sweep.cells):
        require_data(settings, host_of(Interrupts(), Display()))
    try:
        sweep = prepare(folder, sweep)
    except UsageError as error:
        raise click.UsageError(printable(str(error))) from error
    display = Display(cells=len(sweep.cells))
    push = request.push(folder.path)
    go_on = f"zerokit bench --continue {shlex.quote(str(folder.path))}{request.given}"
    with ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        stack.enter_context(folder.alone())
        stack.enter_context(display)
        live = _live(request, display, push)
        try:
            records = run_sweep(sweep, folder, host_of(interrupts, display), display, live)
        except BaseException as error:
            live.end_sweep(sweep.id, [], dict, "KILLED" if isinstance(error, _INTERRUPTIONS) else "FAILED")
            display.warn(f"to go on where this ends: {go_on}")
            raise
        display.phase("writing the report")
        report = write_report(records, folder.report, display.warn)
        live.end_sweep(
            sweep.id,
            records,
            lambda: sweep_files(sweep, folder, lambda: pictures(records)),
            sweep_status(sweep, records),
        )
    if request.as_json:
        content = {"sweep": to_plain(sweep), "records": [to_plain(record) for record in records]}
        click.echo(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False))
    else:
        display.table(records)
    written = {"records": str(folder.path / "cells"), **({"report": str(folder.report)} if report else {})}
    display.files(written, live, push, to_stderr=request.as_json)
    if (code := exit_code(records)) == 1:
        display.warn(f"to run the failed cells again: {go_on}")
    return code


def _warn(record: Record, display: Display) -> None:
    """What a single bench has to say beside its figures."""
    settings = record.settings
    if record.status is not Status.OK:
        memory = record.status is Status.OUT_OF_MEMORY
        display.warn(f"{record.status}: {record.reason}" if memory else record.reason or record.status)
    elif settings.resume and record.checkpoints.resumed_from is None:
        display.warn(f"--resume: {settings.save} holds no checkpoint yet: the bench began at step 0")
    for note in record.checkpoints.notes:
        display.warn(printable(note))


def _open_job(settings: Settings, output: Path | None) -> Job:
    """The job that goes on in the run's directory, or a new one; its record can be written."""
    assert settings.save is not None
    run = Path(settings.save)
    try:
        from zerokit.checkpoint.run import check_run

        check_run(run, overwrite=True)
    except ModuleNotFoundError:
        pass  # zlib-ng is missing: the ranks say so
    asked = output if output is not None and output.suffix == ".json" else None
    job = Journal(run).open_job(asked, lambda: record_path(output, settings, datetime.now()))
    require_writable(job.record.parent)
    return job


def _new_folder(parent: Path) -> Path:
    name = f"{datetime.now():%Y%m%d-%H%M%S}-sweep"
    path, attempt = parent / name, 1
    while path.exists():
        attempt += 1
        path = parent / f"{name}-{attempt}"
    return path


def _live(request: Request, display: Display, later: str) -> Live:
    """MLflow beside the cells."""
    return Live(request.tracking, display.warn, later, _INTERRUPTIONS, lambda record: pictures([record]))
