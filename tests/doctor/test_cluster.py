"""Three nodes with networks of their own: faults of wires and names that only appear between machines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.doctor.cluster import Cluster
from tests.support.distributed import server_context
from zerokit.doctor.examine import Plan, Report, examine
from zerokit.doctor.findings import Finding, Severity


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    server_context()  # its files lie elsewhere
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "ZEROKIT_CMA"):
        monkeypatch.delenv(name, raising=False)
    return Plan(3, 1, tmp_path, f"sqlite:///{tmp_path}/runs.db", pairs=True, timeout_s=150.0)


def of(report: Report, code: str) -> Finding:
    """The worst of that check."""
    order = list(Severity)
    return max(
        (one for one in report.findings if one.code == code), key=lambda one: order.index(one.severity)
    )


@pytest.mark.netns
def test_a_slow_wire_a_smaller_mtu_and_a_missing_name(plan: Plan, tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        cluster.slow_down(2, "80mbit")
        cluster.on(1, "ip link set eth0 mtu 1400")
        cluster.names(1, [0, 1])
        report = examine(plan, cluster.launch)
    assert of(report, "ZD901").severity is Severity.OK
    assert [one.seat.host for one in report.ranks] == ["node-0", "node-1", "node-2"]
    assert of(report, "ZD301").found.startswith("by the host's name: eth0")

    slow = of(report, "ZD702")
    assert slow.severity is Severity.WARNING
    assert "All 2 slow pairs have node 2 (node-2)" in slow.meaning
    assert of(report, "ZD701").severity is Severity.WARNING

    mtu = of(report, "ZD305")
    assert mtu.severity is Severity.WARNING
    assert "1400 on eth0, node 1 (node-1)" in mtu.found

    name = of(report, "ZD304")
    assert (name.severity, name.where) == (Severity.WARNING, "node 1 (node-1)")
    assert name.found.startswith("node-2 cannot be looked up: ")
    assert report.exit_code == 0


@pytest.mark.netns
def test_nodes_that_are_named_after_loopback_do_not_meet(plan: Plan, tmp_path: Path) -> None:
    """Debian's installer writes such a line. gloo then listens on each node's own loopback."""
    with Cluster(tmp_path) as cluster:
        for node in range(3):
            table = tmp_path / f"hosts-{node}"
            table.write_text(f"127.0.1.1 node-{node}\n")
        report = examine(replace(plan, timeout_s=8.0), cluster.launch)
    assert report.exit_code == 5
    assert of(report, "ZD901").severity is Severity.FAULT
    assert of(report, "ZD301").severity is Severity.FAULT
    assert "loopback (127.0.1.1)" in of(report, "ZD301").found
