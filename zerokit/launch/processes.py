"""Ending processes for certain, and dying with one's parent.

Every process of a launch inherits `MARK` in its environment. It can therefore be found in /proc whatever became
of its parent, its process group and its session (torchrun gives each rank a session of its own).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
import time
from pathlib import Path

MARK = "ZEROKIT_LAUNCH"
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel kill this process when its parent ends; exit now if that has happened already.

    Nothing happens outside Linux.

    Args:
        parent_pid: of the parent when it started this process.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def import_torch() -> None:
    """Import torch a sixth faster: what it makes stays, so that no garbage is looked for meanwhile, nor in it later."""
    gc.disable()
    try:
        importlib.import_module("torch")
        gc.freeze()
    finally:
        gc.enable()


def marked(launch_id: str) -> list[int]:
    """Process ids of the launch that are alive, this process excepted; empty where there is no /proc."""
    wanted = f"{MARK}={launch_id}".encode()
    pids = []
    for directory in Path("/proc").glob("[0-9]*"):
        pid = int(directory.name)
        # A process may end while it is looked at, and other users' are not readable. A zombie's is empty.
        with contextlib.suppress(OSError):
            if pid != os.getpid() and wanted in (directory / "environ").read_bytes().split(b"\0"):
                pids.append(pid)
    return sorted(pids)


def kill_marked(launch_id: str, *, spare: frozenset[int] = frozenset(), seconds: float = 10.0) -> list[int]:
    """SIGKILL every process of the launch except `spare`, until none is left; returns those that stay."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in marked(launch_id) if pid not in spare]) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return left
