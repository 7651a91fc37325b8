"""Submits `zerokit bench` as a job to Slurm or Kubernetes, and fetches its records."""

from __future__ import annotations

import os
import re
import shlex
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from zerokit.cli.launcher_options import OPTIONS_OF
from zerokit.cli.launchers import given_arguments, is_given, read_variables
from zerokit.launch.trust import SECRET
from zerokit.text import printable, printable_json, printable_lines, without_secrets, without_secrets_named

if TYPE_CHECKING:
    from zerokit.cli.bench_run import Request
    from zerokit.cli.display import Display

_OUTSIDE = (*OPTIONS_OF, "output", "as_json")
"""Options of the submission alone: inside the job they are settled."""
_OF_RANKS = ("nodes", "nproc_per_node")
"""What ranks know from who has started them."""


_TO_SLURM = ("gpus_per_node", "cpus_per_task", "memory", "partition", "account")
_TO_PODS = ("namespace", "gpus_per_node", "memory", "secrets", "service_account", "queue", "priority_class")


def submit(context: click.Context, request: Request) -> int:
    """Submit the bench and wait for its end, or print what would be submitted; returns the exit code."""
    kubernetes = request.chosen.name == "kubernetes"
    return (_submit_to_kubernetes if kubernetes else _submit_to_slurm)(context, request)


def _submit_to_kubernetes(context: click.Context, request: Request) -> int:
    from zerokit.bench.record.record import Record, write_record
    from zerokit.bench.run.session import record_path
    from zerokit.bench.run.sweep import exit_code
    from zerokit.bench.tracking.push import Tracker, find_records
    from zerokit.cli.display import Display
    from zerokit.launch.interrupts import Interrupts
    from zerokit.launch.kubernetes import Pods, apply, find_json, follow, render, to_yaml

    options, cells = request.chosen.options, request.cells
    if options["container_image"] is None:
        raise click.UsageError(
            "--launcher kubernetes needs --container-image, an image with zerokit (docker/Dockerfile)"
        )
    nodes, ranks = _one_shape(context, request)
    if options["submit"] and len(cells) > 1:
        raise click.UsageError("a job writes one record: submit each cell of the sweep as its own job")
    environment, tracked_here = _environment_of_pods(request)
    arguments = given_arguments(context, (*_OUTSIDE, *_OF_RANKS))
    if tracked_here and "--no-mlflow" not in arguments:
        arguments.append("--no-mlflow")
    pods = Pods(
        name=options["job_name"] or f"zerokit-{datetime.now():%Y%m%d-%H%M%S}",
        image=options["container_image"],
        nodes=nodes,
        nproc_per_node=ranks,
        arguments=arguments,
        environment=environment,
        claim=options["pvc"],
        node_selector=dict(_pair("--node-selector", one) for one in options["node_selector"]),
        tolerations=options["toleration"],
        pull_secrets=options["pull_secret"],
        cpus=str(options["cpus_per_task"] * ranks) if options["cpus_per_task"] else None,
        shared_memory=options["shm_size"],
        resources=dict(_pair("--resource", one) for one in options["resource"]),
        capabilities=options["capability"],
        **{name: options[name] for name in _TO_PODS},
    )
    if pods.claim is None and any(cell.save is not None for cell in cells):
        raise click.UsageError(
            "checkpoints would be lost with their pod: give a persistent volume with --pvc CLAIM"
        )
    objects = render(pods, options["form"])
    if own := sorted({cell.model.partition(":")[0] for cell in cells if ":" in cell.model}):
        click.echo(
            f"zerokit: the image {printable(pods.image)} must have the module {printable(', '.join(own))} on its "
            "Python path: pods get no file of this machine",
            err=True,
        )
    if not options["submit"]:
        made_by = printable(shlex.join(["zerokit", "bench", *given_arguments(context)]))
        click.echo(f"# {made_by}\n{to_yaml(objects)}", nl=False)
        return 0
    path = record_path(request.output, cells[0], datetime.now())
    apply(objects)
    display = Display()
    display.warn(f"submitted as {options['form']} {pods.name} in namespace {pods.namespace}")
    with Interrupts() as interrupts, display:
        log = follow(pods, options["form"], interrupts, display.warn)
    record = Record.from_json(find_json(log))
    write_record(record, path)
    if tracked_here:
        tracker = Tracker(request.tracking, display.warn, f"zerokit push {shlex.quote(str(path))}")
        tracker.push(find_records([path]))
    _show(path, display, as_json=request.as_json, single=True, log=None)
    return exit_code([record])


_FOR_PODS = re.compile(r"(ZEROKIT|NCCL|GLOO|OMP)_\w+")
"""Variables that pods get from here; others name files of this machine, or are secrets."""


def _environment_of_pods(request: Request) -> tuple[dict[str, str], bool]:
    """Variables of the ranks, and whether the record goes to MLflow from here: pods can only reach a tracking server.

    Raises `click.UsageError` for a password or a token, which would appear in the manifest.
    """
    options, tracking = request.chosen.options, request.tracking
    environment = {
        name: value for name, value in os.environ.items() if _FOR_PODS.fullmatch(name) and name != SECRET
    }
    served = tracking is not None and re.match(r"https?://", tracking.uri) is not None
    if tracking is not None and served:
        environment["MLFLOW_TRACKING_URI"] = tracking.uri
    environment |= read_variables(options["variables"])
    for name, value in environment.items():
        if without_secrets_named(name, value) != value:
            raise click.UsageError(
                f"the password in {name} would appear in the manifest: put it in a Secret (for MLflow as "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD) and pass it with --env-from"
            )
    return environment, tracking is not None and not served


def _pair(option: str, text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise click.UsageError(f"{option} {text}: expected KEY=VALUE")
    return key, value


def _submit_to_slurm(context: click.Context, request: Request) -> int:
    from zerokit.bench.record.record import require_writable
    from zerokit.cli.display import Display
    from zerokit.launch.interrupts import Interrupts
    from zerokit.launch.slurm import JOB_FOLDER, Container, folder_of, follow, log_of, render_script
    from zerokit.launch.slurm import Request as Allocation
    from zerokit.launch.slurm import submit as sbatch

    options, cells = request.chosen.options, request.cells
    if request.continued is not None:
        raise click.UsageError(
            "--continue needs running nodes: use --launcher slurm inside an allocation (salloc)"
        )
    if options["follow"]:
        raise click.UsageError(
            "--follow works for ranks started from here; a job's output is in its log (tail -f)"
        )
    nodes, ranks = _one_shape(context, request)
    address = options["master_addr"]
    image = options["container_image"]
    allocation = Allocation(
        nodes=nodes,
        ranks=ranks,
        time=options["time_limit"],
        **{name: options[name] for name in _TO_SLURM},
        lines=options["sbatch_option"],
        container=Container(image, options["container_runtime"]) if image else None,
        variables=({"MASTER_ADDR": address} if address else {}) | read_variables(options["variables"]),
    )
    single = len(cells) == 1
    inside, name = request.output, "record.json" if single else "sweep"
    if inside is not None and single and inside.suffix != ".json":
        inside /= f"{datetime.now():%Y%m%d-%H%M%S-%f}.json"
    python = options["remote_python"] or sys.executable
    arguments = given_arguments(context, (*_OUTSIDE, *_OF_RANKS))
    command = [python, "-P", "-m", "zerokit", "bench", *arguments, "--launcher", "env"]
    given = allocation.variables.items()
    if any(without_secrets(word) != word for word in command) or any(
        without_secrets_named(name, value) != value for name, value in given
    ):
        raise click.UsageError(
            "a password would appear in the batch script: export the variable (such as MLFLOW_TRACKING_URI) "
            "instead of giving it as an option; sbatch passes it on"
        )
    command += ["--output", str(inside or f"{JOB_FOLDER}/{name}")]
    # A comment is one line, and the next one would be run.
    made_by = printable(shlex.join(["zerokit", "bench", *given_arguments(context, ("dry_run",))]))
    script = render_script(allocation, command, made_by)
    if options["dry_run"]:
        # Unchanged for a program, escaped for a terminal.
        click.echo(printable_lines(script) if sys.stdout.isatty() else script, nl=False)
        return 0
    scripts = folder_of("").parent
    require_writable(scripts)
    file = scripts / f"{datetime.now():%Y%m%d-%H%M%S-%f}.sbatch"
    file.write_text(script, encoding="utf-8")
    job = sbatch(file)
    display, log = Display(), log_of(job)
    display.warn(f"submitted as Slurm's job {job}; its log is {log}")
    target = inside or folder_of(job) / name
    with Interrupts() as interrupts, display:
        code = follow(job, target, interrupts, display.warn)
    _show(target, display, as_json=request.as_json, single=single, log=log)
    return code


def _one_shape(context: click.Context, request: Request) -> tuple[int, int]:
    """Nodes, and ranks of each, one a GPU unless the user says otherwise; a job has one number of both."""
    shapes = {(cell.nodes, cell.nproc_per_node) for cell in request.cells}
    if len(shapes) > 1:
        raise click.UsageError(
            "a job has a fixed number of nodes and ranks: submit one job for each, or run the sweep with "
            "--launcher slurm inside an allocation (salloc)"
        )
    nodes, ranks = shapes.pop()
    return nodes, ranks if is_given(context, "nproc_per_node") else request.chosen.options[
        "gpus_per_node"
    ] or ranks


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
