"""`zerokit bench` as a job that Slurm or Kubernetes queues, and its records fetched."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zerokit.cli.launchers import given_arguments, read_variables
from zerokit.errors import UsageError
from zerokit.text import printable

if TYPE_CHECKING:
    from zerokit.cli.bench_request import Request
    from zerokit.cli.display import Display

# Of the submission alone: inside the job they are settled.
_OUTSIDE = [
    *(
        "launcher",
        "output",
        "partition",
        "account",
        "time_limit",
        "gpus_per_node",
        "sbatch_option",
        "cpus_per_task",
        "memory",
        "container_image",
        "container_runtime",
        "remote_python",
        "variables",
        "dry_run",
    ),
    *("submit", "namespace", "form", "as_json"),
]
_OF_RANKS = ("nodes", "nproc_per_node")
"""What ranks know from who has started them."""


def submit(context: click.Context, request: Request) -> int:
    """Queue the bench and wait for its end, or print what would be queued; the exit code."""
    kubernetes = request.chosen.name == "kubernetes"
    return (_submit_to_kubernetes if kubernetes else _submit_to_slurm)(context, request)


def _submit_to_kubernetes(context: click.Context, request: Request) -> int:
    from zerokit.bench.record import Record, write_record
    from zerokit.bench.run.session import record_path
    from zerokit.cli.display import Display
    from zerokit.launch.interrupts import Interrupts
    from zerokit.launch.kubernetes import Pods, apply, find_json, follow, render, to_yaml

    options, cells = request.chosen.options, request.cells
    if options["container_image"] is None:
        raise click.UsageError(
            "--launcher kubernetes needs --container-image: an image with zerokit (docker/Dockerfile)"
        )
    nodes, ranks = _one_shape(context, request)
    if options["submit"] and len(cells) > 1:
        raise click.UsageError("a job ends with one record: leave the sweep to several jobs")
    pods = Pods(
        name=f"zerokit-{datetime.now():%Y%m%d-%H%M%S}",
        namespace=options["namespace"],
        image=options["container_image"],
        nodes=nodes,
        nproc_per_node=ranks,
        arguments=given_arguments(context, (*_OUTSIDE, *_OF_RANKS)),
        gpus_per_node=options["gpus_per_node"],
        environment=read_variables(options["variables"]),
    )
    objects = render(pods, options["form"])
    if not options["submit"]:
        click.echo(to_yaml(objects), nl=False)
        return 0
    path = record_path(request.output, cells[0], datetime.now())
    apply(objects)
    display = Display()
    display.warn(f"submitted as {options['form']} {pods.name} in namespace {pods.namespace}")
    with Interrupts() as interrupts, display:
        log = follow(pods, options["form"], interrupts, display.warn)
    record = Record.from_json(find_json(log))
    write_record(record, path)
    _show(path, display, as_json=request.as_json, single=True, log=None)
    return 0 if record.status == "ok" else 1


def _submit_to_slurm(context: click.Context, request: Request) -> int:
    from zerokit.bench.record import require_writable
    from zerokit.cli.display import Display
    from zerokit.launch.interrupts import Interrupts
    from zerokit.launch.slurm import JOB_FOLDER, Container, folder_of, follow, log_of, render_script
    from zerokit.launch.slurm import Request as Allocation
    from zerokit.launch.slurm import submit as sbatch

    options, cells = request.chosen.options, request.cells
    if request.continued is not None:
        raise click.UsageError(
            "--continue is for nodes that are there: run it with --launcher slurm inside an allocation (salloc)"
        )
    nodes, ranks = _one_shape(context, request)
    try:
        image = options["container_image"]
        allocation = Allocation(
            nodes=nodes,
            ranks=ranks,
            gpus_per_node=options["gpus_per_node"],
            cpus_per_task=options["cpus_per_task"],
            memory=options["memory"],
            partition=options["partition"],
            account=options["account"],
            time=options["time_limit"],
            lines=options["sbatch_option"],
            container=Container(image, options["container_runtime"]) if image else None,
            variables=read_variables(options["variables"]),
        )
    except UsageError as error:
        raise click.UsageError(printable(str(error))) from error
    single = len(cells) == 1
    inside = None if request.output is None else str(request.output)
    name = "record.json" if single else "sweep"
    python = options["remote_python"] or sys.executable
    arguments = given_arguments(context, (*_OUTSIDE, *_OF_RANKS))
    command = [python, "-m", "zerokit.cli", "bench", *arguments, "--launcher", "env"]
    command += ["--output", inside or f"{JOB_FOLDER}/{name}"]
    made_by = shlex.join(["zerokit", "bench", *given_arguments(context, ("dry_run",))])
    script = render_script(allocation, command, made_by)
    if options["dry_run"]:
        click.echo(script, nl=False)
        return 0
    scripts = folder_of("").parent
    require_writable(scripts)
    file = scripts / f"{datetime.now():%Y%m%d-%H%M%S-%f}.sbatch"
    file.write_text(script, encoding="utf-8")
    job = sbatch(file)
    display, log = Display(), log_of(job)
    display.warn(f"submitted as Slurm's job {job}; its log is {log}")
    with Interrupts() as interrupts, display:
        code = follow(job, interrupts, display.warn)
    target = Path(inside) if inside else folder_of(job) / name
    _show(target, display, as_json=request.as_json, single=single, log=log)
    return code


def _one_shape(context: click.Context, request: Request) -> tuple[int, int]:
    """Nodes, and ranks of each, one a GPU unless the user says otherwise; a job has one number of both."""
    shapes = {(cell.nodes, cell.nproc_per_node) for cell in request.cells}
    if len(shapes) > 1:
        raise click.UsageError(
            "a job has one number of nodes and of ranks on each: leave a sweep over them to several jobs, or run it "
            "with --launcher slurm inside an allocation (salloc)"
        )
    nodes, ranks = shapes.pop()
    chosen = context.get_parameter_source("nproc_per_node") is click.core.ParameterSource.COMMANDLINE
    return nodes, ranks if chosen else request.chosen.options["gpus_per_node"] or ranks


def _show(target: Path, display: Display, *, as_json: bool, single: bool, log: Path | None) -> None:
    """What the job has written, as the same bench would have shown it here."""
    from zerokit.bench.record import read_record

    if single and target.exists():
        record = read_record(target)
        if as_json:
            click.echo(record.to_json(), nl=False)
        elif record.status == "ok":
            display.table([record])
        else:
            display.warn(f"{record.status}: {record.reason}")
    lines = [f"\n{'record' if single else 'records'}  {target}", *([] if log is None else [f"log     {log}"])]
    click.echo("\n".join(lines), err=as_json)
