"""Ranks: what they find out together, and launches that fail or hang."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.doctor.healthy import SERVER, bad
from tests.support.forked import ForkedRank
from zerokit.doctor import examine as examination
from zerokit.doctor.examine import FAULTS, Plan, Report, examine
from zerokit.doctor.findings import Finding, Severity
from zerokit.errors import ZerokitError
from zerokit.interrupts import Interrupts
from zerokit.launch import agents, ranks
from zerokit.launch.local import launch

# These depend on what else the machine does meanwhile.
BUSY = {"ZD305", "ZD502", "ZD503", "ZD504", "ZD603", "ZD605", "ZD701"}


def examined(plan: Plan, what: str = "", **changes: Any) -> Report:
    """With the worker of `tests.doctor.wrapped`, in forks of the tests' server, and a tracking store that is well."""
    with (
        Interrupts() as interrupts,
        mock.patch.object(ranks, "start_rank", ForkedRank),
        mock.patch.object(examination, "look_at_tracking", return_value=SERVER),
        mock.patch.object(examination, "WORKER", "tests.doctor.wrapped"),
        mock.patch.dict(os.environ, WRAPPED=what),
    ):
        return examine(replace(plan, **changes), partial(launch, interrupts=interrupts))


def faults(report: Report) -> dict[str, Finding]:
    return {one.code: one for one in report.findings if one.severity is Severity.FAULT}


def test_two_nodes_of_two_ranks_are_well(plan: Plan, tmp_path: Path) -> None:
    report = examined(plan, nproc_per_node=2, pairs=True)
    assert {code for code, how in bad(list(report.findings)).items() if how == "fault"} == set()
    assert set(bad(list(report.findings))) <= BUSY
    assert report.exit_code == 0
    assert report.group is not None
    assert [one.seat.rank for one in report.ranks] == [0, 1, 2, 3]
    assert [one.seat.node for one in report.ranks] == [0, 0, 1, 1]
    assert report.group.all_reduce is not None
    assert report.group.all_reduce.correct
    assert [(pair.first, pair.second) for pair in report.group.pairs] == [(0, 1)]
    assert [(link.axis, link.ranks) for link in report.group.axes] == [("inner", 2), ("outer", 2)]
    assert all(link.latency_s > 0 and link.gb_per_s > 0 for link in report.group.axes)
    assert report.group.routes == ["memory"] * 4
    assert report.group.paces is not None
    assert len(report.group.paces.by_rank) == 4
    assert all(one.host.memory.keys() == report.ranks[0].host.memory.keys() for one in report.ranks)
    # One rank of each node times the disk.
    assert [one.directory.rates is not None for one in report.ranks] == [True, False, True, False]
    assert {tuple(one.processor.allowed) for one in report.ranks} == {tuple(sorted(os.sched_getaffinity(0)))}
    assert all(abs(offset.seconds) < 30.0 for offset in report.group.offsets)
    # Nothing is left: no file of the trials, no folder of the job, no store.
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["run"]


def test_faults_that_ranks_see_together(plan: Plan) -> None:
    (plan.directory / "local").mkdir()
    report = examined(plan, "software clock elsewhere unreadable", nproc_per_node=2)
    found = faults(report)
    assert set(found) == {"ZD102", "ZD501", "ZD604"}
    ours = report.ranks[0].software.nccl or "none"  # torch for CPUs has none
    assert f"NCCL: {ours} on rank 0, 2, 3, 2.1 on rank 1" in found["ZD102"].found
    assert all("rank 1 " in found[code].where for code in ("ZD501", "ZD604"))
    assert report.group is not None
    assert report.group.offsets[1].seconds == pytest.approx(3600.0, abs=30.0)
    (routes,) = (one for one in report.findings if one.code == "ZD404")
    assert (routes.severity, routes.found) == (Severity.WARNING, "through sockets")


@pytest.mark.full
def test_a_rank_that_hangs_is_named_in_time(plan: Plan) -> None:
    report = examined(plan, "hang", timeout_s=40.0)
    assert report.exit_code == FAULTS
    found = faults(report)["ZD901"]
    host = socket.gethostname()
    assert found.found == (
        f"the ranks did not end within 40 s; last seen rank 1 on {host} looking around; rank 0 on {host} meeting the "
        "others"
    )
    # What rank 0 saw before is in the report.
    assert [one.seat.rank for one in report.ranks] == [0]


def test_a_rank_that_dies_is_named_and_so_is_a_full_disk(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "_LEAST_FREE", 2**62)
    found = faults(examined(plan, "die"))
    assert set(found) == {"ZD901"}
    assert "rank 1 (node 1, pid" in found["ZD901"].found
    assert "was killed by SIGKILL" in found["ZD901"].found
    assert "bytes left: make room" in found["ZD901"].found


def test_why_ranks_do_not_meet_is_told_beside(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that cannot start gloo for a wrong name of an interface: both are found."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "warp9")
    report = examined(plan)
    assert set(faults(report)) == {"ZD301", "ZD901"}
    assert report.group is None
    assert report.ranks


def test_a_launcher_that_cannot_start(plan: Plan) -> None:
    def refuses(*arguments: Any, **more: Any) -> None:
        raise ZerokitError("node b: ssh: connect to host b port 22: No route to host")

    report = examine(plan, refuses)
    assert faults(report)["ZD901"].found == "node b: ssh: connect to host b port 22: No route to host"
    assert "ranks 0, 1 not running" in faults(report)["ZD901"].meaning
    report = examine(plan, lambda *arguments, **more: None)  # and one that brings nothing home
    assert faults(report)["ZD901"].found == "the ranks ended, but rank 0 left no result"
