"""Ranks: what they find out together, and launches that fail or hang."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.doctor.healthy import SERVER, bad
from tests.support.distributed import run_alone, server_context
from tests.support.forked import launch_forks
from zerokit.doctor import examine as examination
from zerokit.doctor.examine import FAULTS, Plan, Report, examine
from zerokit.doctor.findings import Finding, Severity
from zerokit.errors import ZerokitError
from zerokit.launch.interrupts import Interrupts

# These depend on what else the machine does meanwhile.
BUSY = {"ZD305", "ZD502", "ZD503", "ZD603", "ZD701"}


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    server_context()  # its files lie elsewhere
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "ZEROKIT_CMA"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run").mkdir()
    return Plan(2, 1, tmp_path / "run", f"sqlite:///{tmp_path}/runs.db")


def examined(plan: Plan, what: str = "", **changes: Any) -> Report:
    """With the worker of `tests.doctor.wrapped`, in forks of the tests' server, and a tracking store that is well."""
    return run_alone(_examine_in_forks, replace(plan, **changes), what, dict(os.environ))  # type: ignore[no-any-return]


def _examine_in_forks(plan: Plan, what: str, variables: dict[str, str]) -> Report:
    os.environ |= variables | {"WRAPPED": what}
    tempfile.tempdir = None

    def instead(module: str, arguments: Sequence[str], **more: Any) -> None:
        launch_forks("tests.doctor.wrapped", arguments, **more, interrupts=interrupts)

    with Interrupts() as interrupts, mock.patch.object(examination, "look_at_tracking", return_value=SERVER):
        return examine(plan, instead)


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
    assert {tuple(one.processor.allowed) for one in report.ranks} == {tuple(sorted(os.sched_getaffinity(0)))}
    assert all(abs(offset.seconds) < 30.0 for offset in report.group.offsets)
    # Nothing is left: no file of the trials, no folder of the job, no store.
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["run"]


def test_faults_that_ranks_see_together(plan: Plan) -> None:
    (plan.directory / "local").mkdir()
    report = examined(plan, "software clock elsewhere")
    found = faults(report)
    assert set(found) == {"ZD102", "ZD501", "ZD604"}
    assert "NCCL: none on rank 0, 2.1 on rank 1" in found["ZD102"].found
    assert all("node 1" in found[code].where for code in ("ZD501", "ZD604"))
    assert report.group is not None
    assert report.group.offsets[1].seconds == pytest.approx(3600.0, abs=30.0)


def test_ranks_that_may_not_read_each_other(plan: Plan) -> None:
    report = examined(plan, "unreadable", nodes=1, nproc_per_node=2)
    found = {one.code: one for one in report.findings}["ZD404"]
    assert (found.severity, found.found) == (Severity.WARNING, "through sockets")
    assert report.exit_code == 0


def test_a_rank_that_hangs_is_named_in_time(plan: Plan) -> None:
    report = examined(plan, "hang", timeout_s=12.0)
    assert report.exit_code == FAULTS
    found = faults(report)["ZD901"]
    assert found.where == f"node 1 ({socket.gethostname()}), rank 1"
    assert found.found == (
        "the ranks did not end within 12 s; last seen rank 1 looking around; rank 0 meeting the others"
    )
    # What rank 0 saw before is in the report.
    assert [one.seat.rank for one in report.ranks] == [0]


def test_a_rank_that_dies_is_named(plan: Plan) -> None:
    found = faults(examined(plan, "die"))
    assert set(found) == {"ZD901"}
    assert "rank 1 (node 1, pid" in found["ZD901"].found
    assert "was killed by SIGKILL" in found["ZD901"].found
    assert found["ZD901"].where == f"node 1 ({socket.gethostname()}), rank 1"


def test_why_ranks_do_not_meet_is_told_beside(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that cannot start gloo for a wrong name of an interface: both are found."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "warp9")
    report = examined(plan)
    assert set(faults(report)) == {"ZD301", "ZD901"}
    assert report.group is None
    assert report.ranks
    assert faults(report)["ZD901"].where.startswith("node ")


def test_a_launcher_that_cannot_start(plan: Plan) -> None:
    def refuses(*arguments: Any, **more: Any) -> None:
        raise ZerokitError("node b: ssh: connect to host b port 22: No route to host")

    report = examine(plan, refuses)
    assert faults(report)["ZD901"].found == "node b: ssh: connect to host b port 22: No route to host"
    assert "ranks 0, 1 not running" in faults(report)["ZD901"].meaning
    report = examine(plan, lambda *arguments, **more: None)  # and one that brings nothing home
    assert faults(report)["ZD901"].found == "the ranks ended, but rank 0 left no result"
