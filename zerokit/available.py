"""Main memory that this process could still take. Standard library only."""

from __future__ import annotations

import resource
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


_LIMITS = {resource.RLIMIT_AS: "VmSize:", resource.RLIMIT_DATA: "VmData:"}
"""A process's limits (ulimit -v and -d), and what counts towards them in /proc/self/status."""


def left_to_process() -> int:
    """Bytes that this process may still take by its own limits; a huge number without any."""
    left = sys.maxsize
    for limit, line in _LIMITS.items():
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            taken = Path("/proc/self/status").read_text().split(line)[1]
            left = min(left, most - int(taken.split()[0]) * 1024)
    return left
