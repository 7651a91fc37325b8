"""Nodes under Slurm: one `srun` per node inside an allocation; outside, a batch script that starts all ranks.

Inside, node 0 is the first of Slurm's own list of nodes. Where there is no such list, nothing is guessed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zerokit.errors import UsageError
from zerokit.launch.failures import LaunchError, tail
from zerokit.launch.hosts import expand_hostlist
from zerokit.launch.interrupts import Interrupted, Interrupts
from zerokit.launch.network import address_towards
from zerokit.launch.remote import RemoteHost, node_command
from zerokit.launch.trust import SECRET
from zerokit.patience import Patience

_FOLLOW_SECONDS = 2.0
# A busy controller leaves some questions unanswered ("Socket timed out").
_QUEUE_SECONDS = 120.0
# After a job has left the queue its files may take a moment to be seen here (NFS).
_FILES_SECONDS = 60.0
_WARNING_SECONDS = 60
_CANCEL_SECONDS = 10.0
_CORES, _HERE, JOB_FOLDER = "\0cores", "\0here", "\0folder"
"""In a script's command they stand for a rank's cores, the folder of submission, and that of the job's results."""


def folder_of(job: str) -> Path:
    """The folder of a job's results, below the one from which it was submitted."""
    return Path(f"bench-runs/slurm-{job}")


def log_of(job: str) -> Path:
    """The file of a job's output."""
    return Path(f"zerokit-{job}.log")


@dataclass(frozen=True, slots=True)
class Container:
    """A container image for the nodes.

    Attributes:
        image: for Pyxis a reference or a squashfs file, for Apptainer a SIF file or `docker://…`.
        runtime: "pyxis" or "apptainer".
    """

    image: str
    runtime: str

    def srun_options(self, here: str) -> list[str]:
        """Options of srun for Pyxis (https://github.com/NVIDIA/pyxis), which mounts `here` under its own path."""
        if self.runtime != "pyxis":
            return []
        return [
            f"--container-image={self.image}",
            f"--container-mounts={here}:{here}",
            f"--container-workdir={here}",
        ]

    def wrap(self, command: list[str], here: str) -> list[str]:
        """For Apptainer: the command inside the image, with the node's GPUs."""
        if self.runtime != "apptainer":
            return command
        return ["apptainer", "exec", "--nv", "--bind", here, "--pwd", here, self.image, *command]


@dataclass(frozen=True, slots=True)
class Request:
    """A request to Slurm.

    Attributes:
        nodes, ranks: how many, and ranks of each node.
        gpus_per_node: GPUs of each; None asks for none.
        cpus_per_task: cores of each rank; None takes whole nodes and shares their cores equally.
        memory: of each node, as `sbatch --mem` takes it; None takes all of whole nodes, else the partition's default.
        partition, account, time: as `sbatch` takes them.
        lines: more lines for the script's head, each without `#SBATCH`.
        container: nodes run in it, if one is given.
        variables: for the ranks, beside those of the place of submission.
    """

    nodes: int
    ranks: int = 1
    gpus_per_node: int | None = None
    cpus_per_task: int | None = None
    memory: str | None = None
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    lines: tuple[str, ...] = ()
    container: Container | None = None
    variables: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("memory", "partition", "account", "time"):
            value = getattr(self, name)
            if value is not None and not re.fullmatch(r"[\w.,:+@-]+", value):
                raise UsageError(f"{name} {value!r} cannot be written in a line of a batch script")
        for line in self.lines:
            if "\n" in line or not line.startswith("-"):
                raise UsageError(
                    f"{line!r} is not an option of sbatch: write it as after #SBATCH, like '--qos=high'"
                )


def allocated_hosts(environment: Mapping[str, str]) -> list[str]:
    """The allocation's nodes in Slurm's order; raises `UsageError` if there are none."""
    text = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not text:
        raise UsageError(
            "this is a Slurm allocation (SLURM_JOB_ID is set) without a list of nodes: SLURM_JOB_NODELIST is not set"
        )
    return expand_hostlist(text)


def node_address(host: str) -> str:
    """A node's address: its name if that resolves here, otherwise the address that Slurm has.

    Raises `UsageError` where neither is known.
    """
    try:
        socket.getaddrinfo(host, None)
        return host
    except OSError:
        pass
    with contextlib.suppress(OSError):
        done = subprocess.run(
            ["scontrol", "show", "node", "--oneliner", host], capture_output=True, text=True, check=False
        )
        match = re.search(r"\bNodeAddr=(\S+)", done.stdout)
        if match is not None and match[1] != host:
            return match[1]
    raise UsageError(
        f"Slurm's node {host} does not resolve on this machine, and scontrol has no address for it: add it to DNS or "
        "/etc/hosts, or set MASTER_ADDR"
    )


_OF_THE_JOB = (
    *("SLURM_GPUS", "SLURM_GPUS_PER_TASK", "SLURM_NTASKS_PER_GPU"),
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK"),
)
"""What the job was asked for all tasks or for each, and srun would ask for the one of a node, which has all ranks."""


def _gpus_of_a_node() -> int:
    """Where the job has so many GPUs in all or for a task, of which srun would ask for too many or too few."""

    def number(name: str) -> int:  # "8", "a100:8", "a100:4,h100:4"
        return sum(map(int, re.findall(r"(?:^|[:,])([0-9]{1,9})(?=,|$)", os.environ.get(name, ""))))

    gpus = number("SLURM_GPUS") or number("SLURM_GPUS_PER_TASK") * number("SLURM_NTASKS")
    return gpus // max(1, number("SLURM_JOB_NUM_NODES"))


def srun_host(host: str, python: str, container: Container | None = None) -> RemoteHost:
    """Start a node of the allocation with a job step on it alone."""
    here = str(Path.cwd())
    options = [
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={host}",
        "--overlap",
        "--unbuffered",
        "--kill-on-bad-exit=1",
        "--cpu-bind=none",  # one task has one core to itself otherwise: its ranks share the job's cores of the node
    ]
    if gpus := _gpus_of_a_node():
        options.append(f"--gpus={gpus}")
    if "SLURM_GPU_BIND" in os.environ:  # which would hide all but the first one's from the node's ranks
        options.append("--gpu-bind=none")
    if container is not None:
        options += container.srun_options(here)

    def command(port: int, name: str) -> Sequence[str]:
        address = address_towards(node_address(host))
        words = ["sh", "-c", node_command(python, address, port, name)]
        return ["srun", *options, *(words if container is None else container.wrap(words, here))]

    return RemoteHost(host, command, _OF_THE_JOB, forwards=False)


def render_script(request: Request, command: Sequence[str], made_by: str = "") -> str:
    """The batch script that starts `command` on every rank.

    Args:
        request: the request to Slurm.
        command: a bench with `--launcher env`; `JOB_FOLDER` in it stands for the job's folder of results.
        made_by: what printed the script, for its head.
    """
    head = [
        "--job-name=zerokit-bench",
        f"--nodes={request.nodes}",
        f"--ntasks-per-node={request.ranks}",
        *(["--exclusive"] if request.cpus_per_task is None else [f"--cpus-per-task={request.cpus_per_task}"]),
        *([f"--mem={request.memory or 0}"] if request.memory or request.cpus_per_task is None else []),
        *([f"--gpus-per-node={request.gpus_per_node}"] if request.gpus_per_node else []),
        *(
            f"--{name}={value}"
            for name in ("partition", "account", "time")
            if (value := getattr(request, name))
        ),
        f"--signal=TERM@{_WARNING_SECONDS}",
        f"--output={log_of('%j')}",
        *request.lines,
    ]
    container = request.container
    options = [] if container is None else container.srun_options(_HERE)
    inside = list(command) if container is None else container.wrap(list(command), _HERE)
    # Ranks end each other, and the first one then writes the record: Slurm must not kill it when another one has ended.
    srun = ["srun", f"--cpus-per-task={_CORES}", "--kill-on-bad-exit=0", "--wait=0", *options, *inside]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in head),
            *([f"# {made_by}"] if made_by else []),
            "# Shortly before the time limit Slurm tells the ranks to end: zerokit then ends its MLflow run, too.",
            "# By which ranks on several nodes know each other (SECURITY.md); srun hands it on.",
            f"{SECRET}=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')",
            f"export {SECRET}",
            *(f"export {name}={shlex.quote(value)}" for name, value in sorted(request.variables.items())),
            f'folder="{folder_of("$SLURM_JOB_ID")}"',
            'mkdir -p "$folder"',
            "trap : TERM # srun ends first",
            "# By default srun gives each task one core. Here the ranks of a node share all of its cores.",
            "cores=${SLURM_CPUS_PER_TASK:-$((SLURM_CPUS_ON_NODE / SLURM_NTASKS_PER_NODE))}",
            'if [ "$cores" -lt 1 ]; then cores=1; fi',
            " ".join(map(_quote, srun)),
            "",
        ]
    )


def _quote(word: str) -> str:
    """For a shell, which puts in what stands for something, and nothing else."""
    shown = {_CORES: '"$cores"', _HERE: '"$PWD"', JOB_FOLDER: '"$folder"'}
    parts = re.split(f"({'|'.join(shown)})", word)
    return "".join(shown.get(part) or (shlex.quote(part) if part else "") for part in parts) or "''"


def submit(script: Path) -> str:
    """Submit a script with sbatch; returns the job's number. Raises `LaunchError` with sbatch's message."""
    try:
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise LaunchError(
            f"sbatch cannot be run ({error.strerror}): is this a login node of a Slurm cluster?"
        ) from error
    if done.returncode != 0:
        raise LaunchError(f"sbatch refused the job: {done.stderr.strip()}; the script is {script}")
    return done.stdout.strip().partition(";")[0]


def follow(job: str, results: Path, interrupts: Interrupts, show: Callable[[str], None]) -> int:
    """Wait until a job submitted from this folder ends; returns its exit code.

    `results` is what it writes; `show` is called with its state when that changes.

    Raises:
        LaunchError: the job ended without results; the message has Slurm's reason.
        Interrupted: SIGINT or SIGTERM came; the job was cancelled.
    """
    shown = ""
    try:
        while (told := _ask(job, interrupts))["JobState"] not in _ENDED:
            pending = told["JobState"] == "PENDING" and told["Reason"] != "None"
            state = told["JobState"].lower() + (f" ({told['Reason']})" if pending else "")
            if state != shown:
                show(f"job {job}: {state}")
                shown = state
            interrupts.wait(_FOLLOW_SECONDS)
    except Interrupted:
        subprocess.run(["scancel", job], check=False)
        with contextlib.suppress(Interrupted, LaunchError):
            patience = Patience(_CANCEL_SECONDS)
            while _ask(job, Interrupts())["JobState"] not in _ENDED and not patience.over:
                time.sleep(_FOLLOW_SECONDS)
        raise
    final = ", ".join(f"{name} {told[name]}" for name in ("JobState", "Reason", "ExitCode") if name in told)
    by_itself = told["JobState"] in ("COMPLETED", "FAILED")
    if not _await_file(results, _FILES_SECONDS if by_itself else 2.0, interrupts):
        lines = [f"Slurm's job {job} ended before the bench did: {final}", tail(log_of(job))]
        raise LaunchError("\n".join(filter(None, lines)))
    exited, _, number = told["ExitCode"].partition(":")
    code = int(exited) or (128 + int(number) if int(number) else int(told["JobState"] != "COMPLETED"))
    if code >= 128 or not by_itself:
        show(f"job {job} was ended, perhaps at its time limit (--time): {final}")
    return code


_ENDED = (
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"),
    "PREEMPTED",
)


def _await_file(path: Path, seconds: float, interrupts: Interrupts) -> bool:
    patience = Patience(seconds)
    while not path.exists():
        if patience.over:
            return False
        interrupts.wait(0.2)
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes an NFS client look again
    return True


def _ask(job: str, interrupts: Interrupts) -> dict[str, str]:
    """What Slurm tells of a job; raises `LaunchError` when it does not for so long that it is not merely busy."""
    patience = Patience(_QUEUE_SECONDS)
    while True:
        done = subprocess.run(
            ["scontrol", "show", "job", "--oneliner", job], capture_output=True, text=True, check=False
        )
        if told := dict(re.findall(r"\b(JobState|Reason|ExitCode)=(\S+)", done.stdout)):
            return told
        if "Invalid job id" in done.stderr:
            raise LaunchError(f"Slurm does not know job {job} any more: see {log_of(job)}")
        if patience.over:
            raise LaunchError(
                f"scontrol has not answered for {_QUEUE_SECONDS:g} s: {done.stderr.strip()}; Slurm's job {job} "
                f"continues: watch it with squeue --jobs={job} and end it with scancel {job}"
            )
        interrupts.wait(_FOLLOW_SECONDS)
