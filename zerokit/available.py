"""Main memory that this process could still take. Standard library only."""

from __future__ import annotations

import sys
from pathlib import Path

_GROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Main memory available without swapping, within this process's control group; a huge number if nothing says so.

    Files in memory (tmpfs) are not available; other cached ones are.
    """
    try:
        line = Path("/proc/meminfo").read_text().split("MemAvailable:")[1]
        available = int(line.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        available = sys.maxsize
    try:
        limit = int((_GROUP / "memory.max").read_text())
        used = int((_GROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_GROUP / "memory.stat").read_text().splitlines())
        cached = int(stat["file"]) - int(stat["shmem"])
    except (OSError, ValueError, KeyError):  # no group, or one without a limit ("max")
        return available
    return min(available, limit - used + cached)
