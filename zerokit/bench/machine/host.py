"""The host: its processor and memory, and this process's peak memory. Standard library only."""

from __future__ import annotations

import mmap
import os
import platform
import resource
import sys
from pathlib import Path


def peak_host_bytes() -> int:
    """The peak resident memory of this process.

    From /proc where there is one: there `ru_maxrss` would start at what the parent held when it forked.
    """
    if (line := _field("/proc/self/status", "VmHWM")) is not None:
        return int(line.split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def write_first(pages: int) -> None:
    """Ask the system for so many pages of memory, and write to each of them once."""
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        memory[:: mmap.PAGESIZE] = bytes(pages)


def processor_name() -> str:
    """The CPU's name, or its architecture if the system does not report a name."""
    return _field("/proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _field(path: str, name: str) -> str | None:
    """What follows the colon in the first line of `path` that begins with `name`; None where there is none."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)


def cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def memory_bytes() -> int:
    """Main memory of this machine."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
