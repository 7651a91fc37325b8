"""From facts to findings: every check is silent about a healthy cluster, and speaks of its own fault alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.doctor.healthy import (
    GIB,
    LIMITS,
    LOOPBACK,
    bad,
    group_facts,
    judged,
    network,
    rank_facts,
    seat,
    world,
)
from zerokit.bench.machine.disk import DiskRates
from zerokit.bench.machine.speeds import AllReduce, Copies, Pace, Paces, Pair
from zerokit.doctor.devices import Device, Devices, judge_devices, judge_same
from zerokit.doctor.facts import GroupFacts, RankFacts
from zerokit.doctor.findings import CHECKS, Finding, Severity, by_machine, by_rank, ok, where
from zerokit.doctor.hosts import Processor
from zerokit.doctor.interfaces import Interface, nccl_takes
from zerokit.doctor.links import judge_all_reduce
from zerokit.offsets import Offset

WARNING, FAULT = Severity.WARNING, Severity.FAULT

Change = Callable[[RankFacts], RankFacts]
GroupChange = Callable[[GroupFacts], GroupFacts]


def on(field: str, **changes: Any) -> Change:
    """Changes one part of a rank's facts."""
    return lambda facts: replace(facts, **{field: replace(getattr(facts, field), **changes)})


ETHERNET = rank_facts(1).network.interfaces[1]
DOWN = Interface("eth1", False, False, [], 1500)
TOGETHER = world(2, ranks_a_node=2)

RANK_FAULTS: list[tuple[str, Severity, Change]] = [
    ("ZD101", FAULT, on("software", safetensors=None)),
    ("ZD101", FAULT, on("software", torch="2.5.1+cu124")),
    ("ZD101", WARNING, on("software", mlflow=None)),
    ("ZD102", FAULT, on("software", nccl="2.21.5")),
    ("ZD102", FAULT, on("software", program="000000000000")),
    ("ZD102", WARNING, on("software", safetensors="0.7.0")),
    ("ZD201", FAULT, on("devices", built_for_cuda=False)),
    ("ZD201", FAULT, on("devices", usable=7)),
    ("ZD201", WARNING, on("devices", visible=0)),
    ("ZD203", WARNING, on("devices", used=Device("H100", "GPU-1"))),
    ("ZD301", FAULT, on("network", gloo="ib7")),
    ("ZD301", FAULT, on("network", gloo="lo")),
    ("ZD301", FAULT, on("network", gloo="eth1", interfaces=[LOOPBACK, ETHERNET, DOWN])),
    ("ZD302", FAULT, on("network", nccl="ib")),
    ("ZD302", FAULT, on("network", nccl="=lo")),
    ("ZD302", FAULT, on("network", nccl="=eth1", interfaces=[LOOPBACK, ETHERNET, DOWN])),
    ("ZD303", FAULT, on("network", own=[], own_error="Name or service not known")),
    ("ZD303", FAULT, on("network", own=["127.0.1.1"])),
    ("ZD303", FAULT, on("network", own=["10.9.9.9"])),
    ("ZD303", WARNING, on("network", own=["127.0.1.1"], gloo="eth0")),
    ("ZD305", WARNING, on("network", interfaces=[LOOPBACK, replace(ETHERNET, mtu=1500)])),
    ("ZD401", FAULT, on("limits", shm_free_bytes=2**20)),
    ("ZD401", FAULT, on("limits", shm_bytes=0, shm_free_bytes=0)),
    ("ZD401", WARNING, on("limits", shm_bytes=64 * 2**20, shm_free_bytes=64 * 2**20)),
    ("ZD402", WARNING, on("limits", memlock_bytes=64 * 1024)),
    ("ZD402", WARNING, on("limits", memlock_bytes=2**30, infiniband=True)),
    ("ZD403", WARNING, on("limits", open_files=256)),
    ("ZD502", WARNING, on("processor", quota=0.5)),
    ("ZD503", WARNING, on("processor", load=70.0)),
    ("ZD601", FAULT, on("directory", error="Read-only file system")),
    ("ZD602", FAULT, on("directory", free_bytes=2**20)),
    ("ZD602", FAULT, on("directory", free_files=0)),
    ("ZD602", WARNING, on("directory", free_bytes=2**29)),
    ("ZD603", WARNING, on("directory", bytes_per_s=5e6)),
    ("ZD605", WARNING, on("directory", rates=DiskRates(True, 2**30, 5e9, 5e7))),
    ("ZD605", WARNING, on("directory", rates=DiskRates(False, 2**30, 5e7, 5e9))),
]  # fmt: skip


def group_with(**changes: Any) -> GroupChange:
    return lambda group: replace(group, **changes)


GROUP_FAULTS: list[tuple[str, Severity, GroupChange]] = [
    ("ZD204", WARNING, group_with(copies=Copies(3.0, 3.1, 2.9))),
    ("ZD404", WARNING, group_with(routes=["sockets", "sockets"])),
    ("ZD501", WARNING, group_with(offsets=[Offset(0.0, 0.0), Offset(-2.0, 0.01)])),
    ("ZD501", FAULT, group_with(offsets=[Offset(0.0, 0.0), Offset(3600.0, 0.01)])),
    ("ZD604", FAULT, group_with(seen=[True, False])),
    ("ZD701", FAULT, group_with(all_reduce=AllReduce(2**24, 0.001, 15.0, "gloo", False))),
    ("ZD701", WARNING, group_with(all_reduce=AllReduce(2**24, 0.9, 0.02, "gloo", True))),
    ("ZD701", WARNING, group_with(all_reduce=AllReduce(2**24, 0.01, 1.0, "gloo", True))),  # of 12.5 GB/s
    ("ZD702", WARNING, group_with(pairs=[Pair(0, 1, 1, 1.0, 1.0), Pair(0, 2, 1, 1.0, 9.0), Pair(1, 2, 1, 1.0, 9.0)])),
]  # fmt: skip


def test_a_healthy_cluster_has_nothing_bad() -> None:
    ranks = world(4, ranks_a_node=2)
    findings = judged(ranks)
    assert bad(findings) == {}
    looked = {one.code for one in findings}
    assert looked == set(CHECKS) - {"ZD801", "ZD802", "ZD803", "ZD901"}
    assert all(one.meaning and not one.remedy for one in findings)


@pytest.mark.parametrize(("code", "severity", "change"), RANK_FAULTS)
def test_a_fault_of_one_rank_is_found_alone_and_placed(code: str, severity: Severity, change: Change) -> None:
    ranks = world(3)
    # Other versions on one rank alone are another fault besides, ZD102.
    ranks = [change(one) if code == "ZD101" or one.seat.rank == 1 else one for one in ranks]
    findings = judged(ranks)
    assert bad(findings) == {code: severity}
    found = next(one for one in findings if one.severity is severity)
    assert found.remedy
    assert found.meaning
    if code not in ("ZD101", "ZD102", "ZD203"):  # about all ranks together
        assert "host-1" in found.where + found.found


@pytest.mark.parametrize(("code", "severity", "change"), GROUP_FAULTS)
def test_a_fault_between_ranks_is_found_alone(code: str, severity: Severity, change: GroupChange) -> None:
    ranks = world(3 if code == "ZD702" else 2)
    findings = judged(ranks, change(group_facts(ranks)))
    assert bad(findings) == {code: severity}


def test_every_check_has_a_fault_in_these_tests() -> None:
    tried = {code for code, *_ in RANK_FAULTS} | {code for code, *_ in GROUP_FAULTS}
    elsewhere = {
        "ZD202",
        "ZD504",
        "ZD801",
        "ZD802",
        "ZD803",
        "ZD901",
    }  # below, in test_ranks and test_tracking
    assert tried | elsewhere == set(CHECKS)


def test_a_full_disk_of_one_node_is_named_beside_the_error_that_it_gives() -> None:
    ranks = world(3)
    ranks[1] = on("directory", error="No space left on device", free_bytes=0)(ranks[1])
    findings = judged(ranks)
    assert bad(findings) == {"ZD601": FAULT, "ZD602": FAULT}
    assert {one.where for one in findings if one.severity is FAULT} == {"node 1 (host-1)"}


def test_rates_say_what_states_elsewhere_cost() -> None:
    """12 bytes of masters and states a parameter: 12 GB / 4 GB/s and 12 / 6 on a disk, 12 / 20 both ways at once."""
    found = {one.code: one.found for one in judged(world(2))}
    assert found["ZD605"] == (
        "6,000 MB/s written, 4,000 MB/s read past the page cache: 5.0 s a step per 10⁹ parameters"
    )
    assert found["ZD204"] == (
        "25.0 GB/s to the device, 24.0 to the host, 20.0 each way at once: 0.60 s a step per 10⁹ parameters"
    )


def test_ranks_on_one_device_are_named() -> None:
    ranks = world(4, ranks_a_node=4)
    ranks[3] = on("devices", used=Device("H200", "GPU-2"))(ranks[3])
    findings = judged(ranks)
    assert bad(findings) == {"ZD202": WARNING}
    shared = next(one for one in findings if one.severity is WARNING)
    assert shared.where == "ranks 2, 3 (host-0)"
    assert "ranks 2, 3 share H200 GPU-2" in shared.found


def test_what_several_machines_need_one_does_not() -> None:
    """Loopback, and a name that cannot be looked up, are no fault where all ranks are on one machine."""
    alone = [replace(one, network=replace(one.network, own=["127.0.1.1"])) for one in TOGETHER]
    assert bad(judged(alone)) == {}
    nameless = [replace(one, network=network(0, own=[], own_error="unknown")) for one in TOGETHER]
    assert bad(judged(nameless)) == {"ZD303": WARNING}


def test_a_node_that_all_slow_pairs_have_in_common_is_named() -> None:
    ranks = world(4)
    pairs = [Pair(a, b, 1, 1.0, 0.1 if 2 in (a, b) else 5.0) for a in range(4) for b in range(a + 1, 4)]
    findings = judged(ranks, replace(group_facts(ranks), pairs=pairs))
    slow = next(one for one in findings if one.code == "ZD702")
    assert "All 3 slow pairs have node 2 (host-2)" in slow.meaning
    one_link = [replace(pair, gb_per_s=0.1 if (pair.first, pair.second) == (1, 3) else 5.0) for pair in pairs]
    slow = next(
        one for one in judged(ranks, replace(group_facts(ranks), pairs=one_link)) if one.code == "ZD702"
    )
    assert slow.found.startswith("nodes 1 (host-1) and 3 (host-3): 0.1 GB/s")
    assert "All" not in slow.meaning


def test_cores_are_counted_over_the_ranks_of_a_machine() -> None:
    ranks = [replace(one, processor=Processor(64, [5], None, 0.0)) for one in TOGETHER]  # pinned to one
    assert bad(judged(ranks)) == {"ZD502": WARNING}
    apart = [replace(one, processor=Processor(64, [one.seat.rank], None, 0.0)) for one in ranks]
    assert bad(judged(apart)) == {}


def test_what_is_no_fault() -> None:
    """A machine without devices, skew below its error, a slow link within a machine, sockets that were asked for."""
    cpu, slow = Devices(None, 0, 0, False, 0), AllReduce(2**24, 0.01, 1.0, "gloo", True)
    assert judge_devices(cpu).severity is Severity.OK
    assert judge_all_reduce(slow, None).severity is Severity.OK
    ranks = world(2)
    noisy = replace(group_facts(ranks), offsets=[Offset(0.0, 0.0), Offset(2.0, 1.9)])
    assert bad(judged(ranks, noisy)) == {}
    ranks = [replace(one, limits=replace(LIMITS, cma="0")) for one in TOGETHER]
    assert bad(judged(ranks, replace(group_facts(ranks), routes=["sockets"] * 2))) == {}


@pytest.mark.parametrize(
    ("wanted", "names"),
    [
        ("eth1", ["eth10", "eth1"]),
        ("=eth1", ["eth1"]),
        ("^eth,docker", ["lo"]),
        ("^=lo", ["eth0", "docker0", "eth10", "eth1"]),
        ("ib", []),
    ],
)
def test_nccls_rules_for_interfaces(wanted: str, names: list[str]) -> None:
    interfaces = [
        LOOPBACK,
        Interface("eth0", True, False, ["10.0.0.1"], 1500),
        Interface("docker0", True, False, ["172.17.0.1"], 1500),
        Interface("eth10", True, False, ["10.0.1.1"], 1500),
        Interface("eth1", False, False, [], 1500),
    ]
    assert [one.name for one in nccl_takes(interfaces, wanted)] == names


SEATS = [seat(rank, ranks_a_node=2) for rank in range(8)]


def test_places_are_whole_nodes_where_they_can_be() -> None:
    assert where(SEATS, SEATS) == ""
    assert where(SEATS[2:4], SEATS) == "node 1 (host-1)"
    assert where(SEATS[2:], SEATS) == "nodes 1–3 (host-1, host-2, host-3)"
    assert where([SEATS[3]], SEATS) == "rank 3 (host-1)"
    assert where([SEATS[0], *SEATS[2:5]], SEATS) == "ranks 0, 2–4 (host-0, host-1, host-2)"


def test_ranks_with_the_same_verdict_share_a_finding_and_of_a_machine_the_first_is_asked() -> None:
    findings = by_rank("ZD403", [(one, ok("few" if one.rank % 2 else "many")) for one in SEATS])
    assert [(one.found, one.where) for one in findings] == [
        ("many", "ranks 0, 2, 4, 6 (host-0, host-1, host-2, host-3)"),
        ("few", "ranks 1, 3, 5, 7 (host-0, host-1, host-2, host-3)"),
    ]
    findings = by_machine("ZD401", [(one, ok(str(one.rank))) for one in SEATS])
    assert [one.found for one in findings] == ["0", "2", "4", "6"]
    assert [one.where[:6] for one in findings] == [f"node {node}" for node in range(4)]


def on_hosts(ranks: list[RankFacts]) -> list[RankFacts]:
    return [replace(one, devices=Devices(None, 0, 0, False, 0)) for one in ranks]


def paces(*speeds: float) -> Paces:
    pace = Pace(20.0, 1.0, 10.0, 1e-6)
    return Paces(1, pace, pace, list(speeds))


def hosts_found(ranks: list[RankFacts], *speeds: float) -> Finding:
    ranks = on_hosts(ranks)
    findings = judged(ranks, replace(group_facts(ranks), paces=paces(*speeds)))
    assert set(bad(findings)) <= {"ZD504"}
    return next(one for one in findings if one.code == "ZD504")


def test_equal_hosts_are_well_though_no_two_measurements_are_equal() -> None:
    ranks = world(4, ranks_a_node=2)
    less = [
        on("host", memory={"boot-0": 170 * GIB + one.seat.rank})(one) if one.seat.node == 0 else one
        for one in ranks
    ]
    found = hosts_found(less, 20.0, 15.0, 13.0, 19.0)
    assert (found.severity, found.remedy) == (Severity.OK, "")
    assert found.found == "a rank has 107 GB of memory; 32 cores; 20 GFLOP/s"
    assert hosts_found([ranks[0]], 20.0).severity is Severity.OK
    assert next(one for one in judged(ranks) if one.code == "ZD504").severity is Severity.SKIPPED  # devices


@pytest.mark.parametrize(
    ("change", "speeds", "found", "remedy"),
    [
        # A smaller machine, groups of its ranks, and one group of all of them.
        (on("host", memory={"boot-1": 100 * GIB}), (9, 9, 9), "but 53.7 on node 1 (host-1)", "shares="),
        (lambda one: on("host", memory={"boot-1": 200 * GIB, f"g{one.seat.rank}": 20 * GIB})(one),
         (9, 9, 9), "but 21.5 on node 1", "shares="),
        (on("host", memory={"boot-1": 200 * GIB, "job": 80 * GIB}), (9, 9, 9), "but 42.9 on node 1", "shares="),
        (on("processor", cores=32, allowed=list(range(32))), (9, 9, 9), "32 cores, but 16 on node 1", "pace="),
        (on("host", quotas={"q": 4.0}), (9, 9, 9), "32 cores, but 2 on node 1", "pace="),
        (on("host"), (9, 9, 4), "9 GFLOP/s, but 4 on rank 3 (host-1)", "pace="),
    ],
)  # fmt: skip
def test_unequal_hosts_are_named(change: Change, speeds: tuple[float, ...], found: str, remedy: str) -> None:
    ranks = [change(one) if one.seat.node == 1 else one for one in world(4, ranks_a_node=2)]
    said = hosts_found(ranks, 9, *speeds)
    assert said.severity is WARNING
    assert found in said.found
    assert said.found.count("but") == 1
    assert remedy in said.remedy
    assert "docs/unequal.md" in said.remedy


def test_fewer_ranks_on_an_equal_host_have_more_each() -> None:
    """Three ranks and one: the memory of a rank is a third there, and so are its cores."""
    ranks = world(3, ranks_a_node=3)
    alone = replace(
        ranks[0], seat=replace(ranks[0].seat, rank=3, node=1, machine="host-1/boot", host="host-1")
    )
    said = hosts_found([*ranks, on("host", memory={"boot-1": 200 * GIB})(alone)], 9, 9, 9, 9)
    assert "215 GB of memory, but 71.6 on node 0 (host-0)" in said.found
    assert "64 cores, but 21.3 on node 0" in said.found
    assert "shares=" in said.remedy
    assert "pace=" in said.remedy


def test_speeds_on_a_busy_machine_are_not_judged() -> None:
    ranks = [on("processor", load=70.0)(one) for one in on_hosts(TOGETHER)]
    findings = judged(ranks, replace(group_facts(ranks), paces=paces(9, 2)))
    assert bad(findings) == {"ZD503": WARNING}


@pytest.mark.parametrize(
    ("names", "proposed"),
    [
        (["NVIDIA H100 80GB HBM3", "NVIDIA L40S"], "shares=(5, 3)"),
        (["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"], "equal shares"),
        (["NVIDIA H100 80GB HBM3", "NVIDIA T4"], 'shares="memory"'),
    ],
)
def test_unequal_devices_get_shares_by_their_memory(names: list[str], proposed: str) -> None:
    verdict = judge_same([Device(name, "") for name in names])
    assert verdict is not None
    assert verdict.severity is WARNING
    assert proposed in verdict.remedy
    assert "Pace" in verdict.remedy
