"""A process's identity (host, number and start) as text, with which other processes check whether it lives."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path

PATTERN = r"[\w-]{1,32}\.[0-9a-f]{8}\.[0-9a-f]{8}\.\d{1,20}\.\d{1,20}\.\d{1,20}"
"""The form of the text, which also serves as a file name."""


_MACHINE, _BOOT = Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Process:
    """`machine`, `boot` (digests) and `space` (of process numbers) distinguish hosts and containers of one name.

    `start` is in clock ticks since the boot, so that a number that was given again is another process.
    """

    host: str
    machine: str
    boot: str
    space: int
    pid: int
    start: int

    @staticmethod
    def current() -> Process:
        """This process."""
        pid = os.getpid()
        seen = _seen(pid)
        return Process(_host(), _digest(_MACHINE), _digest(_BOOT), _space(), pid, seen[1] if seen else 0)

    @staticmethod
    def parse(text: str) -> Process | None:
        """Parse the output of `str`; None for other text."""
        if not re.fullmatch(PATTERN, text, re.ASCII):
            return None
        host, machine, boot, space, pid, start = text.split(".")
        return Process(host, machine, boot, int(space), int(pid), int(start))

    def lives(self) -> bool | None:
        """Whether the process is alive; None if it is on another host or in a container, or hidden from this user.

        Before the last boot counts as elsewhere: machines that were cloned may share their names and identities.
        """
        if astuple(self)[:4] != astuple(Process.current())[:4]:
            return None
        seen = _seen(self.pid)
        if seen is None:  # it is gone, or another user's and /proc is mounted with hidepid
            return None if _exists(self.pid) else False
        state, start = seen
        return state not in "ZX" and start == self.start

    def __str__(self) -> str:
        return ".".join(map(str, astuple(self)))


@cache
def _host() -> str:
    return re.sub(r"[^\w-]", "-", socket.gethostname(), flags=re.ASCII)[:32] or "unknown"


@cache
def _digest(path: Path) -> str:
    try:
        text = path.read_text()
    except OSError:
        text = ""
    return hashlib.sha256(text.strip().encode()).hexdigest()[:8]


def _space() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _seen(pid: int) -> tuple[str, int] | None:
    """The state of a process and its start; None where it cannot be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return fields[0], int(fields[19])


def _exists(pid: int) -> bool:
    """Whether a process has this number, also where it cannot be seen."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
