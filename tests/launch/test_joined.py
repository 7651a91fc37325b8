"""Ranks that somebody else has started meet over a real store, and do together what the first one says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.launch.member import be_member
from tests.launch.ranks import ROOT, all_ended, started, wait_for
from tests.support.forked import ForkedProcess
from tests.support.processes import parent_of
from zerokit.launch import joined
from zerokit.launch.child import share_cores
from zerokit.launch.failures import LaunchError
from zerokit.launch.interrupts import Interrupts
from zerokit.launch.meeting import Meeting, Patience
from zerokit.launch.membership import Membership, find_membership
from zerokit.launch.network import free_port

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems cannot tie a process to its parent"
)

Member = ForkedProcess | subprocess.Popen[str]
Scheme = Callable[[int, int], dict[str, str]]


def torchrun(rank: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    names["MASTER_PORT"] = port
    return {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}


def pod(rank: int, port: int) -> dict[str, str]:
    """A node whose rank is still to be started."""
    names = {"NODE_RANK": rank, "NNODES": 2, "NPROC_PER_NODE": 1, "MASTER_PORT": port}
    return {f"PET_{name}": str(value) for name, value in names.items()} | {"PET_MASTER_ADDR": "127.0.0.1"}


class Members:
    """Starts them, and ends what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.processes = folder, free_port(), list[Member]()
        self.started = 0
        self.copies = folder / "copies"
        self.copies.mkdir()
        (folder / "logs").mkdir()

    def start(
        self, environment: dict[str, str], what: str, times: int = 1, *, fresh: bool = False, **more: str
    ) -> Member:
        """A fork of the tests' server, which has torch already, or a fresh process."""
        kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        variables = kept | {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.copies)}
        self.started += 1
        outputs = self.folder / "outputs" / str(self.started)
        outputs.mkdir(parents=True)
        arguments = [str(self.folder), what, str(times)]
        process: Member
        if fresh:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.launch.member", *arguments],
                env=variables | environment | more,
                stderr=subprocess.PIPE,
                text=True,
            )
        else:
            process = ForkedProcess(outputs, variables | environment | more, be_member, *arguments)
        self.processes.append(process)
        return process

    def ends(self) -> list[tuple[int | None, str]]:
        """Every member's exit code and stderr."""
        said = [process.communicate(timeout=800)[1] for process in self.processes]
        return [(process.returncode, text) for process, text in zip(self.processes, said, strict=True)]


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    found = Members(tmp_path)
    yield found
    for process in found.processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("scheme", "nodes", "times", "what", "size"),
    [(torchrun, ["0", "0"], 2, "finish", 4), (pod, ["0", "1"], 1, "noise", 12 << 20)],
)
def test_members_launch_together(
    members: Members, tmp_path: Path, scheme: Scheme, nodes: list[str], times: int, what: str, size: int
) -> None:
    """Once or twice; what the other's rank wrote beside its job comes to the leader. The exit code is the leader's.

    Results come whole: also more than the store takes at once, in words that do not shrink.
    """
    for rank in range(2):
        members.start(scheme(rank, members.port), what, times=times)
    assert members.ends() == [(3, ""), (3, "")]
    ranks = started(tmp_path)
    assert [ranks[rank]["GROUP_RANK"] for rank in range(2)] == nodes
    assert {rank["WORLD_SIZE"] for rank in ranks.values()} == {"2"}
    assert len({rank["MASTER_PORT"] for rank in ranks.values()} - {str(members.port)}) == 1
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert {rank["OMP_NUM_THREADS"] for rank in ranks.values()} == {str(threads)}
    for number in range(times):
        results = (tmp_path / "logs" / str(number)).glob("result-*")
        assert {path.name: path.stat().st_size for path in results} == {"result-0": size, "result-1": size}
    assert list(members.copies.glob("zerokit-*")) == []


def test_ranks_that_torchrun_has_restarted_do_not_take_up_what_the_former_ones_said(
    members: Members, tmp_path: Path
) -> None:
    """Its agent's store outlives them, with their launches and their end in it."""
    store = TCPStore("127.0.0.1", members.port, is_master=True, wait_for_workers=False)
    (tmp_path / "logs").rmdir()
    pids = []
    for _ in range(2):
        (tmp_path / "logs").mkdir()
        for rank in (1, 0):  # who follows is there first, and finds the former leader's words
            members.start(torchrun(rank, members.port), "finish", TORCHELASTIC_USE_AGENT_STORE="True")
            time.sleep(0.2)
        assert members.ends() == [(3, ""), (3, "")]
        pids.append({rank["pid"] for rank in started(tmp_path).values()})
        members.processes.clear()
        shutil.rmtree(tmp_path / "logs")
    assert len(pids[0] | pids[1]) == 4
    del store


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("raise", r"(?s)rank 1 \(node 0, pid \d+\) failed: ValueError: a fault.*stderr:.*\| a last word"),
        ("stop", r"rank 1 \(node 0, pid \d+\) was stopped \(SIGSTOP\) for 2 s, and killed then"),
    ],
)
def test_a_rank_that_fails_is_named(members: Members, tmp_path: Path, what: str, said: str) -> None:
    leader = members.start(torchrun(0, members.port), what)
    members.start(torchrun(1, members.port), what)
    (code, text), (followers_code, _) = members.ends()
    assert (leader.returncode, code, followers_code) == (1, 1, 1)
    last = text.rpartition("WorkerFailed: ")[2]
    assert re.match(said, last), text
    assert all_ended(tmp_path)
    assert list(members.copies.glob("zerokit-*")) == []


@pytest.mark.parametrize("node", [0, 1])
def test_a_stopped_agent_of_a_whole_node_is_named(members: Members, tmp_path: Path, node: int) -> None:
    for rank in range(2):
        members.start(pod(rank, members.port), "wait")
    wait_for(lambda: len(started(tmp_path)) == 2)
    os.kill(parent_of(started(tmp_path)[node]["pid"]), signal.SIGSTOP)
    (code, text), _ = members.ends()
    assert code == 1
    said = f"WorkerFailed: node {node}: its torchrun agent was stopped (SIGSTOP) for 2 s, and killed then"
    assert said in text
    assert all_ended(tmp_path)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {"ASKED": "another one"},
            r"UsageError: all ranks must run the same command, but number 1 on \S+ was given \"'another one'\", "
            "and number 0 'bench'",
        ),
        (
            {"PACKAGE": "zerokit"},
            r"LaunchError: number 1 on \S+ has .*zerokit's files \w{12}, .*but this machine has .*: install the same",
        ),
    ],
)
def test_another_command_or_program_is_refused(
    members: Members, tmp_path: Path, other: dict[str, str], said: str
) -> None:
    """A program under the same version that differs by one byte in one file, as a node has it that was not updated."""
    package = tmp_path / "zerokit"
    shutil.copytree(ROOT / "zerokit", package, ignore=shutil.ignore_patterns("__pycache__"))
    with (package / "bench" / "__init__.py").open("a") as file:
        file.write("#")
    members.start(torchrun(0, members.port), "finish")
    where = {name: str(package) if name == "PACKAGE" else value for name, value in other.items()}
    members.start(torchrun(1, members.port) | where, "finish")
    (code, text), (followers_code, _) = members.ends()
    assert (code, followers_code) == (1, 1)
    assert re.search(said, text), text
    assert started(tmp_path) == {}


def test_a_leader_whose_follower_stays_away_says_so(members: Members) -> None:
    meeting = Meeting(member(0, members.port))
    meeting.patience = Patience(meet=1.0)  # to make the store may take longer
    try:
        with pytest.raises(
            LaunchError, match=r"number 1 of 2 that torchrun started has not joined within 1 s"
        ):
            joined.Leader(meeting, [], Interrupts())
    finally:
        meeting.close()


def member(rank: int, port: int) -> Membership:
    found = find_membership(torchrun(rank, port))
    assert found is not None
    return found


def test_a_follower_whose_leader_stays_away_says_so(members: Members) -> None:
    with pytest.raises(
        LaunchError, match=r"rank 1 of 2 .* no rendezvous with the others at 127.0.0.1:\d+ within 1 s"
    ):
        Meeting(member(1, members.port), Patience(meet=1.0))


def test_a_name_that_leads_nowhere_is_told(members: Members) -> None:
    lost = replace(member(1, members.port), master_addr="no-such-host.invalid")
    with pytest.raises(LaunchError, match=r"no-such-host.invalid, does not resolve on .*: set MASTER_ADDR"):
        Meeting(lost, Patience(meet=2.0))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_leader_that_is_gone_is_left(members: Members, tmp_path: Path, number: int) -> None:
    """In a few lines, without those of torch's store."""
    leader = members.start(torchrun(0, members.port), "wait")
    follower = members.start(torchrun(1, members.port), "wait", fresh=True)  # torch still has to be hushed
    wait_for(lambda: len(started(tmp_path)) == 2)
    leader.send_signal(number)
    _, said = follower.communicate(timeout=800)
    assert follower.returncode == 1
    assert "LaunchError: rank 1 of 2 that torchrun started: " in said
    assert "[W" not in said
    rank = started(tmp_path)[1]["pid"]
    assert not Path(f"/proc/{rank}").exists()
    leader.kill()
    wait_for(lambda: all_ended(tmp_path))


def test_a_follower_that_is_gone_is_named(members: Members, tmp_path: Path) -> None:
    leader = members.start(torchrun(0, members.port), "wait")
    follower = members.start(torchrun(1, members.port), "wait")
    wait_for(lambda: len(started(tmp_path)) == 2)
    follower.send_signal(signal.SIGSTOP)
    _, said = leader.communicate(timeout=800)
    assert leader.returncode == 1
    assert "WorkerFailed: nothing was heard of rank 1 of 2, node 0 for 4 s" in said
    follower.kill()
    wait_for(lambda: all_ended(tmp_path))


def test_a_signal_to_all_ends_all(members: Members, tmp_path: Path) -> None:
    """As a Ctrl-C, or whoever started them, sends it; nobody waits until others are taken for lost."""
    for rank in range(2):
        members.start(torchrun(rank, members.port), "wait")
    wait_for(lambda: len(started(tmp_path)) == 2)
    for process in members.processes:
        process.send_signal(signal.SIGTERM)
    for _, said in members.ends():
        assert "Interrupted: interrupted by SIGTERM" in said
        assert "nothing was heard" not in said
    assert all_ended(tmp_path)
    assert list(members.copies.glob("zerokit-*")) == []


def test_a_busy_leader_is_not_taken_for_dead(members: Members) -> None:
    """Between two launches it may write a report for longer than others would wait for a word."""
    patience = Patience(lost=2.0, alive=0.05)
    leading = Meeting(member(0, members.port), patience)
    following = Meeting(member(1, members.port), patience)
    beats: list[object] = []

    def beat() -> bool:
        if (heard := following.get("alive/0")) not in beats:
            beats.append(heard)
        return len(beats) > 3

    wait_for(beat)
    assert not following.is_lost(0)
    leading.close()
    wait_for(lambda: following.is_lost(0))
    following.close()


def test_a_store_that_hangs_is_waited_for_once(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = Meeting(member(0, members.port), Patience(lost=0.2, alive=600.0))
    let_go = threading.Event()

    class Hanging:
        def check(self, keys: list[str]) -> bool:
            return not let_go.wait(600.0)

        def set(self, key: str, value: str) -> None: ...

    monkeypatch.setattr(meeting, "_store", Hanging())
    with pytest.raises(LaunchError, match=r"no answer for 0.2 s"):
        meeting.get("anything")
    meeting.patience = Patience(lost=600.0)
    with pytest.raises(LaunchError, match="are unreachable: no answer"):
        meeting.get("anything")
    let_go.set()
    meeting.close()


def test_cores_are_shared_among_those_that_use_them() -> None:
    bound = [("a", [0, 1]), ("a", [2, 3]), ("b", [0, 1])]
    assert share_cores(bound) == [2, 2, 2]
    assert share_cores([("a", range(8)), ("a", range(8)), ("b", range(8))]) == [4, 4, 8]
    assert share_cores([("a", [0]), ("a", [0])]) == [1, 1]
