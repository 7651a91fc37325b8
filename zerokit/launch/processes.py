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
STOPPED_SECONDS = 10.0
_LOOK_SECONDS, _SEARCH_SECONDS = 1.0, 5.0


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


class Stopped:
    """Notices processes of a launch that somebody has stopped (SIGSTOP): the others wait for them in vain."""

    def __init__(self, launch_id: str) -> None:
        self._launch_id = launch_id
        self._looked = self._searched = time.monotonic()
        self._pids: list[int] = []
        self._since: dict[int, float] = {}

    def look(self) -> str | None:
        """Which one, and the remedy, once it has been stopped for `STOPPED_SECONDS`."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return None
        self._looked = now
        if now - self._searched > _SEARCH_SECONDS:  # which takes milliseconds, beside ranks that are measured
            self._pids, self._searched = marked(self._launch_id), now
        stopped = [pid for pid in self._pids if _state(pid) == "T"]
        self._since = {pid: self._since.get(pid, now) for pid in stopped}
        for pid, since in self._since.items():
            if now - since > STOPPED_SECONDS:
                return f"{_name(pid)} has been stopped (SIGSTOP) for {now - since:.0f} s: kill -CONT {pid} continues it"
        return None


def _state(pid: int) -> str:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"RANK="):
                return f"rank {variable[5:].decode()} (pid {pid})"
    return f"process {pid} of the launch"


def kill_marked(launch_id: str, *, spare: frozenset[int] = frozenset(), seconds: float = 10.0) -> list[int]:
    """SIGKILL every process of the launch except `spare`, until none is left; returns those that stay."""
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in marked(launch_id) if pid not in spare]) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return left
