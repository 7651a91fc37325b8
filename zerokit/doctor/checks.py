"""Which facts each check judges: every rank's, those of a machine's first rank, or all together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from zerokit.doctor.devices import judge_devices, judge_one_a_rank, judge_same
from zerokit.doctor.directory import judge_rates, judge_seen, judge_space, judge_speed, judge_writable
from zerokit.doctor.facts import GroupFacts, RankFacts
from zerokit.doctor.findings import Answers, Finding, Verdict, by_machine, by_rank, finding, skipped
from zerokit.doctor.hosts import judge_cores, judge_hosts, judge_load
from zerokit.doctor.interfaces import judge_gloo, judge_mtu, judge_nccl, judge_own_name
from zerokit.doctor.limits import judge_files, judge_memlock, judge_route, judge_shm
from zerokit.doctor.links import judge_all_reduce, judge_clocks, judge_copies, judge_pairs
from zerokit.doctor.software import judge_agreement, judge_software

T = TypeVar("T")


@dataclass(frozen=True)
class Examined:
    """What each rank saw by itself, and what they measured together, if they did.

    `world` is the number of ranks that there are, or would be.
    """

    ranks: Sequence[RankFacts]
    group: GroupFacts | None
    world: int

    @cached_property
    def machines(self) -> dict[str, list[RankFacts]]:
        """The ranks of each machine."""
        found: dict[str, list[RankFacts]] = {}
        for one in self.ranks:
            found.setdefault(one.seat.machine, []).append(one)
        return found

    @property
    def several(self) -> bool:
        """Whether there are several machines."""
        return len(self.machines) > 1

    def beside(self, rank: RankFacts) -> list[RankFacts]:
        """The ranks of this one's machine."""
        return self.machines[rank.seat.machine]

    def each(self, facts_of: Callable[[RankFacts], T]) -> Answers[T]:
        """The facts of one kind, by seat."""
        return [(one.seat, facts_of(one)) for one in self.ranks]


def judge(examined: Examined) -> list[Finding]:
    """The findings of all checks of ranks; a check that finds nothing to judge has none."""
    findings = list[Finding]()
    for join, judges in ((by_rank, _EACH_RANK), (by_machine, _EACH_MACHINE)):
        for code, verdict_of in judges.items():
            verdicts = ((one.seat, verdict_of(one, examined)) for one in examined.ranks)
            findings += join(code, [(seat, verdict) for seat, verdict in verdicts if verdict is not None])
    together = {code: verdict_of(examined) for code, verdict_of in _TOGETHER.items()}
    if examined.group is not None:
        together |= {code: verdict_of(examined.group, examined) for code, verdict_of in _MEASURED.items()}
    return findings + [finding(code, verdict) for code, verdict in together.items() if verdict is not None]


def _judge_route(one: RankFacts, examined: Examined) -> Verdict | None:
    if examined.group is None:
        return skipped("the ranks did not try")
    if not any(examined.group.routes):
        return skipped("every rank is alone on its node")
    route = examined.group.routes[one.seat.rank]
    return judge_route(route, one.limits.cma) if route is not None else None


def _judge_seen(one: RankFacts, examined: Examined) -> Verdict | None:
    if len(examined.ranks) < 2:
        return None
    if examined.group is None or examined.group.seen is None:
        return skipped("rank 0 could not write there, or the ranks did not meet")
    return judge_seen(examined.group.seen[one.seat.rank], one.directory.path)


def _judge_hosts(examined: Examined) -> Verdict:
    if any(one.devices.used for one in examined.ranks):
        return skipped("ranks compute on devices")
    paces = examined.group.paces if examined.group is not None else None
    hosts = examined.each(lambda one: (one.host, one.processor))
    return judge_hosts(hosts, paces.by_rank if paces is not None else [])


def _judge_all_reduce(group: GroupFacts, examined: Examined) -> Verdict:
    links = [one.network.between_nodes for one in examined.ranks]
    speeds = [link.speed_mbit for link in links if link is not None and link.speed_mbit]
    return judge_all_reduce(group.all_reduce, min(speeds) if examined.several and speeds else None)


_EACH_RANK: dict[str, Callable[[RankFacts, Examined], Verdict | None]] = {
    "ZD101": lambda one, _: judge_software(one.software),
    "ZD202": lambda one, examined: judge_one_a_rank(
        one.devices.used, [(other.seat.rank, other.devices.used) for other in examined.beside(one)]
    ),
    "ZD301": lambda one, examined: judge_gloo(one.network, examined.several),
    "ZD302": lambda one, examined: judge_nccl(one.network, examined.several),
    "ZD402": lambda one, _: judge_memlock(one.limits),
    "ZD403": lambda one, examined: judge_files(one.limits, examined.world),
    "ZD404": _judge_route,
    "ZD601": lambda one, _: judge_writable(one.directory),
    "ZD604": _judge_seen,
}
_EACH_MACHINE: dict[str, Callable[[RankFacts, Examined], Verdict | None]] = {
    "ZD201": lambda one, _: judge_devices(one.devices),
    "ZD303": lambda one, examined: judge_own_name(one.network, examined.several),
    "ZD401": lambda one, _: judge_shm(one.limits),
    "ZD502": lambda one, examined: judge_cores([other.processor for other in examined.beside(one)]),
    "ZD503": lambda one, _: judge_load(one.processor),
    "ZD602": lambda one, _: judge_space(one.directory),
    "ZD603": lambda one, _: judge_speed(one.directory),
    "ZD605": lambda one, _: judge_rates(one.directory),
}
_TOGETHER: dict[str, Callable[[Examined], Verdict | None]] = {
    "ZD102": lambda examined: judge_agreement(examined.each(lambda one: one.software)),
    "ZD203": lambda examined: judge_same([one.devices.used for one in examined.ranks]),
    "ZD305": lambda examined: judge_mtu(examined.each(lambda one: one.network)),
    "ZD504": _judge_hosts,
}
_MEASURED: dict[str, Callable[[GroupFacts, Examined], Verdict | None]] = {
    "ZD204": lambda group, _: judge_copies(group.copies),
    "ZD501": lambda group, examined: judge_clocks(group.offsets, [one.seat for one in examined.ranks]),
    "ZD701": _judge_all_reduce,
    "ZD702": lambda group, examined: judge_pairs(group.pairs, [one.seat for one in examined.ranks]),
}
