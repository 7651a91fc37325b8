"""Findings: the result of a check, the ranks that it concerns, its severity, and advice.

Every check has a code, which stays the same for ever, and gives at least one finding whenever it could look. Ranks
with the same verdict share a finding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from zerokit.text import in_runs

T = TypeVar("T")


class Severity(StrEnum):
    """The severity of a finding; `SKIPPED` if the check was impossible or had nothing to check."""

    OK = "ok"
    SKIPPED = "skipped"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Check:
    """One check; `why` says what depends on its result."""

    code: str
    title: str
    why: str


# The first digit is the subject. Codes are never used again for something else.
CHECKS = {
    check.code: check
    for check in (
        Check("ZD101", "software", "zerokit needs these packages, and torch 2.6 or later."),
        Check("ZD102", "same software", "Ranks with different versions compute and send different data."),
        Check("ZD201", "CUDA devices", "Without a device that torch can use, training runs on the CPU."),
        Check("ZD202", "one device per rank", "NCCL refuses two ranks on one device."),
        Check("ZD203", "same devices", "A step is as slow as its slowest device."),
        Check(
            "ZD204", "pinned copies", 'With states="host", masters and states cross this link in every step.'
        ),
        Check("ZD301", "gloo's interface", "gloo listens on one address, which the other ranks must reach."),
        Check(
            "ZD302", "NCCL's interfaces", "NCCL connects over these, and sends over them without InfiniBand."
        ),
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
        Check(
            "ZD604", "one directory", "The files of all ranks must be in one directory to be one checkpoint."
        ),
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
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """The judgement of one rank or machine; if `meaning` is empty, the check's `why` is shown."""

    severity: Severity
    found: str
    meaning: str = ""
    remedy: str = ""

    @staticmethod
    def ok(found: str) -> Verdict:
        """A check that passed."""
        return Verdict(Severity.OK, found)

    @staticmethod
    def skipped(found: str) -> Verdict:
        """A check that had nothing to examine, or could not."""
        return Verdict(Severity.SKIPPED, found)

    @staticmethod
    def warning(found: str, meaning: str, remedy: str) -> Verdict:
        """A warning: training works, but slower or less safely than it could."""
        return Verdict(Severity.WARNING, found, meaning, remedy)

    @staticmethod
    def fault(found: str, meaning: str, remedy: str) -> Verdict:
        """A fault: training will fail, hang, or lose data."""
        return Verdict(Severity.FAULT, found, meaning, remedy)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        code: of the check, `CHECKS`.
        severity: how bad it is.
        check: the check's title.
        where: which nodes or ranks; empty where it is true of all that were looked at.
        found: what was seen.
        meaning: what follows from it.
        remedy: what to do; empty where there is nothing to do.
    """

    code: str
    severity: Severity
    check: str
    where: str
    found: str
    meaning: str
    remedy: str


def finding(code: str, verdict: Verdict, where: str = "") -> Finding:
    """The verdict as a finding of this check."""
    check = CHECKS[code]
    return Finding(
        code,
        verdict.severity,
        check.title,
        where,
        verdict.found,
        verdict.meaning or check.why,
        verdict.remedy,
    )


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


def machines(answers: Answers[T]) -> list[tuple[Seat, T]]:
    """The facts of the first rank on each machine."""
    first: dict[str, tuple[Seat, T]] = {}
    for seat, facts in answers:
        first.setdefault(seat.machine, (seat, facts))
    return list(first.values())


def by_rank(code: str, answers: Answers[T], judge: Callable[[T], Verdict]) -> list[Finding]:
    """One finding for each distinct verdict, with the ranks that it concerns."""
    return _joined(code, [(seat, judge(facts)) for seat, facts in answers], [seat for seat, _ in answers])


def by_machine(code: str, answers: Answers[T], judge: Callable[[T], Verdict]) -> list[Finding]:
    """One finding for each distinct verdict about machines, from the facts of each machine's first rank."""
    verdicts = {seat.machine: judge(facts) for seat, facts in machines(answers)}
    return _joined(
        code, [(seat, verdicts[seat.machine]) for seat, _ in answers], [seat for seat, _ in answers]
    )


def _joined(code: str, verdicts: Iterable[tuple[Seat, Verdict]], seats: Sequence[Seat]) -> list[Finding]:
    groups: dict[Verdict, list[Seat]] = {}
    for seat, verdict in verdicts:
        groups.setdefault(verdict, []).append(seat)
    return [finding(code, verdict, where(group, seats)) for verdict, group in groups.items()]


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
