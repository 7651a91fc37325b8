"""`--launcher` and its options, and which launcher each is for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

LAUNCHERS = ("local", "ssh", "slurm", "kubernetes", "env")
RUNTIMES = ("pyxis", "apptainer")

_OPTIONS = (
    click.option(
        "--launcher",
        type=click.Choice(LAUNCHERS),
        help="Who starts the ranks: nodes simulated here, ssh, Slurm, Kubernetes, or env for those started already "
        "(torchrun, srun, mpirun, a TrainJob).  [default: env inside those, else local]",
    ),
    click.option("--hosts", metavar="HOST,…", help="For ssh: the nodes' hosts, the first is node 0."),
    click.option(
        "--hostfile",
        type=click.Path(path_type=Path, dir_okay=False),
        help="For ssh: a file of lines HOST slots=N, as DeepSpeed's.",
    ),
    click.option(
        "--ssh-option", multiple=True, metavar="WORDS", help="For ssh: options of ssh's own, like '-p 2222'."
    ),
    click.option(
        "--remote-python",
        metavar="PATH",
        help="The Python with zerokit on the nodes.  [default: the path of this one]",
    ),
    click.option(
        "--master-addr", metavar="ADDR", help="Where nodes reach node 0.  [default: the name of its host]"
    ),
    click.option(
        "--connect-timeout",
        type=click.FloatRange(min=1),
        default=30.0,
        show_default=True,
        metavar="S",
        help="How long a node may take to answer.",
    ),
    click.option(
        "--env",
        "variables",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="A variable for the ranks on other machines; NCCL_*, GLOO_*, OMP_* and ZEROKIT_* go there anyway, into "
        "pods also MLFLOW_TRACKING_URI, elsewhere also TORCH_*, HF_* and PYTHONPATH.",
    ),
    click.option("--follow", is_flag=True, help="Show what ranks print, while they run."),
    click.option("--partition", metavar="NAME", help="For Slurm."),
    click.option("--account", metavar="NAME", help="For Slurm."),
    click.option("--time", "time_limit", metavar="TIME", help="For Slurm: the job's limit, like 00:30:00."),
    click.option(
        "--gpus-per-node", type=click.IntRange(min=1), metavar="N", help="For Slurm and Kubernetes."
    ),
    click.option(
        "--cpus-per-task",
        type=click.IntRange(min=1),
        metavar="N",
        help="For Slurm: cores of each rank.  [default: whole nodes, their cores divided among their ranks]",
    ),
    click.option("--mem", "memory", metavar="SIZE", help="For Slurm: memory of each node, like 64G."),
    click.option(
        "--sbatch-option",
        multiple=True,
        metavar="LINE",
        help="For Slurm: a further #SBATCH line, like --qos=high.",
    ),
    click.option("--container-image", metavar="IMAGE", help="For Slurm and Kubernetes: what nodes run in."),
    click.option(
        "--container-runtime",
        type=click.Choice(RUNTIMES),
        default=RUNTIMES[0],
        show_default=True,
        help="For Slurm: who runs the image.",
    ),
    click.option("--namespace", metavar="NAME", default="default", show_default=True, help="For Kubernetes."),
    click.option("--job-name", metavar="NAME", help="For Kubernetes.  [default: zerokit- and the time]"),
    click.option(
        "--pvc", metavar="CLAIM", help="For Kubernetes: a volume for /runs, where --save keeps checkpoints."
    ),
    click.option(
        "--env-from",
        "secrets",
        multiple=True,
        metavar="SECRET",
        help="For Kubernetes: a Secret whose entries are variables of the ranks, such as MLFLOW_TRACKING_PASSWORD.",
    ),
    click.option(
        "--node-selector",
        multiple=True,
        metavar="KEY=VALUE",
        help="For Kubernetes: a label that nodes must have.",
    ),
    click.option(
        "--toleration",
        multiple=True,
        metavar="KEY[=VALUE]:EFFECT",
        help="For Kubernetes: a taint that nodes may have, like nvidia.com/gpu:NoSchedule.",
    ),
    click.option("--service-account", metavar="NAME", help="For Kubernetes."),
    click.option(
        "--pull-secret", multiple=True, metavar="NAME", help="For Kubernetes: a Secret for the image."
    ),
    click.option(
        "--form",
        type=click.Choice(("trainjob", "jobset")),
        default="trainjob",
        show_default=True,
        help="For Kubernetes: Kubeflow's TrainJob, or a JobSet by itself.",
    ),
    click.option(
        "--submit", is_flag=True, help="For Kubernetes: hand it to kubectl, wait, fetch the record."
    ),
    click.option("--dry-run", is_flag=True, help="For Slurm: print the batch script and do nothing."),
)
OPTIONS_OF: dict[str, tuple[str, ...]] = {
    "launcher": LAUNCHERS,
    "connect_timeout": ("ssh", "slurm"),
    "container_runtime": ("slurm",),
    "hosts": ("ssh",),
    "hostfile": ("ssh",),
    "ssh_option": ("ssh",),
    "remote_python": ("ssh", "slurm"),
    "master_addr": ("ssh", "slurm"),
    "variables": ("ssh", "slurm", "kubernetes"),
    "follow": ("local", "ssh", "slurm"),
    "partition": ("slurm",),
    "account": ("slurm",),
    "time_limit": ("slurm",),
    "gpus_per_node": ("slurm", "kubernetes"),
    "cpus_per_task": ("slurm",),
    "memory": ("slurm",),
    "sbatch_option": ("slurm",),
    "container_image": ("slurm", "kubernetes"),
    "namespace": ("kubernetes",),
    "job_name": ("kubernetes",),
    "pvc": ("kubernetes",),
    "secrets": ("kubernetes",),
    "node_selector": ("kubernetes",),
    "toleration": ("kubernetes",),
    "service_account": ("kubernetes",),
    "pull_secret": ("kubernetes",),
    "form": ("kubernetes",),
    "submit": ("kubernetes",),
    "dry_run": ("slurm",),
}
"""Every option, and the launchers that it is for."""
UNSET = {
    "connect_timeout": 30.0,
    "container_runtime": RUNTIMES[0],
    "namespace": "default",
    "form": "trainjob",
}
SPELLED = {"variables": "env", "time_limit": "time", "memory": "mem", "secrets": "env-from"}


def launcher_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command `--launcher` and what belongs to it."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def take_options(options: dict[str, Any]) -> dict[str, Any]:
    """Move the options of `launcher_options` out of a command's."""
    return {name: options.pop(name) for name in OPTIONS_OF}
