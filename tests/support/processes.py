"""Processes as psutil shows them."""

from __future__ import annotations

import psutil


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody has reaped does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def children_of(parent: int) -> list[int]:
    """The process ids of a process's children, the oldest first; none where it has ended."""
    found = [one for one in psutil.process_iter(["ppid", "create_time"]) if one.info["ppid"] == parent]
    return [one.pid for one in sorted(found, key=lambda one: one.info["create_time"])]


def words_of(pid: int) -> list[str]:
    """The command line of a process; empty if it has ended."""
    try:
        return psutil.Process(pid).cmdline()
    except psutil.NoSuchProcess:
        return []
