"""Submits a bench, or a program of the user's, as a job to Slurm or Kubernetes, and shows what comes of it."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import fields
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from zerokit.cli.launcher_options import OPTIONS_OF
from zerokit.cli.launchers import Chosen, given_arguments, is_given, read_variables
from zerokit.cli.work import note
from zerokit.documents import read_text
from zerokit.text import printable, printable_json, printable_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zerokit.cli.bench_run import Request
    from zerokit.submit.kubernetes import Pods
    from zerokit.submit.slurm import Request as Allocation
    from zerokit.terminal.display import Display

_Job = TypeVar("_Job", "Pods", "Allocation")
_OUTSIDE = (*OPTIONS_OF, "output", "as_json", "nodes", "nproc_per_node")
"""Options of the submission alone: inside the job they are settled, and ranks know their number."""


def submit(context: click.Context, request: Request) -> int:
    """Submit the bench and wait for its end, or print what would be submitted; returns the exit code."""
    shapes = {(cell.nodes, cell.nproc_per_node) for cell in request.cells}
    if len(shapes) > 1:
        raise click.UsageError(
            "a job has a fixed number of nodes and ranks: submit one job for each, or run the sweep with "
            "--launcher slurm inside an allocation (salloc)"
        )
    ((nodes, ranks),) = shapes
    if not is_given(context, "nproc_per_node"):  # one a GPU
        ranks = request.chosen.options["gpus_per_node"] or ranks
    kubernetes = request.chosen.name == "kubernetes"
    return (_submit_to_kubernetes if kubernetes else _submit_to_slurm)(context, request, nodes, ranks)


_FIELDS = {"time_limit": "time", "sbatch_option": "lines", "pvc": "claim", "shm_size": "shared_memory"}
_FIELDS |= {"toleration": "tolerations", "pull_secret": "pull_secrets"}
_FIELDS |= {"resource": "resources", "capability": "capabilities"}
"""Fields of a job that have other names than their options."""


def job_of(kind: type[_Job], chosen: Chosen, **more: Any) -> _Job:
    """What a queue is asked for: each field is an option, or one of `more`."""
    options = {_FIELDS.get(name, name): value for name, value in chosen.options.items()} | more
    return kind(**{field.name: options[field.name] for field in fields(kind) if field.name in options})


def pods_of(chosen: Chosen, variables: Mapping[str, str], **more: Any) -> Pods:
    """The request to Kubernetes; `variables` are given to the ranks beside those of this process and the options."""
    from zerokit.submit.kubernetes import Pods, forwarded

    options = chosen.options
    if options["container_image"] is None:
        raise click.UsageError(
            "--launcher kubernetes needs --container-image, an image with zerokit (docker/Dockerfile)"
        )
    return job_of(
        Pods,
        chosen,
        name=options["job_name"] or f"zerokit-{datetime.now():%Y%m%d-%H%M%S}",
        image=options["container_image"],
        variables={**forwarded(os.environ), **variables, **read_variables(options["variables"])},
        **more,
    )


def allocation_of(chosen: Chosen, **more: Any) -> Allocation:
    """The request to Slurm."""
    from zerokit.cluster.slurm import Container
    from zerokit.submit.slurm import Request as Allocation

    options, image, address = chosen.options, chosen.options["container_image"], chosen.options["master_addr"]
    if options["follow"]:
        raise click.UsageError(
            "--follow works for ranks started from here; a job's output is in its log (tail -f)"
        )
    return job_of(
        Allocation,
        chosen,
        container=Container(image, options["container_runtime"]) if image else None,
        variables=({"MASTER_ADDR": address} if address else {}) | read_variables(options["variables"]),
        **more,
    )


def made_by(context: click.Context, without: Sequence[str] = ()) -> str:
    """The command line for a comment, which is one line: the next one would be obeyed."""
    program = context.params.get("program", ())
    words = [*given_arguments(context, without), *(["--", *program] if program else [])]
    return printable(shlex.join(["zerokit", str(context.info_name), *words]))


def submit_program(
    context: click.Context, chosen: Chosen, program: Sequence[str], *, nodes: int, ranks: int
) -> int:
    """Submit a program of the user's, and wait for its end, or print what would be submitted; returns the exit code.

    `program` is what follows `python`.
    """
    submits = _program_to_kubernetes if chosen.name == "kubernetes" else _program_to_slurm
    return submits(context, chosen, program, {"nodes": nodes, "ranks": ranks})


def _warn(text: str) -> None:
    note([text])


def _program_to_slurm(
    context: click.Context, chosen: Chosen, program: Sequence[str], shape: Mapping[str, int]
) -> int:
    from zerokit.interrupts import Interrupts
    from zerokit.launch.failures import tail
    from zerokit.submit.slurm import follow, log_of, render_program

    name = Path(program[1] if program[0] == "-m" else program[0]).stem
    allocation = allocation_of(chosen, name=name if re.fullmatch(r"[\w.-]+", name) else "zerokit", **shape)
    python = chosen.options["remote_python"] or sys.executable
    script = render_program(allocation, python, program, made_by(context, ("dry_run",)))
    if (job := _submitted(script, chosen.options, _warn)) is None:
        return 0
    with Interrupts() as interrupts:
        code = follow(job, None, interrupts, _warn)
    click.echo(printable_lines(tail(log_of(job))))
    if code:
        _warn(f"job {job} failed; the cause may be further up in {log_of(job)}")
    return code


def _program_to_kubernetes(
    context: click.Context, chosen: Chosen, program: Sequence[str], shape: Mapping[str, int]
) -> int:
    from zerokit.interrupts import Interrupts
    from zerokit.submit.kubernetes import PROGRAM, follow

    files, path = {}, Path(program[0])
    if path.is_file():
        try:
            files[path.name] = read_text(path)
        except (OSError, ValueError) as error:
            raise click.UsageError(f"{path} cannot go along, put it in the image: {error}") from error
        program = [f"{PROGRAM}/{path.name}", *program[1:]]
        _warn(f"pods get {path.name} alone: what it imports must be in the image")
    pods = pods_of(chosen, {}, torchrun=program, files=files, application="zerokit-launch", **shape)
    if _created(context, pods, chosen.options, _warn):
        with Interrupts() as interrupts:
            log, well = follow(pods, chosen.options["form"], interrupts, _warn)
        click.echo(printable_lines(log), nl=False)
        return int(not well)
    return 0


def _created(
    context: click.Context, pods: Pods, options: Mapping[str, Any], warn: Callable[[str], None]
) -> bool:
    """Create the objects if they are to be submitted; False if they were printed instead."""
    from zerokit.submit.kubernetes import apply, render, to_yaml

    objects = render(pods, options["form"])
    if not options["submit"]:
        click.echo(f"# {made_by(context)}\n{to_yaml(objects)}", nl=False)
        return False
    apply(objects)
    warn(f"submitted as {options['form']} {pods.name} in namespace {pods.namespace}")
    return True


def _submitted(script: str, options: Mapping[str, Any], warn: Callable[[str], None]) -> str | None:
    """Submit the script; returns the job's number, None if the script was printed instead."""
    from zerokit.submit.slurm import log_of, submit

    if options["dry_run"]:
        # Unchanged for a program, escaped for a terminal.
        click.echo(printable_lines(script) if sys.stdout.isatty() else script, nl=False)
        return None
    job = submit(script)
    warn(f"submitted as Slurm's job {job}; its log is {log_of(job)}")
    return job


def _submit_to_kubernetes(context: click.Context, request: Request, nodes: int, ranks: int) -> int:
    from zerokit.bench.record.record import Record, write_record
    from zerokit.bench.run.session import record_path
    from zerokit.bench.run.sweep import exit_code
    from zerokit.bench.tracking.push import Tracker, find_records
    from zerokit.interrupts import Interrupts
    from zerokit.submit.kubernetes import find_json, follow
    from zerokit.terminal.display import Display

    options, cells, tracking = request.chosen.options, request.cells, request.tracking
    if options["submit"] and len(cells) > 1:
        raise click.UsageError("a job writes one record: submit each cell of the sweep as its own job")
    served = {}  # pods only reach a server; to another store the record goes from here
    if tracking is not None and re.match(r"https?://", tracking.uri):
        served = {"MLFLOW_TRACKING_URI": tracking.uri}
    arguments = given_arguments(context, _OUTSIDE)
    if tracking is not None and not served:
        arguments.append("--no-mlflow")
    bench = ["--no-python", "zerokit", "bench", "--launcher", "env", "--json", *arguments]
    pods = pods_of(request.chosen, served, nodes=nodes, ranks=ranks, torchrun=bench)
    if pods.claim is None and any(cell.save is not None for cell in cells):
        raise click.UsageError(
            "checkpoints would be lost with their pod: give a persistent volume with --pvc CLAIM"
        )
    if own := sorted({cell.model.partition(":")[0] for cell in cells if ":" in cell.model}):
        click.echo(
            f"zerokit: the image {printable(pods.image)} must have the module {printable(', '.join(own))} on its "
            "Python path: pods get no file of this machine",
            err=True,
        )
    path = record_path(request.output, cells[0], datetime.now()) if options["submit"] else Path()
    display = Display()
    if not _created(context, pods, options, display.warn):
        return 0
    with Interrupts() as interrupts, display:
        log, well = follow(pods, options["form"], interrupts, display.warn)
    record = Record.from_json(find_json(log))
    write_record(record, path)
    if tracking is not None and not served:
        tracker = Tracker(tracking, display.warn, f"zerokit push {shlex.quote(str(path))}")
        tracker.push(find_records([path]))
    _show(path, display, as_json=request.as_json, single=True, log=None)
    return exit_code([record]) or int(not well)


def _submit_to_slurm(context: click.Context, request: Request, nodes: int, ranks: int) -> int:
    from zerokit.interrupts import Interrupts
    from zerokit.submit.slurm import JOB_FOLDER, folder_of, follow, log_of, render_script
    from zerokit.terminal.display import Display

    options = request.chosen.options
    if request.continued is not None:
        raise click.UsageError(
            "--continue needs running nodes: use --launcher slurm inside an allocation (salloc)"
        )
    single = len(request.cells) == 1
    inside, name = request.output, "record.json" if single else "sweep"
    if inside is not None and single and inside.suffix != ".json":
        inside /= f"{datetime.now():%Y%m%d-%H%M%S-%f}.json"
    command = [options["remote_python"] or sys.executable, "-P", "-m", "zerokit", "bench"]
    command += [*given_arguments(context, _OUTSIDE), "--launcher", "env"]
    command += ["--output", str(inside or f"{JOB_FOLDER}/{name}")]
    script = render_script(
        allocation_of(request.chosen, nodes=nodes, ranks=ranks), command, made_by(context, ("dry_run",))
    )
    display = Display()
    if (job := _submitted(script, options, display.warn)) is None:
        return 0
    target = inside or folder_of(job) / name
    with Interrupts() as interrupts, display:
        code = follow(job, target, interrupts, display.warn)
    _show(target, display, as_json=request.as_json, single=single, log=log_of(job))
    return code


def _show(target: Path, display: Display, *, as_json: bool, single: bool, log: Path | None) -> None:
    """What the job has written, as the same bench would have shown it here."""
    from zerokit.bench.record.record import read_record

    if single and target.exists():
        record = read_record(target)
        if as_json:
            click.echo(printable_json(record.to_json()), nl=False)
        elif record.status == "ok":
            display.table([record])
        else:
            display.warn(f"{record.status}: {record.reason}")
    lines = [f"\n{'record' if single else 'records'}  {target}", *([] if log is None else [f"log     {log}"])]
    click.echo(printable_lines("\n".join(lines)), err=as_json)
