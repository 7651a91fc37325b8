"""Three nodes with networks of their own: faults of wires and names that only appear between machines."""

from __future__ import annotations

import subprocess
from dataclasses import replace

import pytest

from tests.doctor.cluster import NODES, launcher
from tests.support.namespaces import HUB, Hosts, wired_hosts
from zerokit.doctor.examine import Plan, Report, examine
from zerokit.doctor.findings import Finding, Severity


def of(report: Report, code: str) -> Finding:
    """The worst of that check."""
    order = list(Severity)
    return max(
        (one for one in report.findings if one.code == code), key=lambda one: order.index(one.severity)
    )


def change_link(hosts: Hosts, host: str, line: str) -> None:
    subprocess.run(["ip", "netns", "exec", hosts.namespace(host), *line.split()], check=True)


@pytest.mark.netns
def test_a_slow_wire_and_a_smaller_mtu(plan: Plan) -> None:
    plan = replace(plan, nodes=3, pairs=True, timeout_s=150.0)
    with wired_hosts(NODES, servers=False) as hosts:
        for host, end in (("node-2", "eth0"), (HUB, "to-node-2")):
            change_link(hosts, host, f"tc qdisc add dev {end} root tbf rate 80mbit burst 64kb latency 200ms")
        change_link(hosts, "node-1", "ip link set eth0 mtu 1400")
        report = examine(plan, launcher(hosts))
    assert of(report, "ZD901").severity is Severity.OK
    assert [one.seat.host for one in report.ranks] == ["node-0", "node-1", "node-2"]

    slow = of(report, "ZD702")
    assert slow.severity is Severity.WARNING
    assert "All 2 slow pairs have node 2 (node-2)" in slow.meaning
    assert of(report, "ZD701").severity is Severity.WARNING

    mtu = of(report, "ZD305")
    assert mtu.severity is Severity.WARNING
    assert "1400 on eth0, node 1 (node-1)" in mtu.found

    assert report.exit_code == 0


@pytest.mark.netns
def test_nodes_that_are_named_after_loopback_do_not_meet(plan: Plan) -> None:
    """Debian's installer writes such a line. gloo then listens on each node's own loopback."""
    with wired_hosts(NODES, servers=False) as hosts:
        for host in NODES:
            (hosts.folder / f"hosts-{host}").write_text(f"127.0.1.1 {host}\n")
        report = examine(replace(plan, nodes=3, timeout_s=25.0), launcher(hosts))
    assert report.exit_code == 5
    assert of(report, "ZD901").severity is Severity.FAULT
    assert of(report, "ZD303").severity is Severity.FAULT
    assert "loopback (127.0.1.1)" in of(report, "ZD303").found
