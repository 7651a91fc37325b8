"""Reliable ends of processes: with their parent, and of a whole launch.

Every process of a launch inherits `MARK` in its environment. It can therefore be found whatever became of its parent,
its process group and its session.
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

import psutil

from zerokit.patience import Patience

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
        self._waits: dict[int, Patience] = {}

    def look(self, pids: Iterable[int]) -> None:
        """Check which of these are stopped, and kill those stopped for `STOPPED_SECONDS`."""
        for pid in pids:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_STOPPED:  # a debugger's stop is another
                    self._waits.pop(pid, None)
                elif self._waits.setdefault(pid, Patience(STOPPED_SECONDS)).over:
                    self._killed.add(pid)
                    process.kill()

    def explain(self, pid: int) -> str:
        """The reason if this watch killed the process; else empty."""
        return (
            f"was stopped (SIGSTOP) for {STOPPED_SECONDS:g} s, and killed then" if pid in self._killed else ""
        )


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


def marked(launch_id: str) -> list[psutil.Process]:
    """The launch's living processes except this one. Other users' cannot be seen; a zombie has no environment."""
    return [
        one
        for one in psutil.process_iter(["environ"])
        if (one.info["environ"] or {}).get(MARK) == launch_id and one.pid != os.getpid()
    ]


def kill_marked(launch_id: str) -> None:
    """Send SIGKILL to every process of the launch until none is left, or ten seconds are over."""
    deadline = time.monotonic() + 10.0
    while (left := marked(launch_id)) and time.monotonic() < deadline:
        for one in left:
            with contextlib.suppress(psutil.Error):
                one.kill()
        time.sleep(0.02)
