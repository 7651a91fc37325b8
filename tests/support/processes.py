"""Processes as /proc shows them."""

from __future__ import annotations

import contextlib
from pathlib import Path


def _fields(pid: int) -> list[str]:
    """The fields of its `stat` from the state on; raises `OSError` once it is gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody has reaped does not."""
    try:
        return _fields(pid)[0] != "Z"
    except OSError:
        return False


def parent_of(pid: int) -> int:
    """Its parent's process id."""
    return int(_fields(pid)[1])


def children_of(parent: int) -> list[int]:
    """The process ids of a process's children, the oldest first."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = _fields(int(path.name))
            if int(fields[1]) == parent:
                pids.append((int(fields[19]), int(path.name)))
    return [pid for _, pid in sorted(pids)]


def words_of(pid: int) -> list[str]:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []
