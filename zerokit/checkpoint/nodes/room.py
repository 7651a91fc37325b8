"""Room for a step in a node's own directory, asked for before anything is written: on its disk, or in its memory."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from zerokit.available import available_bytes
from zerokit.checkpoint.disk import explained
from zerokit.errors import CheckpointError

_IN_MEMORY = ("tmpfs", "ramfs")


def require_room(run: Path, needed: int) -> None:
    """Raise `CheckpointError` unless `needed` bytes fit beside what there is: in memory, where that holds the files.

    A file system in memory takes what it is given until processes are killed.
    """
    with explained(run, "looked at"):
        state = os.statvfs(run)
    free, where = state.f_bavail * state.f_frsize, "on its file system"
    if in_memory(run) and (memory := available_bytes()) < free:
        free, where = memory, "of memory for processes and files"
    if needed > free:
        raise CheckpointError(
            f"{run}: a step takes {needed} bytes on this node, and {free} are free {where}: keep fewer copies, or save "
            "into a directory on a disk of the node"
        )


def in_memory(folder: Path) -> bool:
    """Whether the directory's file system holds its files in main memory (tmpfs)."""
    device = os.stat(folder).st_dev
    with suppress(OSError, IndexError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[2] == f"{os.major(device)}:{os.minor(device)}":
                return fields[fields.index("-") + 1] in _IN_MEMORY
    return False
