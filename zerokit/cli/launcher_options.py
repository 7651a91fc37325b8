"""`--launcher` and its options, each with the launchers that use it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from zerokit.cli.work import Finite, options

LAUNCHERS = ("local", "ssh", "slurm", "kubernetes", "env")
RUNTIMES = ("pyxis", "apptainer")
_TITLES = {"ssh": "ssh", "slurm": "Slurm", "kubernetes": "Kubernetes"}
_OPTIONS: list[Callable[..., Any]] = []
OPTIONS_OF: dict[str, tuple[str, ...]] = {}
"""Every option by its parameter's name, and the launchers that it is for."""


def _option(launchers: tuple[str, ...], *names: str, help: str = "", **more: Any) -> None:
    """An option for these launchers, which its help begins with."""
    OPTIONS_OF[names[-1].removeprefix("--").replace("-", "_")] = launchers
    more.setdefault("show_default", "default" in more)
    if all(one in _TITLES for one in launchers):
        *others, last = (_TITLES[one] for one in launchers)
        whose = "For " + (f"{', '.join(others)} and {last}" if others else last)
        help = f"{whose}: {help}" if help else f"{whose}."
    _OPTIONS.append(click.option(*names, help=help, **more))


_REMOTE, _SSH, _SLURM, _KUBERNETES = ("ssh", "slurm"), ("ssh",), ("slurm",), ("kubernetes",)
_option(
    LAUNCHERS,
    "--launcher",
    type=click.Choice(LAUNCHERS),
    help="What starts the ranks: local simulates nodes on this machine; env joins ranks that torchrun, srun "
    "or mpirun has started.  [default: env if started by one of these, else local]",
)
_option(_SSH, "--hosts", metavar="HOST,…", help="the hosts of the nodes; the first is node 0.")
_option(
    _SSH,
    "--hostfile",
    type=click.Path(path_type=Path, dir_okay=False),
    help="a file with lines HOST slots=N, as for DeepSpeed.",
)
_option(_SSH, "--ssh-option", multiple=True, metavar="WORDS", help="options for ssh, such as '-p 2222'.")
_option(
    _REMOTE,
    "--remote-python",
    metavar="PATH",
    help="the Python on the nodes that has zerokit.  [default: the path of this one]",
)
_option(
    _REMOTE,
    "--master-addr",
    metavar="ADDR",
    help="the address at which nodes reach node 0.  [default: the name of its host]",
)
_option(
    _REMOTE,
    "--connect-timeout",
    type=Finite(min=1, max=1e6),
    default=60.0,
    metavar="S",
    help="seconds within which a node must answer.",
)
_option(
    (*_REMOTE, *_KUBERNETES),
    "--env",
    "variables",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="an environment variable for ranks on other machines. NCCL_*, GLOO_*, OMP_* and ZEROKIT_* are always "
    "passed on, to pods also MLFLOW_TRACKING_URI, elsewhere also TORCH_*, HF_* and PYTHONPATH.",
)
_option(("local", *_REMOTE), "--follow", is_flag=True, help="Show the ranks' output while they run.")
_option(_SLURM, "--partition", metavar="NAME")
_option(_SLURM, "--account", metavar="NAME")
_option(_SLURM, "--time", "time_limit", metavar="TIME", help="the job's time limit, such as 00:30:00.")
_option((*_SLURM, *_KUBERNETES), "--gpus-per-node", type=click.IntRange(min=1), metavar="N")
_option(
    (*_SLURM, *_KUBERNETES),
    "--cpus-per-task",
    type=click.IntRange(min=1),
    metavar="N",
    help="cores for each rank.  [default: Slurm's whole nodes, with their cores divided among their ranks]",
)
_option(
    (*_SLURM, *_KUBERNETES),
    "--mem",
    "memory",
    metavar="SIZE",
    help="memory on each node, such as 64G, or 64Gi on Kubernetes.",
)
_option(
    _SLURM, "--sbatch-option", multiple=True, metavar="LINE", help="another #SBATCH line, such as --qos=high."
)
_option((*_SLURM, *_KUBERNETES), "--container-image", metavar="IMAGE", help="the image in which nodes run.")
_option(
    _SLURM,
    "--container-runtime",
    type=click.Choice(RUNTIMES),
    default=RUNTIMES[0],
    help="the program that runs the image.",
)
_option(_KUBERNETES, "--namespace", metavar="NAME", default="default")
_option(_KUBERNETES, "--job-name", metavar="NAME", help="the job's name.  [default: zerokit- and the time]")
_option(
    _KUBERNETES, "--pvc", metavar="CLAIM", help="a volume claim for /runs, where ranks write checkpoints."
)
_option(
    _KUBERNETES,
    "--env-from",
    "secrets",
    multiple=True,
    metavar="SECRET",
    help="a Secret whose entries become environment variables of the ranks, such as MLFLOW_TRACKING_PASSWORD.",
)
_option(
    _KUBERNETES,
    "--node-selector",
    multiple=True,
    metavar="KEY=VALUE",
    help="a label that nodes must have, such as pool=gpu.",
)
_option(
    _KUBERNETES,
    "--toleration",
    multiple=True,
    metavar="KEY[=VALUE]:EFFECT",
    help="a taint that pods tolerate, such as nvidia.com/gpu:NoSchedule.",
)
_option(
    _KUBERNETES,
    "--shm-size",
    metavar="SIZE",
    help="the most that ranks of a pod may put into /dev/shm, such as 16Gi.  [default: half of the node's memory]",
)
_option(
    _KUBERNETES,
    "--resource",
    multiple=True,
    metavar="NAME=N",
    help="a further resource of each pod, such as rdma/hca_shared_devices_a=1.",
)
_option(
    _KUBERNETES,
    "--capability",
    multiple=True,
    metavar="NAME",
    help='a capability of the containers, such as IPC_LOCK for RDMA; the standard "restricted" allows none.',
)
_option(_KUBERNETES, "--queue", metavar="NAME", help="Kueue's local queue.")
_option(_KUBERNETES, "--priority-class", metavar="NAME", help="the priority class of the pods.")
_option(_KUBERNETES, "--service-account", metavar="NAME")
_option(_KUBERNETES, "--pull-secret", multiple=True, metavar="NAME", help="the pull Secret for the image.")
_option(
    _KUBERNETES,
    "--form",
    type=click.Choice(("trainjob", "jobset")),
    default="trainjob",
    help="the kind of job: Kubeflow's TrainJob, or a plain JobSet.",
)
_option(
    _KUBERNETES,
    "--submit",
    is_flag=True,
    help="submit the job with kubectl, wait for it, and fetch the record or the log.",
)
_option(_SLURM, "--dry-run", is_flag=True, help="print the batch script without submitting it.")


launcher_options: Callable[[Callable[..., Any]], Callable[..., Any]] = options(*_OPTIONS)
"""Adds `--launcher` and its options to a command."""


def take_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of `launcher_options` out of a command's."""
    return {name: options.pop(name) for name in OPTIONS_OF}
