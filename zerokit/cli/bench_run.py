"""Runs the cells that a command line asks for: launch, records, MLflow, the page and the table."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from zerokit.bench.catalogue.engines import cell_label, this_machine
from zerokit.bench.machine.host import visible_devices
from zerokit.bench.record.journal import Journal
from zerokit.bench.record.options import CHECKPOINTS
from zerokit.bench.record.record import Record, RecordError, read_record, require_writable
from zerokit.bench.record.schema import to_plain
from zerokit.bench.record.settings import DIMENSIONS, OPTIONS, Settings
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
from zerokit.bench.run.sweep import (
    Sweep,
    SweepFolder,
    exit_code,
    prepare,
    product,
    run_sweep,
)
from zerokit.bench.run.traces import require_traces, traces_written
from zerokit.bench.tracking.push import Found, Tracker, find_records
from zerokit.bench.tracking.store import Tracking, resolve_uri
from zerokit.cli.bench_options import RESULTS
from zerokit.cli.display import Display, write_report
from zerokit.cli.launcher_options import take_options
from zerokit.cli.launchers import Chosen, choose_launcher, given_arguments, is_given
from zerokit.errors import UsageError
from zerokit.files import path_of
from zerokit.launch.interrupts import Interrupted, Interrupts
from zerokit.launch.joined import Leader
from zerokit.launch.limits import missing
from zerokit.text import printable, printable_json, without_secrets

_LIMITED = (
    "--cores-per-rank and --memory-per-rank are for ranks that zerokit starts here: leave --launcher out"
)
_CHECKPOINTS = [name for name, how in OPTIONS.items() if how.heading == CHECKPOINTS]
"""Settings for a single bench: cells that write the same checkpoints would continue each other's."""


@dataclass(frozen=True)
class Request:
    """The cells to run, and the places for their results.

    Attributes:
        chosen: who starts the ranks.
        cells: in the order of running; those of a sweep that goes on are in its folder.
        options: what the user chose, by the options' names.
        output: for the record or the sweep.
        continued: the folder of the sweep to go on with.
        tracking: MLflow; None without it.
        as_json: whether stdout is for a program.
        max_restarts: of an elastic bench whose ranks are started here.
        baseline: the label of the cell that the others are compared with; None for the first.
        timeline: the file of a step's timeline, or that by which those of several cells are named; None without.
        given: options of MLflow as given on the command line, for advice that repeats it.
    """

    chosen: Chosen
    cells: Sequence[Settings]
    options: dict[str, Any]
    output: Path | None
    continued: Path | None
    tracking: Tracking | None
    as_json: bool
    max_restarts: int
    given: str
    baseline: str | None = None
    timeline: Path | None = None

    @property
    def single(self) -> bool:
        """Whether one cell runs once, without a sweep's folder."""
        return self.continued is None and len(self.cells) == 1


def parse(context: click.Context, options: dict[str, Any]) -> Request:
    """Parse the command line's options; raises `click.UsageError` if they contradict each other."""
    output, continued, timeline, as_json, tracking_uri, experiment, no_mlflow, baseline, max_restarts = (
        options.pop(name) for name in (*RESULTS, "max_restarts")
    )
    if continued is not None:
        _require_alone(context)
    elastic = bool(options["elastic"])
    chosen = choose_launcher(take_options(options), os.environ, elastic=elastic)
    if not (elastic and chosen.name == "local") and is_given(context, "max_restarts"):
        raise UsageError(
            "--max-restarts is for --elastic with ranks on this machine; torchrun has its own option"
        )
    dimensions = {name: tuple(options.pop(name) or ()) for name in DIMENSIONS}
    cells = _cells(dimensions, options, chosen, continued=continued is not None)
    if len(cells) > 1 and any(options[name] for name in _CHECKPOINTS):
        raise UsageError(
            "checkpoints belong to one bench: give --save, --resume and --elastic without a sweep"
        )
    if len(cells) > 1 and output is not None and output.suffix == ".json":
        raise UsageError(f"a sweep needs a folder: --output {output} names a file")
    if timeline is not None and chosen.name == "kubernetes":
        raise UsageError("--timeline would be lost with its pod: run the bench inside a pod, with a volume")
    if continued is None:
        _require_baseline(baseline, cells)
    return Request(
        chosen=chosen,
        cells=cells,
        options=_chosen_options(context, dimensions) | ({"baseline": baseline} if baseline else {}),
        output=output,
        continued=continued,
        tracking=None if no_mlflow else Tracking(resolve_uri(tracking_uri), experiment),
        as_json=as_json,
        max_restarts=max_restarts if chosen.name == "local" else 0,
        given="".join(
            f" {shlex.quote(without_secrets(word))}"
            for word in given_arguments(context, only=("tracking_uri", "experiment", "no_mlflow"))
        ),
        baseline=baseline,
        timeline=timeline,
    )


def _require_baseline(baseline: str | None, cells: Sequence[Settings]) -> None:
    """Raise `UsageError` unless a cell has the name: hours later would be too late."""
    labels = dict.fromkeys(cell_label(cell, varying(cells)) for cell in cells)
    if baseline is not None and baseline not in labels:
        raise UsageError(
            f"--baseline {baseline!r} is no cell of this sweep: choose one of {', '.join(map(repr, labels))}"
        )


def _cells(
    dimensions: dict[str, tuple[Any, ...]], options: Mapping[str, Any], chosen: Chosen, *, continued: bool
) -> list[Settings]:
    """The product of the dimensions, in rounds; `options` are the rest of the settings."""
    for name in ("nodes", "nproc_per_node"):
        if not dimensions[name] and (number := getattr(chosen, name)) is not None:
            dimensions[name] = (number,)
    left_open = not continued and not dimensions["nproc_per_node"] and options["device"] != "cpu"
    devices = len(visible_devices()) if left_open else 0
    fixed = {name: value for name, value in options.items() if name != "repeats" and value is not None}
    cells = product(dimensions, fixed, options["repeats"], devices=devices, shared=chosen.here)
    for cell in () if continued else cells:
        chosen.require_world(cell.nodes, cell.nproc_per_node)
    return cells


def _require_alone(context: click.Context) -> None:
    """Refuse options of cells beside --continue, which has them from the sweep."""
    for parameter in context.command.params:
        if parameter.name in {*OPTIONS, "repeats", "output"} and is_given(context, parameter.name):
            raise click.UsageError(
                f"{parameter.opts[0]} cannot be combined with --continue, which runs the sweep's cells unchanged"
            )


def _chosen_options(context: click.Context, dimensions: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """What the user chose, by the options' names; what was left at its default is in the cells."""
    chosen: dict[str, Any] = {}
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in context.params or name in RESULTS:
            continue
        if source in (None, click.core.ParameterSource.DEFAULT):
            continue
        values = dimensions.get(name)
        chosen[parameter.opts[0].lstrip("-")] = list(values) if values else context.params[name]
    return chosen


def run_bench(request: Request, leader: Leader | None) -> int:
    """Run the cell, or the sweep's cells without a result, and show the results; returns the exit code.

    `leader` starts ranks that wait already.
    """
    return (_run_single if request.single else _run_sweep)(request, leader)


def _host(request: Request, leader: Leader | None, interrupts: Interrupts, display: Display) -> Host:
    return Host(
        launch=request.chosen.launch(interrupts, leader),
        interrupted=interrupts.check,
        interruptions=(Interrupted, KeyboardInterrupt),
        watch=display,
        memory=this_machine if request.chosen.here else None,
        max_restarts=request.max_restarts,
        unlimited=missing if request.chosen.name == "local" else lambda: _LIMITED,
    )


def _run_single(request: Request, leader: Leader | None) -> int:
    settings, interrupts, display = request.cells[0], Interrupts(), Display()
    host = _host(request, leader, interrupts, display)
    require_data(settings, host)
    if request.timeline is not None:
        require_traces(request.timeline, [settings])
    path, identity, record = _record_file(settings, request.output)
    push = f"zerokit push {shlex.quote(str(path))}{request.given}"
    tracker = Tracker(request.tracking, display.warn, push)
    if (refused := refusal(settings, host)) is not None:
        display.warn(refused.reason)  # before MLflow takes its seconds
    with interrupts, display:
        try:
            record = record or run_cell(settings, path, host, identity=identity, trace=request.timeline)
        except BaseException:
            with suppress(UsageError):  # nothing has been written yet
                tracker.push(find_records([path]))
            raise
        display.phase("filling MLflow")
        tracker.push(Found([(path, record)], {}, []))
    if refused is None:
        _warn(record, display)
    well = record.status is Status.OK
    if request.as_json:
        click.echo(printable_json(record.to_json()), nl=False)
    elif well:
        display.table([record])
    written = {"record": str(path)} | traces_written([record])
    display.files(written, tracker, to_stderr=request.as_json or not well)
    return exit_code([record])


def _run_sweep(request: Request, leader: Leader | None) -> int:
    default = unused(DEFAULT_FOLDER / f"{datetime.now():%Y%m%d-%H%M%S}-sweep")
    folder = SweepFolder(request.continued or request.output or default)
    continued = request.continued is not None
    sweep = folder.read() if continued else Sweep.of(request.cells, request.options)
    baseline = request.baseline or sweep.baseline
    _require_baseline(baseline, [cell.settings for cell in sweep.cells])
    interrupts, display = Interrupts(), Display(cells=len(sweep.cells))
    host = _host(request, leader, interrupts, display)
    for settings in dict.fromkeys(replace(cell.settings, repeat=0) for cell in sweep.cells):
        require_data(settings, host)
    if request.timeline is not None:
        require_traces(request.timeline, [cell.settings for cell in sweep.cells])
    place = f"{shlex.quote(str(folder.path))}{request.given}"
    tracker = Tracker(request.tracking, display.warn, f"zerokit push {place}")
    again = f" --timeline {shlex.quote(str(request.timeline))}" if request.timeline else ""
    written = {"records": str(folder.path / "cells")}
    with interrupts, folder.alone(), display:
        sweep = prepare(folder, sweep)
        sweeps = {sweep.id: (sweep, folder)}
        try:
            records = run_sweep(
                sweep,
                folder,
                host,
                lambda path, record: tracker.push(Found([(path, record)], sweeps, []), going_on=True),
                request.timeline,
            )
        except BaseException:
            display.warn(f"to continue from here: zerokit bench --continue {place}{again}")
            with suppress(UsageError):  # nothing has been written yet
                tracker.push(find_records([folder.path]))
            raise
        display.phase("writing the report")
        if write_report(records, folder.report, display.warn, baseline):
            written["report"] = str(folder.report)
        display.phase("filling MLflow")
        paths = map(folder.record, sweep.cells)
        tracker.push(Found(list(zip(paths, records, strict=True)), sweeps, []))
    if request.as_json:
        content = {"sweep": to_plain(sweep), "records": [to_plain(record) for record in records]}
        click.echo(printable_json(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False)))
    else:
        display.table(records, baseline)
    display.files(written | traces_written(records), tracker, to_stderr=request.as_json)
    if (code := exit_code(records)) == 1:
        display.warn(f"to run the failed cells again: zerokit bench --continue {place}{again}")
    return code


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


def _warn(record: Record, display: Display) -> None:
    """Warnings of a single bench."""
    settings = record.settings
    if record.status is not Status.OK:
        memory = record.status is Status.OUT_OF_MEMORY
        display.warn(f"{record.status}: {record.reason}" if memory else record.reason or record.status)
    elif settings.resume and record.checkpoints.resumed_from is None:
        display.warn(f"--resume: {settings.save} has no checkpoint yet: the bench started at step 0")
    for note in record.checkpoints.notes:
        display.warn(printable(note))
