"""Findings: the result of a check, the ranks that it concerns, its severity, and advice.

Every check has a code, which stays the same for ever, and gives at least one finding whenever it could look. Ranks
with the same verdict share a finding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import NamedTuple, TypeVar

from zerokit.text import in_runs

T = TypeVar("T")


class Severity(StrEnum):
    """The severity of a finding; `SKIPPED` if the check was impossible or had nothing to check."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    FAULT = "fault"


class Check(NamedTuple):
    """One check; `why` says what depends on its result."""

    code: str
    title: str
    why: str


# The first digit is the subject. Codes are never used again for something else.
_ALL = (
    Check("ZD101", "software", "zerokit needs these packages, and torch 2.6 or later."),
    Check("ZD102", "same software", "Ranks with different versions compute and send different data."),
    Check("ZD201", "CUDA devices", "Without a device that torch can use, training runs on the CPU."),
    Check("ZD202", "one device per rank", "NCCL refuses two ranks on one device."),
    Check("ZD203", "same devices", "A step is as slow as its slowest device."),
    Check("ZD204", "pinned copies", 'With states="host", masters and states cross this link in every step.'),
    Check("ZD301", "gloo's interface", "gloo listens on one address, which the other ranks must reach."),
    Check("ZD302", "NCCL's interfaces", "NCCL connects over these, and sends over them without InfiniBand."),
    Check("ZD303", "own host name", "Without a named interface, gloo listens where this name leads."),
    Check("ZD305", "MTU", "Packets larger than a hop accepts are lost; small ones cost processor time."),
    Check("ZD401", "/dev/shm", "NCCL and data loaders keep shared memory there."),
    Check("ZD402", "locked memory", "RDMA and io_uring lock the memory that they register."),
    Check("ZD403", "open files", "Each rank holds a connection to every other rank, and files."),
    Check("ZD404", "memory of neighbours", "gloo ranks of one node read each other's memory if allowed."),
    Check("ZD501", "clocks", "Logs, traces and signed requests compare times of different nodes."),
    Check("ZD502", "cores", "A rank needs a core of its own."),
    Check("ZD503", "load", "Other processes take cores from the ranks."),
    Check(
        "ZD504",
        "equal hosts",
        "With equal shards and batches the smallest memory decides what fits, and the slowest rank the pace.",
    ),
    Check("ZD601", "run directory", "Ranks write checkpoints there."),
    Check("ZD602", "free space", "A checkpoint that does not fit fails the save."),
    Check("ZD603", "writing", "A save waits until its files are on disk."),
    Check("ZD604", "one directory", "The files of all ranks must be in one directory to be one checkpoint."),
    Check(
        "ZD605",
        "states on disk",
        "With states=PATH, masters and states are read and written there in every step.",
    ),
    Check("ZD701", "all-reduce", "Every step sends the gradients over this link."),
    Check("ZD702", "pairs of nodes", "A ring is as slow as its slowest link."),
    Check("ZD801", "tracking", "Benches write their runs to MLflow."),
    Check("ZD802", "tracking access", "The server decides who may connect, and under which host name."),
    Check("ZD803", "tracking writes", "Runs cannot be logged to a store that refuses writes."),
    Check("ZD901", "ranks start", "Checks between ranks need ranks that start and connect."),
)
CHECKS = {check.code: check for check in _ALL}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one rank or machine, or of all together.

    If `meaning` is empty, the check's `why` is shown, and if `where` is, the ranks that the verdict is about.
    """

    severity: Severity
    found: str
    meaning: str = ""
    remedy: str = ""
    where: str = ""


ok, skipped, warning, fault = (partial(Verdict, severity) for severity in Severity)
"""A check that passed; one that had nothing to examine, or could not; training that works, but slower or less safely
than it could; training that will fail, hang, or lose data. The latter two need a meaning and a remedy."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    code: str  # of the check, `CHECKS`
    severity: Severity  # how bad it is
    check: str  # the check's title
    where: str  # which nodes or ranks; empty where it is true of all that were looked at
    found: str  # what was seen
    meaning: str  # what follows from it
    remedy: str  # what to do; empty where there is nothing to do


def finding(code: str, verdict: Verdict, where: str = "") -> Finding:
    """The verdict as a finding of this check."""
    title, why = CHECKS[code].title, CHECKS[code].why
    meaning, place = verdict.meaning or why, verdict.where or where
    return Finding(code, verdict.severity, title, place, verdict.found, meaning, verdict.remedy)


@dataclass(frozen=True, slots=True)
class Seat:
    """Where facts come from: a rank, its node, and the machine that it really runs on.

    Simulated nodes share a machine. The process that starts the ranks has the seat `HERE`.
    """

    rank: int
    node: int
    local_rank: int
    host: str
    machine: str


Answers = Sequence[tuple[Seat, T]]
"""Facts of one kind, by seat."""


def by_rank(code: str, verdicts: Answers[Verdict]) -> list[Finding]:
    """One finding for each distinct verdict, with the ranks that it concerns."""
    groups: dict[Verdict, list[Seat]] = {}
    for seat, verdict in verdicts:
        groups.setdefault(verdict, []).append(seat)
    seats = [seat for seat, _ in verdicts]
    return [finding(code, verdict, where(group, seats)) for verdict, group in groups.items()]


def by_machine(code: str, verdicts: Answers[Verdict]) -> list[Finding]:
    """The same of machines, with the verdict about each machine's first rank."""
    first: dict[str, Verdict] = {}
    return by_rank(code, [(seat, first.setdefault(seat.machine, verdict)) for seat, verdict in verdicts])


def where(group: Sequence[Seat], seats: Sequence[Seat]) -> str:
    """The seats of `group` as text, among all `seats`: nothing, whole nodes, or ranks."""
    if len(group) == len(seats):
        return ""
    nodes = sorted({seat.node for seat in group})
    hosts = list(dict.fromkeys(seat.host for seat in sorted(group, key=lambda seat: seat.node)))
    named = f" ({', '.join(hosts[:4])}{', …' if len(hosts) > 4 else ''})"
    if len(group) == sum(seat.node in nodes for seat in seats):
        return f"node{'s' * (len(nodes) > 1)} {in_runs(nodes)}{named}"
    ranks = sorted(seat.rank for seat in group)
    return f"rank{'s' * (len(ranks) > 1)} {in_runs(ranks)}{named}"
