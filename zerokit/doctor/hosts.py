"""Hosts that compute: whether their ranks have as much memory, as many cores and as much speed as each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from zerokit.available import cpu_quotas, memory_pools, part_of, sharers
from zerokit.doctor.findings import Answers, Seat, Verdict, where
from zerokit.doctor.processor import Processor

_ALIKE = 0.75
"""The least part of the most memory, or cores, that passes: what else runs on equal hosts makes them differ."""
_AS_FAST = 0.6
"""The least part of the fastest rank's speed that passes. Two ranks on two equal cores had 0.56 to 1.0 of each other's
speed, in six measurements under a load of 23 (2026-11-28); where load exceeds the cores, speeds are not judged."""


@dataclass(frozen=True, slots=True)
class Host:
    """What limits a process's memory and processor time; names are shared by the processes that share a limit.

    Attributes:
        memory: bytes that are free on the machine, and in control groups with a limit.
        quotas: cores' worth of time of control groups that have a quota.
    """

    memory: dict[str, int]
    quotas: dict[str, float]


def look_at_host() -> Host:
    """Read the limits of this process."""
    return Host(memory_pools(), cpu_quotas())


def judge_hosts(answers: Answers[tuple[Host, Processor]], speeds: Sequence[float]) -> Verdict:
    """ZD504; `speeds` are those of all ranks when they compute together, empty where that was not measured."""
    quiet = all(processor.load <= processor.cores for _, (_, processor) in answers)
    seats = [seat for seat, _ in answers]
    found, unequal = [], []
    for name, amounts, alike in (
        ("GB of memory", _memory([host for _, (host, _) in answers]), _ALIKE),
        ("cores", _cores(answers), _ALIKE),
        ("GFLOP/s", speeds if quiet else (), _AS_FAST),
    ):
        if not amounts:
            continue
        most, least = max(amounts), min(amounts)
        few = [seat for seat, amount in zip(seats, amounts, strict=True) if amount < alike * most]
        unequal += [name] * bool(few)
        found.append(f"{most:.3g} {name}" + (f", but {least:.3g} on {where(few, seats)}" if few else ""))
    listed = "a rank has " + "; ".join(found)
    if not unequal:
        return Verdict.ok(listed)
    pace = "Batches(pace=zerokit.Pace(optimizer))"
    remedies = {"GB of memory": 'ZeroOptimizer(shares="memory")', "cores": pace, "GFLOP/s": pace}
    proposed = " and ".join(dict.fromkeys(remedies[name] for name in unequal))
    return Verdict.warning(listed, "", f"{proposed}, see docs/unequal.md")


def _memory(hosts: Sequence[Host]) -> list[float]:
    """Each rank's part in 10^9 bytes. Ranks read a pool that they share at different times: its least counts."""
    pools: dict[str, int] = {}
    for host in hosts:
        for name, free in host.memory.items():
            pools[name] = min(free, pools.get(name, free))
    sharing = sharers(host.memory for host in hosts)
    if not all(host.memory for host in hosts):
        return []
    return [part_of({name: pools[name] for name in host.memory}, sharing) / 1e9 for host in hosts]


def _cores(answers: Answers[tuple[Host, Processor]]) -> list[float]:
    """Each rank's part of the cores that it may use, and of quotas."""
    users = Counter((seat.machine, core) for seat, (_, processor) in answers for core in processor.allowed)
    sharing = sharers(host.quotas for _, (host, _) in answers)

    def part(seat: Seat, host: Host, processor: Processor) -> float:
        cores = sum(1 / users[seat.machine, core] for core in processor.allowed)
        return min(cores, part_of(host.quotas, sharing))

    return [part(seat, host, processor) for seat, (host, processor) in answers]
