"""`zerokit bench` as a job that Slurm or Kubernetes queues, and its records fetched."""

from __future__ import annotations

import json
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
        "dry_run",
    ),
    *("submit", "namespace", "form", "as_json"),
]
_OF_PODS = ("nodes", "nproc_per_node", "container_image", "variables")
"""What pods get otherwise."""


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
    shapes = {(cell.nodes, cell.nproc_per_node) for cell in cells}
    if len(shapes) > 1 or (options["submit"] and len(cells) > 1):
        raise click.UsageError(
            "a job has one number of pods and ends with one record: leave the sweep to several jobs"
        )
    nodes, ranks = shapes.pop()
    chosen_ranks = context.get_parameter_source("nproc_per_node") is click.core.ParameterSource.COMMANDLINE
    pods = Pods(
        name=f"zerokit-{datetime.now():%Y%m%d-%H%M%S}",
        namespace=options["namespace"],
        image=options["container_image"],
        nodes=nodes,
        nproc_per_node=ranks if chosen_ranks else options["gpus_per_node"] or ranks,
        arguments=given_arguments(context, (*_OUTSIDE, *_OF_PODS)),
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
    from zerokit.bench.run.session import DEFAULT_FOLDER
    from zerokit.cli.display import Display
    from zerokit.launch.interrupts import Interrupts
    from zerokit.launch.slurm import Container, follow, render_script
    from zerokit.launch.slurm import Request as Allocation
    from zerokit.launch.slurm import submit as sbatch

    options, cells, output = request.chosen.options, request.cells, request.output
    if request.continued is not None:
        raise click.UsageError(
            "--continue is for nodes that are there: run it with --launcher slurm inside an allocation (salloc)"
        )
    try:
        image = options["container_image"]
        allocation = Allocation(
            nodes=max(cell.nodes for cell in cells),
            gpus_per_node=options["gpus_per_node"],
            partition=options["partition"],
            account=options["account"],
            time=options["time_limit"],
            lines=options["sbatch_option"],
            container=Container(image, options["container_runtime"]) if image else None,
        )
    except UsageError as error:
        raise click.UsageError(printable(str(error))) from error
    single = len(cells) == 1
    parent = (output.parent if output is not None and output.suffix == ".json" else output) or DEFAULT_FOLDER
    folder = (parent / f"{datetime.now():%Y%m%d-%H%M%S}-slurm").absolute()
    target = output.absolute() if output is not None and output.suffix == ".json" else None
    target = target or (folder / ("record.json" if single else "sweep"))
    arguments = [*given_arguments(context, _OUTSIDE), "--launcher", "slurm", "--output", str(target)]
    file = folder / "arguments.json"
    script = render_script(allocation, file, folder)
    if options["dry_run"]:
        click.echo(script, nl=False)
        return 0
    require_writable(folder)
    file.write_text(json.dumps(arguments, indent=1) + "\n", encoding="utf-8")
    (folder / "job.sh").write_text(script, encoding="utf-8")
    job = sbatch(folder / "job.sh")
    display = Display()
    display.warn(f"submitted as Slurm's job {job}; its log is {folder / 'slurm.log'}")
    with Interrupts() as interrupts, display:
        code = follow(job, folder, interrupts, display.warn)
    _show(target, display, as_json=request.as_json, single=single, log=folder / "slurm.log")
    return code


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
