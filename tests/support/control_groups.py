"""Memory control groups of the machine that runs the tests, where it allows to make them: version 1 or 2."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

_LIMITS = ("memory.limit_in_bytes", "memory.max")


def _home() -> Path | None:
    """The folder of a hierarchy with limits of memory for groups in it."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        place, _, system = line.partition(" - ")
        top = Path(place.split()[4])
        if system.startswith("cgroup ") and "memory" in re.split("[ ,]", system):
            return top
        if system.startswith("cgroup2 "):
            with contextlib.suppress(OSError):
                if "memory" in (top / "cgroup.subtree_control").read_text().split():
                    return top
    return None


@contextlib.contextmanager
def memory_group(limit: int, within: Path | None = None) -> Iterator[Path | None]:
    """The folder of a new group of this limit in bytes, without swap; None where that is not allowed.

    It is gone afterwards, with its processes.
    A process enters by its number in `cgroup.procs`.
    """
    home = within or _home()
    if home is None:
        yield None
        return
    group = home / f"zerokit-{uuid.uuid4().hex[:12]}"
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        limits = [group / name for name in _LIMITS if (group / name).exists()]
        try:
            limits[0].write_text(str(limit))
            for name, swap in (("memory.memsw.limit_in_bytes", limit), ("memory.swap.max", 0)):
                if (group / name).exists():
                    (group / name).write_text(str(swap))
        except (OSError, IndexError):
            yield None
        else:
            yield group
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    while True:
        try:
            return group.rmdir()
        except OSError:  # what was killed has not left yet
            time.sleep(0.05)
