"""Cores for the ranks of a machine: their number, the ones that ranks may use, and other load."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from zerokit.available import cpu_quotas
from zerokit.doctor.findings import Answers, Finding, Seat, Verdict, by_machine
from zerokit.launch.ranks import cores


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor as one process may use it.

    Attributes:
        cores: how many the machine has.
        allowed: numbers of the cores that this process may use.
        quota: cores' worth of time that its control groups may use; None without a limit.
        load: processes that ran or waited to, a mean over the last minute.
    """

    cores: int
    allowed: list[int]
    quota: float | None
    load: float


def look_at_processor() -> Processor:
    """Read the cores that this process may use."""
    quota = min(cpu_quotas().values(), default=None)
    return Processor(os.cpu_count() or 1, cores(), quota, os.getloadavg()[0])


def judge_processors(answers: Answers[Processor]) -> list[Finding]:
    """ZD502, ZD503, for each machine with all of its ranks."""
    groups: dict[str, list[Processor]] = {}
    for seat, processor in answers:
        groups.setdefault(seat.machine, []).append(processor)
    together: list[tuple[Seat, Sequence[Processor]]] = [(seat, groups[seat.machine]) for seat, _ in answers]
    return [*by_machine("ZD502", together, _judge_cores), *by_machine("ZD503", together, _judge_load)]


def _judge_cores(ranks: Sequence[Processor]) -> Verdict:
    one = ranks[0]
    shared = sorted({core for rank in ranks for core in rank.allowed})
    quota = "" if one.quota is None else f", a quota of {one.quota:g}"
    listed = f"{len(shared)} of {one.cores} for {len(ranks)} rank{'s' * (len(ranks) > 1)}{quota}"
    if len(shared) < len(ranks):
        pinned = len(shared) < one.cores
        return Verdict.warning(
            listed,
            "Ranks take turns on a core, and each step waits for the last of them.",
            "let the ranks use more cores: look at taskset, numactl and the launcher's binding"
            if pinned
            else "start fewer ranks on this machine",
        )
    if one.quota is not None and one.quota < len(ranks):
        return Verdict.warning(
            listed,
            "The control group stops the ranks for a part of each tenth of a second.",
            "raise the container's limit: --cpus, or resources.limits.cpu",
        )
    return Verdict.ok(listed)


def _judge_load(ranks: Sequence[Processor]) -> Verdict:
    one = ranks[0]
    listed = f"{one.load:.1f} on {one.cores} cores over the last minute"
    if one.load <= one.cores:
        return Verdict.ok(listed)
    return Verdict.warning(
        listed,
        "Others are computing here: steps take longer, and measurements vary.",
        "look at top; measure when the machine is quiet",
    )
