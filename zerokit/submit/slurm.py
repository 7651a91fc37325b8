"""Jobs of Slurm: a batch script whose `srun` starts all ranks, submitted by sbatch and followed by scontrol.

A bench's ranks are tasks of srun, which join each other. A program of the user's has one torchrun a node.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from zerokit.cluster.slurm import Container
from zerokit.errors import UsageError
from zerokit.interrupts import Interrupted, Interrupts
from zerokit.launch.failures import LaunchError, tail
from zerokit.patience import Patience
from zerokit.submit import jobs
from zerokit.submit.jobs import Job, NoAnswer, State, ask, await_end

# After a job has left the queue its files may take a moment to be seen here (NFS).
_FILES_SECONDS = 60.0
_WARNING_SECONDS = 60
_CANCEL_SECONDS = 10.0
_CORES, _HERE, JOB_FOLDER, _FIRST, _JOB = "\0cores", "\0here", "\0folder", "\0first", "\0job"
"""In a script's command they stand for a task's cores, the folder of submission, that of the job's results, the place
where torchruns meet, and the job's number."""
_SHOWN = {_CORES: '"$cores"', _HERE: '"$PWD"', JOB_FOLDER: '"$folder"', _FIRST: '"$first:$port"'}
_SHOWN |= {_JOB: '"$SLURM_JOB_ID"'}


def folder_of(job: str) -> Path:
    """The folder of a job's results, below the one from which it was submitted."""
    return Path(f"bench-runs/slurm-{job}")


def log_of(job: str) -> Path:
    """The file of a job's output."""
    return Path(f"zerokit-{job}.log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Job):
    """A request to Slurm. Without `cpus_per_task` it takes whole nodes, and shares their cores equally.

    Attributes:
        memory: as `sbatch --mem` takes it; None takes all of whole nodes, else the partition's default.
        partition, account, time: as `sbatch` takes them.
        lines: more lines for the script's head, each without `#SBATCH`.
        container: nodes run in it, if one is given.
        name: of the job.
    """

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    lines: tuple[str, ...] = ()
    container: Container | None = None
    name: str = "zerokit-bench"

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


def render_script(request: Request, command: Sequence[str], made_by: str = "") -> str:
    """The batch script that starts `command` on every rank.

    Args:
        request: the request to Slurm.
        command: a bench with `--launcher env`; `JOB_FOLDER` in it stands for the job's folder of results.
        made_by: what printed the script, for its head.

    Raises `UsageError` if the command or a variable has a password.
    """
    lines = [
        "# Shortly before the time limit Slurm tells the ranks to end: zerokit then ends its MLflow run, too.",
        f'folder="{folder_of("$SLURM_JOB_ID")}"',
        'mkdir -p "$folder"',
        "trap : TERM # srun ends first",
    ]
    # Ranks end each other, and the first one then writes the record: Slurm must not kill it when another one has ended.
    options = ["--kill-on-bad-exit=0", "--wait=0"]
    return _render(request, [f"--signal=TERM@{_WARNING_SECONDS}"], lines, options, command, made_by)


def render_program(request: Request, python: str, program: Sequence[str], made_by: str = "") -> str:
    """The batch script that starts one torchrun a node, by this `python`, and so a program; see `render_script`.

    `program` is what torchrun takes: a script or `-m` and a module, and arguments.
    """
    each, cores = request.ranks, request.cpus_per_task and request.cpus_per_task * request.ranks
    lines = [
        "# torchruns meet on the first node, at a port of this job.",
        'first=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}',
        "port=$((20000 + SLURM_JOB_ID % 10000))",
        f"export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$((cores > {each} ? cores / {each} : 1))}}",
    ]
    torchrun = [python, "-P", "-m", "torch.distributed.run", "--nnodes", str(request.nodes)]
    torchrun += ["--nproc-per-node", str(each), "--rdzv-backend", "c10d", "--rdzv-endpoint", _FIRST]
    torchrun += ["--rdzv-id", _JOB, *program]
    tasks = replace(request, ranks=1, cpus_per_task=cores)
    script = _render(tasks, [], lines, ["--kill-on-bad-exit=1"], torchrun, made_by)
    # srun's own is that of a torchrun that it has ended, 137 or 143, as if it were the job's time limit.
    return f"{script.rstrip()} || exit 1\n"


def _render(
    request: Request,
    asked: Sequence[str],
    lines: Sequence[str],
    options: Sequence[str],
    command: Sequence[str],
    made_by: str,
) -> str:
    """The script: what else is `asked` of sbatch, `lines` after a task's cores are known, and `options` of srun."""
    request.refuse_secrets(
        command,
        "batch script",
        "export the variable (such as MLFLOW_TRACKING_URI) instead of giving it as an option; sbatch passes it on",
    )
    whole = request.cpus_per_task is None
    head = [
        f"--job-name={request.name}",
        f"--nodes={request.nodes}",
        f"--ntasks-per-node={request.ranks}",
        "--exclusive" if whole else f"--cpus-per-task={request.cpus_per_task}",
        *([f"--mem={request.memory or 0}"] if request.memory or whole else []),
        *([f"--gpus-per-node={request.gpus_per_node}"] if request.gpus_per_node else []),
        *(
            f"--{name}={value}"
            for name in ("partition", "account", "time")
            if (value := getattr(request, name))
        ),
        *asked,
        f"--output={log_of('%j')}",
        *request.lines,
    ]
    srun = ["srun", f"--cpus-per-task={_CORES}", *options]
    srun += list(command) if request.container is None else request.container.wrap(list(command), _HERE)
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {line}" for line in head),
            *([f"# {made_by}"] if made_by else []),
            *(f"export {name}={shlex.quote(value)}" for name, value in sorted(request.variables.items())),
            "# By default srun gives each task one core. Here the ranks of a node share all of its cores.",
            "cores=${SLURM_CPUS_PER_TASK:-$((SLURM_CPUS_ON_NODE / SLURM_NTASKS_PER_NODE))}",
            'if [ "$cores" -lt 1 ]; then cores=1; fi',
            *lines,
            " ".join(map(_quote, srun)),
            "",
        ]
    )


def _quote(word: str) -> str:
    """For a shell, which puts in what stands for something, and nothing else."""
    parts = re.split(f"({'|'.join(_SHOWN)})", word)
    return "".join(_SHOWN.get(part) or (shlex.quote(part) if part else "") for part in parts) or "''"


def submit(script: str) -> str:
    """Submit a script with sbatch; returns the job's number. Raises `LaunchError` with sbatch's message."""
    if not os.access(".", os.W_OK):
        raise LaunchError(f"the job could not write to {Path.cwd()}: submit it from a folder of yours")
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=script, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise LaunchError(
            f"sbatch cannot be run ({error.strerror}): is this a login node of a Slurm cluster?"
        ) from error
    if done.returncode != 0:
        raise LaunchError(f"sbatch refused the job: {done.stderr.strip()}; --dry-run prints its script")
    return done.stdout.strip().partition(";")[0]


def follow(job: str, results: Path | None, interrupts: Interrupts, show: Callable[[str], None]) -> int:
    """Wait until a job submitted from this folder ends; returns its exit code.

    `results` is what it writes, if anything; `show` is called with its state when that changes.

    Raises:
        LaunchError: the job ended without its results; the message has Slurm's reason.
        Interrupted: SIGINT or SIGTERM came; the job was cancelled.
    """
    otherwise = f"watch it with squeue --jobs={job} and end it with scancel {job}"
    try:
        told = await_end(
            lambda: ask(partial(_state, job), interrupts, otherwise), interrupts, f"job {job}: ", show
        ).facts
    except Interrupted:
        subprocess.run(["scancel", job], check=False)
        patience = Patience(_CANCEL_SECONDS)
        with contextlib.suppress(LaunchError):
            while not patience.over and not _state(job).ended:
                time.sleep(jobs.FOLLOW_SECONDS)
        raise
    final = ", ".join(f"{name} {value}" for name, value in told.items())
    by_itself = told["JobState"] in ("COMPLETED", "FAILED")
    if results is not None and not _await_file(results, _FILES_SECONDS if by_itself else 2.0, interrupts):
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


def _state(job: str) -> State:
    """What Slurm tells of a job."""
    done = subprocess.run(
        ["scontrol", "show", "job", "--oneliner", job], capture_output=True, text=True, check=False
    )
    told = dict(re.findall(r"\b(JobState|Reason|ExitCode)=(\S+)", done.stdout))
    if told:
        pending = told["JobState"] == "PENDING" and told["Reason"] != "None"
        text = told["JobState"].lower() + (f" ({told['Reason']})" if pending else "")
        return State(text, told["JobState"] in _ENDED, told)
    if "Invalid job id" in done.stderr:
        raise LaunchError(f"Slurm does not know job {job} any more: see {log_of(job)}")
    raise NoAnswer(f"scontrol show job {job}: {done.stderr.strip()}")
