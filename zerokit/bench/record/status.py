"""How a bench goes on, told through files: ranks write them, and the process that launched them reads them.

A file, because torchrun closes every pipe that its ranks might inherit. Progress has a line a step, written between the
timed steps, never inside one; where the host runs ahead of a device, at most two a second.

A rank that runs out of memory writes its outcome beside its job before it fails: the launcher then knows a result from
a fault. A rank that the kernel kills cannot; `oom_kills`, read before and after, says whether the kernel killed
anything for want of memory meanwhile. Standard library only.
"""

from __future__ import annotations

import json
import os
from dataclasses import astuple, dataclass
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from zerokit import files


class Status(StrEnum):
    """The status of a bench; in records and MLflow's tags as text."""

    OK = "ok"
    OUT_OF_MEMORY = "out of memory"
    UNSUPPORTED = "unsupported"
    FAILED = "failed"
    KILLED = "killed"

    @property
    def final(self) -> bool:
        """Whether a repetition would end the same: the bench succeeded, or this machine or engine cannot run it."""
        return self not in (Status.FAILED, Status.KILLED)


class Outcome(NamedTuple):
    """A status with its reason."""

    status: Status
    reason: str


def status_path(job: Path) -> Path:
    """The file in which the ranks of a job report."""
    return job.with_name(f"{job.name}.status")


def write_outcome(job: Path, outcome: Outcome) -> None:
    """Write the report; if several ranks report, the last one stays."""
    files.write_aside(status_path(job), json.dumps(outcome._asdict()).encode(), durable=False)


def read_outcome(job: Path) -> Outcome | None:
    """The report of a rank of the job, if there is one."""
    try:
        content = json.loads(status_path(job).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Outcome(Status(content["status"]), content["reason"])


def oom_kills() -> int | None:
    """The number of processes that the kernel has killed when out of memory; None if unknown.

    It counts the whole machine: a rank that was killed by SIGKILL while the number rose was probably one of them.
    """
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return None


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress after `done` of `total` steps, warm-up included; the last step's loss and ms are None if unknown."""

    done: int
    total: int
    warmup: int
    loss: float | None
    step_ms: float | None


def write_progress(path: Path | None, progress: Progress) -> None:
    """Append one line, if there is a path."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(astuple(progress)) + "\n")


def read_progress(path: Path) -> Progress | None:
    """The newest whole line, if any."""
    try:
        with path.open(
            "rb"
        ) as file:  # its end: a long bench has megabytes, and this is asked many times a second
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1000))
            whole, newline, _ = file.read().rpartition(b"\n")
    except FileNotFoundError:
        return None
    return Progress(*json.loads(whole.splitlines()[-1])) if newline else None
