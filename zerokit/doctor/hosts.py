"""Hosts that compute: cores for the ranks of a machine, other load, and whether ranks have equal means."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from zerokit.available import cpu_quotas, memory_pools, part_of, sharers
from zerokit.doctor.findings import Answers, Seat, Verdict, ok, warning, where
from zerokit.launch.ranks import cores

_ALIKE = 0.75
"""The least part of the most memory, or cores, that passes: what else runs on equal hosts makes them differ."""
_AS_FAST = 0.6
"""The least part of the fastest rank's speed that passes. Two ranks on two equal cores had 0.56 to 1.0 of each other's
speed, in six measurements under a load of 23 (2026-11-28); where load exceeds the cores, speeds are not judged."""


@dataclass(frozen=True, slots=True)
class Processor:
    """The processor as one process may use it."""

    cores: int  # how many the machine has
    allowed: list[int]  # numbers of the cores that this process may use
    quota: float | None  # cores' worth of time that its control groups may use; None without a limit
    load: float  # processes that ran or waited to, a mean over the last minute


@dataclass(frozen=True, slots=True)
class Host:
    """What limits a process's memory and processor time; names are shared by the processes that share a limit."""

    memory: dict[str, int]  # bytes that are free on the machine, and in control groups with a limit
    quotas: dict[str, float]  # cores' worth of time of control groups that have a quota


def look_at_host() -> tuple[Host, Processor]:
    """Read the limits of this process, and the cores that it may use."""
    host = Host(memory_pools(), cpu_quotas())
    quota = min(host.quotas.values(), default=None)
    return host, Processor(os.cpu_count() or 1, cores(), quota, os.getloadavg()[0])


def judge_cores(ranks: Sequence[Processor]) -> Verdict:
    """ZD502, for all ranks of a machine."""
    one = ranks[0]
    shared = {core for rank in ranks for core in rank.allowed}
    quota = "" if one.quota is None else f", a quota of {one.quota:g}"
    listed = f"{len(shared)} of {one.cores} for {len(ranks)} rank{'s' * (len(ranks) > 1)}{quota}"
    if len(shared) < len(ranks):
        return warning(
            listed,
            "Ranks take turns on a core, and each step waits for the last of them.",
            "let the ranks use more cores: look at taskset, numactl and the launcher's binding"
            if len(shared) < one.cores
            else "start fewer ranks on this machine",
        )
    if one.quota is not None and one.quota < len(ranks):
        return warning(
            listed,
            "The control group stops the ranks for a part of each tenth of a second.",
            "raise the container's limit: --cpus, or resources.limits.cpu",
        )
    return ok(listed)


def judge_load(processor: Processor) -> Verdict:
    """ZD503."""
    listed = f"{processor.load:.1f} on {processor.cores} cores over the last minute"
    if processor.load <= processor.cores:
        return ok(listed)
    return warning(
        listed,
        "Others are computing here: steps take longer, and measurements vary.",
        "look at top; measure when the machine is quiet",
    )


def judge_hosts(answers: Answers[tuple[Host, Processor]], speeds: Sequence[float]) -> Verdict:
    """ZD504; `speeds` are those of all ranks when they compute together, empty where that was not measured."""
    quiet = all(processor.load <= processor.cores for _, (_, processor) in answers)
    seats = [seat for seat, _ in answers]
    found, proposed = [], []
    pace = "Batches(pace=zerokit.Pace(optimizer))"
    for name, amounts, alike, remedy in (
        (
            "GB of memory",
            _memory([host for _, (host, _) in answers]),
            _ALIKE,
            'ZeroOptimizer(shares="memory")',
        ),
        ("cores", _cores(answers), _ALIKE, pace),
        ("GFLOP/s", speeds if quiet else (), _AS_FAST, pace),
    ):
        if not amounts:
            continue
        most, least = max(amounts), min(amounts)
        few = [seat for seat, amount in zip(seats, amounts, strict=True) if amount < alike * most]
        found.append(f"{most:.3g} {name}" + (f", but {least:.3g} on {where(few, seats)}" if few else ""))
        proposed += [remedy] * bool(few)
    listed = "a rank has " + "; ".join(found)
    if not proposed:
        return ok(listed)
    return warning(listed, "", f"{' and '.join(dict.fromkeys(proposed))}, see docs/unequal.md")


def _memory(hosts: Sequence[Host]) -> list[float]:
    """Each rank's part in 10^9 bytes. Ranks read a pool that they share at different times: its least counts."""
    if not all(host.memory for host in hosts):
        return []
    pools: dict[str, int] = {}
    for host in hosts:
        for name, free in host.memory.items():
            pools[name] = min(free, pools.get(name, free))
    sharing = sharers(host.memory for host in hosts)
    return [part_of({name: pools[name] for name in host.memory}, sharing) / 1e9 for host in hosts]


def _cores(answers: Answers[tuple[Host, Processor]]) -> list[float]:
    """Each rank's part of the cores that it may use, and of quotas."""
    users = Counter((seat.machine, core) for seat, (_, processor) in answers for core in processor.allowed)
    sharing = sharers(host.quotas for _, (host, _) in answers)

    def part(seat: Seat, host: Host, processor: Processor) -> float:
        cores = sum(1 / users[seat.machine, core] for core in processor.allowed)
        return min(cores, part_of(host.quotas, sharing))

    return [part(seat, host, processor) for seat, (host, processor) in answers]
