"""Reliable ends of processes: with their parent, and of a whole launch.

Every process of a launch inherits `MARK` in its environment. It can therefore be found in /proc whatever became
of its parent, its process group and its session.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path

MARK = "ZEROKIT_LAUNCH"
STOPPED_SECONDS = 12.0
_PARENT_SECONDS = 1.0
_END_SECONDS = 15.0
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends; exit if the parent has ended already.

    Nothing happens outside Linux.

    Args:
        parent_pid: of the parent when it started this process.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


class StoppedProcesses:
    """Kills processes that stay stopped (SIGSTOP), because their peers would wait forever."""

    def __init__(self) -> None:
        self._killed: set[int] = set()
        self._since: dict[int, float] = {}

    def look(self, pids: Iterable[int]) -> None:
        """Check which of these are stopped, and kill those stopped for `STOPPED_SECONDS`."""
        for pid in pids:
            if not _is_stopped(pid):
                self._since.pop(pid, None)
            elif time.monotonic() - self._since.setdefault(pid, time.monotonic()) > STOPPED_SECONDS:
                self._killed.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def explain(self, pid: int) -> str:
        """The reason if this watch killed the process; else empty."""
        return (
            f"was stopped (SIGSTOP) for {STOPPED_SECONDS:g} s, and killed then" if pid in self._killed else ""
        )


def _is_stopped(pid: int) -> bool:
    try:  # a debugger's stop is another state, "t"
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


def end_with_parent() -> None:
    """End this process when its parent ends: with SIGTERM, and with SIGKILL if that takes too long.

    By asking who the parent is, as the kernel's own way (see `die_with_parent`) goes by the parent's thread.
    """
    threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_END_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def import_torch() -> None:
    """Import torch a sixth faster, without garbage collection during the import; its objects stay anyway."""
    gc.disable()
    try:
        importlib.import_module("torch")
        gc.freeze()
    finally:
        gc.enable()


def marked(launch_id: str) -> list[int]:
    """The ids of the launch's living processes except this one; empty if there is no /proc."""
    wanted = f"{MARK}={launch_id}".encode()
    pids = []
    for directory in Path("/proc").glob("[0-9]*"):
        pid = int(directory.name)
        # A process may end while it is looked at, and other users' are not readable. A zombie's is empty.
        with contextlib.suppress(OSError):
            if pid != os.getpid() and wanted in (directory / "environ").read_bytes().split(b"\0"):
                pids.append(pid)
    return sorted(pids)


def kill_marked(launch_id: str) -> None:
    """Send SIGKILL to every process of the launch until none is left, or ten seconds are over."""
    deadline = time.monotonic() + 10.0
    while (left := marked(launch_id)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
