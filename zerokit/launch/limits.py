"""Ranks of this machine held to some cores and memory each, as on machines that differ.

Each rank gets a control group of the kernel. The groups are made inside the launcher's own and removed when the ranks
have ended. Version 1 has a hierarchy for each controller. In version 2 a group with processes of its own has no
controllers for its children, so the launcher moves into one of them meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from zerokit.available import own_groups
from zerokit.launch.failures import LaunchError

_PREFIX = "zerokit"
_PERIOD_US = 20_000
"""Short beside a step, because a group that has used up its quota stands still until the period ends."""
_REMOVED_SECONDS = 5.0
_NEEDED = (
    "it takes a control group inside which this user may make others: run as root, in a privileged container, or with "
    "systemd-run --user --scope --property=Delegate=yes"
)


@dataclass(frozen=True, slots=True)
class Limit:
    """What one rank may use: processor cores, such as 0.5, and bytes of memory; None for all that there is."""

    cores: float | None = None
    memory_bytes: int | None = None


class LimitError(LaunchError):
    """Control groups cannot be made here."""


class Limits:
    """A context with a control group for each rank, in the order of their `limits`; `put` moves a process there.

    Raises `LimitError` where groups cannot be made, with what is needed.
    """

    def __init__(self, limits: Sequence[Limit]) -> None:
        self._limits = limits
        self._name = f"{_PREFIX}-{os.getpid()}-{secrets.token_hex(8)}"
        self._made: list[Path] = []
        self._of_rank: list[list[Path]] = [[] for _ in limits]
        self._left: list[tuple[Path, str]] = []
        """Groups of version 2 that this process has left, and the controllers that their children got."""

    def __enter__(self) -> Limits:
        try:
            if any(limit.cores is not None for limit in self._limits):
                self._make("cpu")
            if any(limit.memory_bytes is not None for limit in self._limits):
                self._make("memory")
        except OSError as error:
            self._remove()
            where = f"{error.filename}: " if error.filename else ""
            raise LimitError(
                f"ranks cannot be held to cores and memory here: {where}{error.strerror}; {_NEEDED}"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def put(self, rank: int, pid: int) -> None:
        """Move a process to its rank's group; one that has ended already is left alone."""
        for group in self._of_rank[rank]:
            with contextlib.suppress(ProcessLookupError):
                (group / "cgroup.procs").write_text(str(pid))

    def _make(self, controller: str) -> None:
        own, unified = own_group(controller)
        _remove_forgotten(own)
        if unified:
            self._leave(own, controller)
        for rank, limit in enumerate(self._limits):
            if not (settings := _settings(controller, limit, unified=unified)):
                continue
            group = own / f"{self._name}-rank-{rank}"
            if group not in self._made:
                group.mkdir()
                self._made.append(group)
                self._of_rank[rank].append(group)
            for name, value in settings:
                if name in _OPTIONAL and not (group / name).exists():
                    continue
                (group / name).write_text(value)

    def _leave(self, own: Path, controller: str) -> None:
        """Move this process to a child of its group of version 2, whose other children then get the controller."""
        aside = own / f"{self._name}-launcher"
        if aside not in self._made:
            aside.mkdir()
            self._made.append(aside)
            (aside / "cgroup.procs").write_text(str(os.getpid()))
        self._left.append((own, controller))
        (own / "cgroup.subtree_control").write_text(f"+{controller}")

    def _remove(self) -> None:
        deadline = time.monotonic() + _REMOVED_SECONDS
        for own, controller in self._left:
            with contextlib.suppress(OSError):
                (own / "cgroup.subtree_control").write_text(f"-{controller}")
        for own in dict.fromkeys(own for own, _ in self._left):
            with contextlib.suppress(OSError):
                (own / "cgroup.procs").write_text(str(os.getpid()))
        for group in self._made:
            # A killed process is in its group for a moment longer.
            while not _removed(group) and time.monotonic() < deadline:
                time.sleep(0.02)
        self._made, self._left = [], []


_OPTIONAL = ("memory.memsw.limit_in_bytes", "memory.swap.max")
"""Where the kernel does not count swap, there are no such files."""


def _settings(controller: str, limit: Limit, *, unified: bool) -> list[tuple[str, str]]:
    """What is written to which files of a group, in order."""
    if controller == "cpu" and limit.cores is not None:
        quota = round(limit.cores * _PERIOD_US)
        if unified:
            return [("cpu.max", f"{quota} {_PERIOD_US}")]
        return [("cpu.cfs_period_us", str(_PERIOD_US)), ("cpu.cfs_quota_us", str(quota))]
    if controller == "memory" and limit.memory_bytes is not None:
        most = str(limit.memory_bytes)
        if unified:
            return [("memory.max", most), ("memory.swap.max", "0")]
        return [("memory.limit_in_bytes", most), ("memory.memsw.limit_in_bytes", most)]
    return []


def own_group(controller: str, root: Path = Path("/")) -> tuple[Path, bool]:
    """The directory of this process's group that has a controller, and whether it is of version 2.

    Raises `OSError` where no hierarchy with the controller is mounted.
    """
    for group, *_ in own_groups(controller, root):
        try:
            controllers = (group / "cgroup.controllers").read_text().split()
        except FileNotFoundError:
            return group, False
        if controller in controllers:
            return group, True
    raise OSError(0, f"no control groups with the controller {controller!r} are mounted")


def _remove_forgotten(own: Path) -> None:
    """Remove groups that a killed launcher has left; those with processes the kernel keeps."""
    for group in own.glob(f"{_PREFIX}-*-*"):
        pid = group.name.split("-")[1]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            _removed(group)


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def missing() -> str | None:
    """Why ranks of this machine cannot be held to limits; None if they can."""
    try:
        with Limits([Limit(1.0, 2**30)]):
            return None
    except LimitError as error:
        return str(error)
