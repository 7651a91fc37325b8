"""`zerokit bench`."""

from __future__ import annotations

import os
import shlex
import signal
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from zerokit.bench.machine.devices import visible_devices
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.words import DIMENSIONS
from zerokit.bench.sweeps.cells import product
from zerokit.cli.bench_options import DEFAULT_REPEATS, STEPS_A_ROUND, bench_options
from zerokit.cli.launchers import (
    Chosen,
    FromFile,
    choose_launcher,
    given_arguments,
    join,
    launcher_options,
    take_options,
)
from zerokit.errors import UsageError
from zerokit.text import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zerokit.bench.record.journal import Job
    from zerokit.bench.record.sweep import Sweep
    from zerokit.bench.run.session import Host
    from zerokit.bench.tracking.mirror import Live
    from zerokit.bench.tracking.store import Tracking
    from zerokit.cli.display import Display
    from zerokit.launch.interrupts import Interrupts
    from zerokit.launch.joined import Leader

# Of one bench alone: cells that write the same checkpoints would continue each other's.
_CHECKPOINTS = ("save", "save_every", "background", "resume", "elastic")

_EPILOG = """\b
Several values after commas make a sweep of all combinations:
  zerokit bench --stage 0,1,2,3 --engine zerokit,ddp,fsdp2 --nodes 2
Without --launcher N nodes are N torchrun agents here: real ranks, one loopback wire.
\b
Exit codes: 0 ok, 1 a cell failed, 2 wrong use, 4 nothing ran (all out of memory
or unsupported), 128 + N ended by signal N.
"""


@click.command(cls=FromFile, epilog=_EPILOG)
@bench_options
@launcher_options
@click.pass_context
def command(
    context: click.Context,
    /,
    output: Path | None,
    continued: Path | None,
    as_json: bool,
    tracking_uri: str | None,
    experiment: str,
    no_mlflow: bool,
    clip: float,
    repeats: int | None,
    max_restarts: int,
    **options: Any,
) -> None:
    """Train models for some steps, measure them, write records and MLflow runs.

    A step's time is that of its slowest rank, warm-up apart. The record is JSON with every rank's every step;
    the MLflow run is filled from it after the ranks have ended. A sweep ends with a table and an HTML report.
    """
    from zerokit.bench.tracking.store import Tracking, resolve_uri

    if continued is not None:
        _require_alone(context)
    try:
        elastic = bool(options["elastic"])
        chosen = choose_launcher(take_options(options), os.environ, elastic=elastic)
        if not (elastic and chosen.name == "local") and _from_command_line(context, "max_restarts"):
            raise UsageError(
                "--max-restarts is for --elastic with ranks that are started here; torchrun has its own"
            )
        dimensions = {name: _listed(options.pop(name)) for name in DIMENSIONS}
        for name in ("nodes", "nproc_per_node"):
            if not dimensions[name] and (number := getattr(chosen, name)) is not None:
                dimensions[name] = (number,)
        left_open = continued is None and not dimensions["nproc_per_node"] and options["device"] != "cpu"
        devices = len(visible_devices()) if left_open else 0
        if left_open and not chosen.here:  # each node has as many as this machine
            devices *= max(dimensions["nodes"] or (1,))
        steps = options.pop("steps")
        fixed = {**options, "clip": clip or None}
        once = product(dimensions, fixed, devices=devices)
        repeats = repeats or (DEFAULT_REPEATS if len(once) > 1 else 1)
        fixed["steps"] = steps or (STEPS_A_ROUND if repeats > 1 else Settings().steps)
        cells = product(dimensions, fixed, repeats, devices=devices)
        if chosen.member is not None and continued is None:
            for cell in cells:
                chosen.member.require_world(cell.nodes, cell.nproc_per_node)
        if len(cells) > 1 and any(options[name] for name in _CHECKPOINTS):
            raise UsageError(
                "checkpoints belong to one bench: give --save, --resume and --elastic without a sweep"
            )
        if len(cells) > 1 and output is not None and output.suffix == ".json":
            raise UsageError(f"a sweep writes a folder: --output {output} names a file")
    except UsageError as error:
        raise click.UsageError(printable(str(error))) from error
    given = _given(context, "tracking_uri", "experiment", "no_mlflow")

    def run(leader: Leader | None) -> int:
        tracking = None if no_mlflow else Tracking(resolve_uri(tracking_uri), experiment)
        start = Start(chosen, leader, max_restarts)
        if continued is None and len(cells) == 1:
            return _single(cells[0], output, tracking, start, as_json=as_json, given=given)
        asked = None
        if continued is None:
            from zerokit.bench.record.sweep import Sweep

            asked = Sweep.of(cells, _asked(context, dimensions))
        return _sweep(asked, continued or output, tracking, start, as_json=as_json, given=given)

    try:
        if chosen.submits:
            from zerokit.cli.submission import submit

            code = submit(context, chosen, cells, output, as_json=as_json)
        elif chosen.member is None:
            code = run(None)
        else:
            code = join(chosen, given_arguments(context), run)
    except KeyboardInterrupt:  # of someone who would not wait for the first signal's end
        from zerokit.launch.interrupts import Interrupted

        raise Interrupted(signal.SIGINT) from None
    context.exit(code)


def _listed(values: Any) -> tuple[Any, ...]:
    return () if values is None else tuple(values)


def _require_alone(context: click.Context) -> None:
    """Refuse options of cells beside --continue, which has them from the sweep."""
    about_cells = {field.name for field in fields(Settings)} | {"repeats", "output"}
    for parameter in context.command.params:
        if parameter.name in about_cells and _from_command_line(context, parameter.name):
            raise click.UsageError(
                f"{parameter.opts[0]} cannot be given with --continue, which runs the cells of the sweep as they are"
            )


def _from_command_line(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def _given(context: click.Context, *names: str) -> str:
    """These options as they stood on the command line, each after a space, to be repeated in advice."""
    found = ""
    for parameter in context.command.params:
        if parameter.name in names and _from_command_line(context, parameter.name):
            value = context.params[parameter.name]
            found += f" {parameter.opts[0]}" + ("" if value is True else f" {shlex.quote(str(value))}")
    return found


def _asked(context: click.Context, dimensions: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    """What the user chose, by the options' names; what was left at its default is in the cells."""
    found: dict[str, Any] = {}
    left_out = {"output", "continued", "as_json", "tracking_uri", "experiment", "no_mlflow"}
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name in left_out or source in (None, click.core.ParameterSource.DEFAULT):
            continue
        values = dimensions.get(name)
        found[parameter.opts[0].lstrip("-")] = list(values) if values else context.params[name]
    return found


def _single(
    settings: Settings,
    output: Path | None,
    tracking: Tracking | None,
    start: Start,
    *,
    as_json: bool,
    given: str,
) -> int:
    """One bench: its record, its tables; the exit code."""
    from zerokit.bench.run.session import record_path, refusal, require_data, run_cell
    from zerokit.bench.sweeps.sweep import exit_code
    from zerokit.cli.display import Display
    from zerokit.launch.interrupts import Interrupts

    display = Display()
    host = start.host(Interrupts(), display)
    refused = refusal(settings, host)
    require_data(settings, host)
    job = None
    if settings.elastic:
        job = _open_job(settings, output)
    path = job.record if job is not None else record_path(output, settings, datetime.now())
    if refused is not None:
        display.warn(refused[1])  # the answer, before MLflow takes its seconds
    push = f"zerokit push {shlex.quote(str(path))}{given}"
    with Interrupts() as interrupts, display:
        host = start.host(interrupts, display)
        if tracking is not None:
            display.phase("opening the MLflow run")
        live = _live(tracking, display, push)
        record = live.during(
            settings,
            None,
            lambda identity: run_cell(settings, path, host, identity=identity),
            None if job is None else job.identity,
        )
    if record.status != "ok" and refused is None:
        memory = record.status == "out of memory"
        display.warn(f"{record.status}: {record.reason}" if memory else record.reason or record.status)
    if record.status == "ok" and settings.resume and record.checkpoints.resumed_from is None:
        display.warn(f"--resume: {settings.save} holds no checkpoint yet: the bench began at step 0")
    for note in record.checkpoints.notes:
        display.warn(printable(note))
    if as_json:
        click.echo(record.to_json(), nl=False)
    elif record.status == "ok":
        display.results(record)
    display.places({"record": str(path)}, live, push, to_stderr=as_json or record.status != "ok")
    return exit_code([record])


def _open_job(settings: Settings, output: Path | None) -> Job:
    """The job that goes on in the run's directory, or a new one; its record can be written."""
    from zerokit.bench.record import require_writable
    from zerokit.bench.record.journal import Journal
    from zerokit.bench.run.session import record_path

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


def _sweep(
    asked: Sweep | None,
    place: Path | None,
    tracking: Tracking | None,
    start: Start,
    *,
    as_json: bool,
    given: str,
) -> int:
    """All cells of `asked`, or those that a folder's sweep still misses; the exit code."""
    import json

    from zerokit.bench.record.schema import to_plain
    from zerokit.bench.record.sweep import SweepFolder
    from zerokit.bench.run.session import DEFAULT_FOLDER, require_data
    from zerokit.bench.sweeps.sweep import exit_code, prepare, read_sweep, run_sweep
    from zerokit.bench.tracking.content import sweep_files, sweep_status
    from zerokit.cli.display import Display
    from zerokit.cli.pictures import pictures, write_report
    from zerokit.launch.interrupts import Interrupts

    folder = SweepFolder(place or _new_folder(DEFAULT_FOLDER))
    sweep = read_sweep(folder) if asked is None else asked
    for settings in dict.fromkeys(replace(cell.settings, repeat=0) for cell in sweep.cells):
        require_data(settings, start.host(Interrupts(), Display()))
    try:
        sweep = prepare(folder, sweep)
    except UsageError as error:
        raise click.UsageError(printable(str(error))) from error
    display = Display(cells=len(sweep.cells))
    where = shlex.quote(str(folder.path))
    push = f"zerokit push {where}{given}"
    with Interrupts() as interrupts, folder.alone(), display:
        live = _live(tracking, display, push)
        try:
            records = run_sweep(sweep, folder, start.host(interrupts, display), display, live)
        except BaseException as error:
            killed = isinstance(error, _interruptions())
            live.end_sweep(sweep.id, [], dict, "KILLED" if killed else "FAILED")
            display.warn(f"to go on where this ends: zerokit bench --continue {where}{given}")
            raise
        display.phase("writing the report")
        report = write_report(records, folder.report, display.warn)
        live.end_sweep(
            sweep.id,
            records,
            lambda: sweep_files(sweep, folder, lambda: pictures(records)),
            sweep_status(sweep, records),
        )
    if as_json:
        content = {"sweep": to_plain(sweep), "records": [to_plain(record) for record in records]}
        click.echo(json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False))
    else:
        display.table(records)
    places = {"records": str(folder.path / "cells")}
    if report:
        places["report"] = str(folder.report)
    display.places(places, live, push, to_stderr=as_json)
    code = exit_code(records)
    if code == 1:
        display.warn(f"to run the failed cells again: zerokit bench --continue {where}{given}")
    return code


def _new_folder(parent: Path) -> Path:
    name = f"{datetime.now():%Y%m%d-%H%M%S}-sweep"
    path, attempt = parent / name, 1
    while path.exists():
        attempt += 1
        path = parent / f"{name}-{attempt}"
    return path


def _live(tracking: Tracking | None, display: Display, later: str) -> Live:
    """MLflow beside the cells."""
    from zerokit.bench.tracking.mirror import Live
    from zerokit.cli.pictures import pictures

    return Live(tracking, display.warn, later, _interruptions(), lambda record: pictures([record]))


def _interruptions() -> tuple[type[BaseException], ...]:
    """What ends the work because the user wants no more."""
    from zerokit.launch.interrupts import Interrupted

    return Interrupted, KeyboardInterrupt


@dataclass(frozen=True)
class Start:
    """Who starts the ranks of this command's cells; `leader` where they have been started already."""

    chosen: Chosen
    leader: Leader | None
    max_restarts: int = 0

    def host(self, interrupts: Interrupts, display: Display) -> Host:
        """Where cells run."""
        from zerokit.bench.run.session import Host

        host = Host(
            launch=self.chosen.launch(interrupts, self.leader),
            interrupted=interrupts.check,
            interruptions=_interruptions(),
            watch=display,
            max_restarts=self.max_restarts if self.chosen.name == "local" else 0,
        )
        # What other machines have is not known here.
        return host if self.chosen.here else replace(host, fits=lambda settings: None)
