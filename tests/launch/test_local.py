"""Ranks of simulated nodes: they find their environment, a failed one is named, nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.launch.ranks import WORKLOAD, all_ended, require_two_nodes, started, wait_for
from tests.support.processes import children_of, words_of
from zerokit.errors import ScheduleError
from zerokit.interrupts import Interrupted, Interrupts
from zerokit.launch import rank
from zerokit.launch.failures import Failure, LaunchError, WorkerFailed, quote_tail
from zerokit.launch.local import launch
from zerokit.launch.ranks import start_rank


def run(folder: Path, logs: Path, what: str, *, nproc_per_node: int = 1, **more: Any) -> None:
    """On two nodes."""
    shape: dict[str, Any] = {"nodes": 2, "nproc_per_node": nproc_per_node, "log_dir": logs}
    with Interrupts() as interrupts:
        launch(WORKLOAD, [str(folder), what], **shape, interrupts=interrupts, **more)


def test_ranks_of_two_nodes_find_the_torchrun_environment(tmp_path: Path, logs: Path) -> None:
    run(tmp_path, logs, "finish", nproc_per_node=2, environment={"ADDED": "yes"})
    require_two_nodes(tmp_path, ranks_of_a_machine=4)


def failure(
    rank: int, exit_code: int, message: str = "", moment: float = 0.0, *, follows: bool = False
) -> Failure:
    return Failure(rank, rank // 2, 1000 + rank, exit_code, message, False, moment, follows=follows)


def test_causes_come_before_consequences() -> None:
    """A kill may be noticed late; SIGTERM asks a rank to end, beside one that failed or alone; clocks differ."""
    lost_its_peer = failure(0, 1, "connection closed", moment=1.0, follows=True)
    killed = failure(1, -signal.SIGKILL, moment=2.0)
    ended = failure(2, -signal.SIGTERM, moment=0.5)
    later = failure(3, 1, "connection closed", moment=1.5, follows=True)
    failed = failure(4, 1, "a fault", moment=3600.0)
    in_order = sorted([ended, later, failed, lost_its_peer, killed], key=lambda one: one.cause_order)
    assert in_order == [killed, failed, ended, lost_its_peer, later]


def test_of_a_long_line_the_end_is_shown() -> None:
    assert quote_tail(f"short\n{'x' * 9000} the last word") == f"  | short\n  | … {'x' * 486} the last word"


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (ScheduleError("rank 0 did not get through its all-gather"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("a fault"), False),
        (BrokenPipeError("Broken pipe"), False),
    ],
)
def test_a_rank_records_whether_it_lost_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, follows: bool
) -> None:
    monkeypatch.setenv("ZEROKIT_ERROR_FILE", str(tmp_path / "error.json"))
    rank._record(error)
    assert json.loads((tmp_path / "error.json").read_text())["follows"] is follows


def test_where_a_rank_has_no_folder_the_others_end(tmp_path: Path, logs: Path) -> None:
    (logs / "rank-1").touch()
    with pytest.raises(LaunchError, match="rank 1 cannot be started: File exists"):
        run(tmp_path, logs, "wait")
    assert all_ended(tmp_path)
    assert not [pid for pid in children_of(os.getpid()) if WORKLOAD in words_of(pid)]


def test_a_failure_in_one_line() -> None:
    ends = ((7, ""), (1, "plain words"), (-signal.SIGSEGV, ""), (-200, ""))
    assert [failure(3, code, message).describe() for code, message in ends] == [
        "rank 3 (node 1, pid 1003) failed: exit code 7",
        "rank 3 (node 1, pid 1003) failed: plain words",
        "rank 3 (node 1, pid 1003) was killed by SIGSEGV",
        "rank 3 (node 1, pid 1003) was killed by signal 200",
    ]


def test_a_failed_rank_ends_the_others_and_a_full_disk_is_named(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(WorkerFailed) as caught:
        run(tmp_path, logs, "exit")
    (failed,) = caught.value.failures  # the other was ended
    assert str(caught.value).splitlines() == [
        f"rank 1 (node 1, pid {failed.pid}) failed: exit code 7",
        "the disk of its log has 4096 bytes left: make room, or set TMPDIR to another",
        f"logs: {logs}",
    ]
    assert all_ended(tmp_path)


def test_where_no_further_rank_can_be_started_the_others_end(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(command: Sequence[str], variables: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
        if folder.name == "rank-1":
            wait_for(lambda: len(started(tmp_path)) == 1)
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start_rank(command, variables, folder)

    monkeypatch.setattr("zerokit.launch.ranks.start_rank", start)
    with pytest.raises(LaunchError, match="rank 1 cannot be started: Resource temporarily unavailable"):
        run(tmp_path, logs, "wait")
    assert all_ended(tmp_path)


@pytest.mark.parametrize("name", ["secrets", "queue", "psutil"])
def test_no_file_of_the_working_directory_takes_the_place_of_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / f"{name}.py").write_text("open('executed', 'w')\nraise ImportError\n")
    monkeypatch.chdir(tmp_path)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    variables |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    process = start_rank(["this"], variables | {"ZEROKIT_STARTER": str(os.getpid())}, tmp_path)
    assert process.wait() == 0
    assert "The Zen of Python" in (tmp_path / "stdout.log").read_text()
    assert not (tmp_path / "executed").exists()


def test_a_signal_ends_all_ranks(tmp_path: Path, logs: Path) -> None:
    def interrupt_once_started() -> None:
        if len(started(tmp_path)) == 2 and not sent:
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)

    sent: list[bool] = []
    with pytest.raises(Interrupted, match="SIGTERM"):
        run(tmp_path, logs, "wait", poll=interrupt_once_started)
    assert all_ended(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot tie a process to its parent")
def test_a_launcher_that_is_killed_takes_its_ranks_along(tmp_path: Path, logs: Path) -> None:
    code = "from tests.launch.test_local import *; run(Path(sys.argv[1]), Path(sys.argv[2]), 'wait')"
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(logs)]) as process:
        try:
            wait_for(lambda: len(started(tmp_path)) == 2)
        finally:
            process.kill()
    wait_for(lambda: all_ended(tmp_path))
