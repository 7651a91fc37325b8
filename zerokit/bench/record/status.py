"""How a bench's ranks tell whoever launched them why they could not go on. Standard library only.

A rank that runs out of memory writes a small file beside its job before it fails: the launcher then knows a result
from a fault. A rank that the kernel kills cannot; `oom_kills`, read before and after, says whether the kernel killed
anything for want of memory meanwhile.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from zerokit import files

OUT_OF_MEMORY = "out of memory"
UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class Status:
    """What a rank said: a status of `zerokit.bench.record.STATUSES`, and the reason in words."""

    status: str
    reason: str


def status_path(job: Path) -> Path:
    """Where the ranks of a job write."""
    return job.with_name(f"{job.name}.status")


def write_status(job: Path, status: Status) -> None:
    """Write it whole; of several ranks' the last stays."""
    text = json.dumps({"status": status.status, "reason": status.reason})
    files.write_aside(status_path(job), text.encode(), durable=False)


def read_status(job: Path) -> Status | None:
    """What a rank of the job said, if any did."""
    try:
        content = json.loads(status_path(job).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return Status(content["status"], content["reason"])


def oom_kills() -> int | None:
    """How many processes the kernel has killed for want of memory since it started; None where it does not tell.

    It counts the whole machine: a rank that was killed by SIGKILL while the number rose was probably one of them.
    """
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except OSError:
        pass
    return None
