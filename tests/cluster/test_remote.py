"""Nodes that are reached by a command: here it runs on this machine, and all that lies between is real."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zerokit.cluster.remote
from tests.launch.ranks import ROOT, WORKLOAD, all_ended, require_two_nodes, started, wait_for
from tests.support.processes import children_of, words_of
from zerokit.cluster import mail
from zerokit.cluster.remote import RemoteHost, launch_on, node_command
from zerokit.interrupts import Interrupted, Interrupts
from zerokit.launch.failures import LaunchError, WorkerFailed

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems cannot tie a process to its parent"
)

HASTY = f"exec {sys.executable} -m tests.cluster.hasty_node"


@pytest.fixture(autouse=True)
def _copies_stay_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "copies").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "copies"))
    monkeypatch.setattr(tempfile, "tempdir", None)


def remote(host: str = "first", line: str | None = None) -> RemoteHost:
    """This machine under a name, reached by a shell that runs this line, or by default the node program.

    The line gets the arguments of that program.
    """

    def command(port: int, name: str) -> list[str]:
        if line is None:
            return ["sh", "-c", node_command(sys.executable, "127.0.0.1", port, name)]
        return ["sh", "-c", f"{line} 127.0.0.1 {port} {name}"]

    return RemoteHost(host, command)


def hasty() -> list[RemoteHost]:
    """Two nodes with little patience."""
    return [remote("first", HASTY), remote("second", HASTY)]


def run(
    folder: Path,
    logs: Path,
    what: str,
    *machines: RemoteHost,
    nproc_per_node: int = 1,
    copied: str = "",
    **more: Any,
) -> None:
    words = [str(folder), what, *([copied] if copied else [])]
    more = {"master_addr": "127.0.0.1", "nproc_per_node": nproc_per_node, "log_dir": logs, **more}
    with Interrupts() as interrupts:
        launch_on(
            machines or (remote("first"), remote("second")), WORKLOAD, words, interrupts=interrupts, **more
        )


def no_copies(folder: Path) -> bool:
    return not list((folder / "copies").iterdir())


def test_ranks_of_two_nodes_find_the_torchrun_environment(tmp_path: Path, logs: Path) -> None:
    """In a copy of the job's folder, from which their files come home."""
    (logs / "job").write_text("work")
    run(tmp_path, logs, "finish", nproc_per_node=2, environment={"ADDED": "yes"}, copied=str(logs / "job"))
    require_two_nodes(tmp_path, ranks_of_a_machine=2)
    assert [(logs / f"result-{rank}").read_text() for rank in range(4)] == ["work"] * 4
    assert no_copies(tmp_path)


def test_results_come_whole_and_of_long_logs_the_end(tmp_path: Path, logs: Path) -> None:
    """What a login shell prints is kept as the connection's log."""
    noise = (
        "export OMP_NUM_THREADS=1; echo Welcome; echo '[1, 2]'; printf '\\377\\n'; echo a warning >&2; echo; "
    )
    (logs / "job").write_text("work")
    noisy = remote("first", noise + HASTY)
    run(tmp_path, logs, "talk", noisy, copied=str(logs / "job"))
    assert (logs / "result-0").stat().st_size == 12 << 20
    log = logs / "rank-0" / "stdout.log"
    assert log.stat().st_size == 1 << 20
    assert log.read_text().endswith("the last line\n")
    said = (logs / "node-0" / "connection.log").read_bytes()
    assert sorted(said.split(b"\n")) == sorted([b"Welcome", b"[1, 2]", b"\xff", b"a warning", b"", b""])


def test_logs_are_sent_while_they_grow(tmp_path: Path, logs: Path) -> None:
    """Where somebody follows them; the ranks go on until their logs are here. What is shown stays, however long."""

    def look() -> None:
        texts = [path.read_text() for path in logs.glob("rank-*/stdout.log")]
        if sum("a first word" in text for text in texts) == 2:
            (tmp_path / "heard").touch()

    run(tmp_path, logs, "speak", *hasty(), follow=True, poll=look)
    log = (logs / "rank-1" / "stdout.log").read_text()
    assert log.startswith("a first word\n")
    assert log.endswith("0123456789 a last word\n")


def test_a_rank_that_raises_is_named_with_the_end_of_its_stderr(tmp_path: Path, logs: Path) -> None:
    with pytest.raises(WorkerFailed) as caught:
        run(tmp_path, logs, "raise")
    said = str(caught.value)
    pid = started(tmp_path)[1]["pid"]
    assert said.startswith(
        f"rank 1 (node 1 on second, pid {pid}) failed: ValueError: a fault of the program\n"
    )
    assert "the end of rank 1's stderr:" in said
    assert "0 a last word\n" in said
    assert len(said) < 1 << 16
    assert f"logs: {logs}" in said
    assert all_ended(tmp_path)
    assert no_copies(tmp_path)


def test_a_full_disk_of_a_node_is_named(tmp_path: Path, logs: Path) -> None:
    said = r"(?s)failed: ValueError.*\nnode 1 on second: the disk of its log has \d+ bytes left: make room"
    full = remote("second", f"FULL=1 {HASTY}")
    with pytest.raises(WorkerFailed, match=said):
        run(tmp_path, logs, "raise", remote("first", HASTY), full)


def once_started(folder: Path, ranks: int, action: Callable[[], None]) -> Callable[[], None]:
    """A `poll` that acts once, when so many ranks have begun."""
    done: list[bool] = []

    def poll() -> None:
        if not done and len(started(folder)) == ranks:
            done.append(True)
            action()

    return poll


def test_a_signal_ends_all_ranks(tmp_path: Path, logs: Path) -> None:
    poll = once_started(tmp_path, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Interrupted, match="SIGTERM"):
        run(tmp_path, logs, "wait", *hasty(), poll=poll)
    assert len(started(tmp_path)) == 2
    assert all_ended(tmp_path)
    assert no_copies(tmp_path)


def node_programs(launcher: int) -> list[int]:
    """The processes of the node program that a launcher has started, the first node's first."""
    return [child for child in children_of(launcher) if ".cluster." in " ".join(words_of(child))]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (
            signal.SIGKILL,
            "(?s)^node 1 on second was lost while its ranks ran: the connection ended with exit code -9\n.*look at",
        ),
        (signal.SIGTERM, "(?s)^node 1 on second has ended: interrupted by SIGTERM\n.*logs"),
        (signal.SIGINT, "(?s)^node 1 on second has ended: interrupted by SIGINT\n.*logs"),
        (
            signal.SIGSTOP,
            "^node 1 on second: nothing was heard of it for 6 s: its program was killed or is stop",
        ),
    ],
)
def test_a_node_program_that_is_killed_or_stopped_takes_its_ranks_along(
    tmp_path: Path, logs: Path, monkeypatch: pytest.MonkeyPatch, number: int, said: str
) -> None:
    """While it trains it is heard all the time, so the silence is its end, and nobody waits for it any more."""
    monkeypatch.setattr(mail, "SILENCE_SECONDS", 6.0)
    monkeypatch.setattr(zerokit.cluster.remote, "_END_SECONDS", 1000.0)
    poll = once_started(tmp_path, 2, lambda: os.kill(node_programs(os.getpid())[1], number))
    with pytest.raises(WorkerFailed, match=said):
        run(tmp_path, logs, "wait", *hasty(), poll=poll)
    wait_for(lambda: all_ended(tmp_path))


def test_ranks_may_save_when_their_node_program_is_told_to_end(tmp_path: Path, logs: Path) -> None:
    """As Slurm tells a step's processes when the job is cancelled or its time is over."""
    programs: list[int] = []

    def tell() -> None:
        programs.extend(node_programs(os.getpid()))
        for program in programs:
            os.kill(program, signal.SIGTERM)

    run(tmp_path, logs, "save", *hasty(), poll=once_started(tmp_path, 2, tell))
    assert len(programs) == 2
    assert len(list(tmp_path.glob("saved-*"))) == 2
    assert all_ended(tmp_path)


def test_a_stopped_rank_is_named_and_all_end(tmp_path: Path, logs: Path) -> None:
    said = r"rank 1 \(node 1 on second, pid \d+\) was stopped \(SIGSTOP\) for 2 s, and killed then"
    with pytest.raises(WorkerFailed, match=f"^{said}"):
        run(tmp_path, logs, "stop", *hasty())
    assert all_ended(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("exec no-such-python -m zerokit", "did not start with exit code 127.*\n.*not found"),
        (
            "echo Permission denied >&2; exit 255;",
            "did not start with exit code 255\n.*Permission denied\ngive this user's key",
        ),
        (
            f"PACKAGE={ROOT / 'tests'} {HASTY}",
            "has .*zerokit's files .*, .*but this machine has .*--remote-python",
        ),
    ],
)
def test_a_node_that_cannot_take_part_is_named(tmp_path: Path, logs: Path, line: str, said: str) -> None:
    other = remote("second", line)
    with pytest.raises(LaunchError, match=f"(?s)^node 1 on second.*{said}"):
        run(tmp_path, logs, "finish", remote(), other)
    assert started(tmp_path) == {}
    assert no_copies(tmp_path)


def test_a_host_that_never_answers_is_given_up(tmp_path: Path, logs: Path) -> None:
    silent = remote("second", "sleep 1000; true")
    with pytest.raises(LaunchError, match="no-such-srun cannot be run"):
        run(tmp_path, logs, "finish", RemoteHost("first", lambda port, name: ["no-such-srun"]))
    shutil.rmtree(logs / "node-0")
    with pytest.raises(LaunchError, match=r"node 1 on second did not answer in time: .*--connect-timeout"):
        run(tmp_path, logs, "finish", remote("first", "sleep 1000; true"), silent, connect_seconds=2.0)
    assert not [pid for pid in children_of(os.getpid()) if "sleep 1000; true" in " ".join(words_of(pid))]


LAUNCHER = """
import sys, pathlib
from tests.cluster import test_remote
test_remote.run(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), "wait", *test_remote.hasty())
"""


def test_a_launcher_that_says_nothing_any_more_is_left(tmp_path: Path, logs: Path) -> None:
    """Also while a node has much to say; one that is killed is lost in the same way."""
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(tmp_path), str(logs)]) as launcher:
        try:
            wait_for(lambda: len(started(tmp_path)) == 2)
            launcher.send_signal(signal.SIGSTOP)
            for copy in (tmp_path / "copies").iterdir():
                (copy / "progress").write_bytes(os.urandom(1 << 20))
            wait_for(lambda: all_ended(tmp_path))
            wait_for(lambda: no_copies(tmp_path))
            launcher.send_signal(signal.SIGCONT)
            assert launcher.wait() == 1
        finally:
            launcher.kill()


def test_a_nodes_command_line_survives_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tmp_path / "it's a $(touch here); folder"
    odd.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{odd}")
    program = tmp_path / "py thon"
    program.write_text('#!/bin/sh\npwd\necho "$PYTHONPATH"\necho "$@"\n')
    program.chmod(0o755)
    monkeypatch.chdir(odd)
    line = ["sh", "-c", node_command(str(program), "127.0.0.1", 7, "1")]
    monkeypatch.chdir(tmp_path)
    for folder in (odd, tmp_path):  # the machine has it, or not
        done = subprocess.run(line, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == [
            str(folder),
            f"{ROOT}:{odd}",
            "-P -m zerokit.cluster.member 127.0.0.1 7 1",
        ]
        assert done.stderr == ""
        shutil.rmtree(odd, ignore_errors=True)
