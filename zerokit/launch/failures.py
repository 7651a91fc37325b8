"""The reason why a launch failed: how each rank ended, which one was the cause, and the end of its stderr."""

from __future__ import annotations

import re
import signal
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zerokit.errors import ZerokitError
from zerokit.text import as_seen

_TAIL_LINES, _TAIL_BYTES, _LINE_LENGTH = 20, 1 << 14, 500
_ERROR = re.compile(r"^(?:\[rank\d+\]: )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$", re.MULTILINE)
"""The last line of a traceback, behind what torch puts before it."""
_PEER_LOST = re.compile("closed by peer|reset by peer|broken pipe|remote process exited", re.IGNORECASE)
"""What gloo and NCCL say of a peer that is gone."""


class LaunchError(ZerokitError):
    """The ranks could not be started."""

    several_lines = True


class WorkerFailed(ZerokitError):
    """A rank ended with an error or by a signal; the message names it and shows the end of its stderr.

    `failures` are all ranks' that are known, the cause first.
    """

    several_lines = True

    def __init__(self, message: str, failures: Sequence[Failure] = ()) -> None:
        self.failures = tuple(failures)
        super().__init__(message)


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of one rank; `time` in seconds since the epoch, `expected` if zerokit raised the error on purpose.

    `follows` if the error says that another rank was lost. `host` names the machine of its node, where that is not
    this one.
    """

    rank: int
    node: int
    pid: int
    exit_code: int
    message: str
    expected: bool
    time: float
    host: str | None = None
    follows: bool = False

    @property
    def cause_order(self) -> tuple[int, float]:
        """The sort key that puts the cause before its consequences.

        A killed rank may be noticed after its peers have failed for want of it, and clocks of machines differ. SIGTERM
        asks a rank to end: it is the cause of what follows from it, as where a daemon makes room in memory, but not of
        other errors.
        """
        if self.exit_code < 0:
            return (2 if self.exit_code == -signal.SIGTERM else 0, self.time)
        return (3 if self.follows else 1, self.time)

    def describe(self) -> str:
        """One line: the rank, its node and process, and how it ended."""
        where = f"rank {self.rank} ({name_node(self.node, self.host)}, pid {self.pid})"
        if self.exit_code >= 0:
            return f"{where} failed: {self.message or f'exit code {self.exit_code}'}"
        if self.message:
            return f"{where} {self.message}"
        name = signal_name(-self.exit_code)
        hint = " (perhaps by the kernel, as when memory runs out: see dmesg)" * (name == "SIGKILL")
        return f"{where} was killed by {name}{hint}"


def name_node(node: int, host: str | None) -> str:
    """The name of a node in messages."""
    return f"node {node}" if host is None else f"node {node} on {host}"


def signal_name(number: int) -> str:
    """The name of a signal: `SIGTERM` for 15; "signal N" if it has none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def says_peer_lost(message: str) -> bool:
    """Whether an error's message is of a rank that lost another one."""
    return _PEER_LOST.search(message) is not None


def last_error(log: Path) -> str:
    """The last error in a log, as Python prints it; empty if there is none."""
    return next(iter(reversed(_ERROR.findall(_end_of(log)))), "")


def tail(log: Path) -> str:
    """The last lines of a log, indented; empty if there is none."""
    return quote_tail(_end_of(log))


def _end_of(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def quote_tail(text: str) -> str:
    """The last lines of a text, indented; of a long line the end."""
    lines = as_seen(text).splitlines()[-_TAIL_LINES:]
    return "\n".join(f"  | {'… ' * (len(line) > _LINE_LENGTH)}{line[-_LINE_LENGTH:]}" for line in lines)


def explain_failures(failures: Sequence[Failure], logs: Path) -> list[str]:
    """Lines that name the first of these, the cause, with the end of its stderr, and the ranks that failed after it."""
    cause = failures[0]
    lines = [cause.describe()]
    if not cause.expected and (end := tail(logs / f"rank-{cause.rank}" / "stderr.log")):
        lines += [f"the end of rank {cause.rank}'s stderr:", end]
    # The others mostly lost their peer.
    if others := [one for one in failures[1:] if one.exit_code >= 0]:
        ranks = ", ".join(str(one.rank) for one in sorted(others, key=lambda one: one.rank))
        consequence = textwrap.shorten(others[0].message, 120, placeholder=" …") or "without a message"
        lines.append(f"after it failed: rank {ranks} ({consequence})")
    return lines
