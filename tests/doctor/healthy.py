"""Facts of machines where all is well: tests change what they are about."""

from __future__ import annotations

from dataclasses import replace

from zerokit.bench.machine.disk import DiskRates
from zerokit.bench.machine.speeds import AllReduce, Copies, Pair
from zerokit.doctor.checks import Examined, judge
from zerokit.doctor.devices import Device, Devices
from zerokit.doctor.directory import Directory
from zerokit.doctor.facts import GroupFacts, RankFacts
from zerokit.doctor.findings import Finding, Seat, Severity
from zerokit.doctor.hosts import Host, Processor
from zerokit.doctor.interfaces import Interface, Network
from zerokit.doctor.limits import Limits
from zerokit.doctor.software import Software
from zerokit.doctor.tracking import Tracking
from zerokit.offsets import Offset

GIB = 2**30
SOFTWARE = Software("3.12.4", "0.1.0", "5e1f0c2d9a7b", "2.13.0", "13.0", "2.28.3", "0.8.0", "3.17.2")
LOOPBACK = Interface("lo", True, True, ["127.0.0.1", "::1"], 65536)
LIMITS = Limits(8 * GIB, 8 * GIB, None, 65536, "1", False)
SERVER = Tracking("http://mlflow:5000", "server")


def seat(rank: int, *, ranks_a_node: int = 1) -> Seat:
    node = rank // ranks_a_node
    return Seat(rank, node, rank % ranks_a_node, f"host-{node}", f"host-{node}/boot")


def network(node: int, **changes: object) -> Network:
    address = f"10.0.0.{node + 1}"
    ethernet = Interface("eth0", True, False, [address], 9000, 100_000)
    return replace(Network([LOOPBACK, ethernet], own=[address]), **changes)  # type: ignore[arg-type]


def rank_facts(rank: int, *, ranks_a_node: int = 1) -> RankFacts:
    place = seat(rank, ranks_a_node=ranks_a_node)
    return RankFacts(
        seat=place,
        software=SOFTWARE,
        devices=Devices("580.95", 8, 8, True, 8, Device("H200", f"GPU-{rank}")),
        network=network(place.node),
        limits=LIMITS,
        processor=Processor(64, list(range(64)), None, 0.5),
        directory=Directory(
            "/data/run", "/data/run", None, 900 * GIB, 10**6, 1e9, DiskRates(True, GIB, 6e9, 4e9)
        ),
        host=Host({f"boot-{place.node}": 200 * GIB}, {}),
    )


def world(count: int, *, ranks_a_node: int = 1) -> list[RankFacts]:
    return [rank_facts(rank, ranks_a_node=ranks_a_node) for rank in range(count)]


def group_facts(ranks: list[RankFacts]) -> GroupFacts:
    nodes = sorted({one.seat.node for one in ranks})
    on_node = [sum(other.seat.node == one.seat.node for other in ranks) for one in ranks]
    return GroupFacts(
        offsets=[Offset(0.0, 0.0001) for _ in ranks],
        routes=["memory" if count > 1 else None for count in on_node],
        seen=[True] * len(ranks),
        all_reduce=AllReduce(2**24, 0.002, 15.0, "nccl", True),
        pairs=[Pair(a, b, 2**24, 0.002, 8.0 + a) for a in nodes for b in nodes if a < b],
        copies=Copies(25.0, 24.0, 20.0),
    )


def judged(ranks: list[RankFacts], group: GroupFacts | None = None) -> list[Finding]:
    return judge(Examined(ranks, group or group_facts(ranks), len(ranks)))


def bad(findings: list[Finding]) -> dict[str, Severity]:
    """The worst of each check that is not well."""
    order = list(Severity)
    found: dict[str, Severity] = {}
    for one in findings:
        if one.severity not in (Severity.OK, Severity.SKIPPED):
            found[one.code] = max(found.get(one.code, Severity.OK), one.severity, key=order.index)
    return found
