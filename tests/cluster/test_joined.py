"""Ranks that somebody else has started meet, and do together what the first one says."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from tests.cluster.member import be_member
from tests.launch.ranks import ROOT, all_ended, started, wait_for
from tests.support.forked import ForkedProcess
from zerokit.cluster import joined, leader, mail
from zerokit.cluster.membership import Membership, find_membership
from zerokit.interrupts import Interrupts
from zerokit.launch.failures import LaunchError
from zerokit.network import free_port

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems cannot tie a process to its parent"
)

Scheme = Callable[[int, int], dict[str, str]]


def torchrun(rank: int, port: int) -> dict[str, str]:
    names = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2, "GROUP_RANK": 0}
    names["MASTER_PORT"] = port
    return {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}


def srun(rank: int, port: int) -> dict[str, str]:
    """On two machines, for all they know: the address is no loopback one."""
    names = {
        "PROCID": rank,
        "STEP_NUM_TASKS": 2,
        "LOCALID": 0,
        "NODEID": rank,
        "STEP_NUM_NODES": 2,
        "STEP_ID": 0,
    }
    found = {f"SLURM_{name}": str(value) for name, value in names.items()} | {"SLURM_JOB_ID": "7"}
    found |= {"SLURM_STEP_NODELIST": "a,b", "MASTER_ADDR": socket.gethostname(), "MASTER_PORT": str(port)}
    return found


class Members:
    """Starts them, and ends what is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.processes = folder, free_port(), list[ForkedProcess]()
        self.copies = folder / "copies"
        self.copies.mkdir()
        (folder / "logs").mkdir()

    def start(self, environment: dict[str, str], what: str, times: int = 1) -> ForkedProcess:
        """A fork of the tests' server."""
        kept = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        variables = kept | {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.copies)} | environment
        outputs = Path(tempfile.mkdtemp(dir=self.folder, prefix="outputs-"))
        process = ForkedProcess(outputs, variables, be_member, str(self.folder), what, str(times))
        self.processes.append(process)
        return process

    def start_two(self, scheme: Scheme, what: str, times: int = 1) -> list[ForkedProcess]:
        """Both; with "wait", once their ranks run."""
        both = [self.start(scheme(rank, self.port), what, times) for rank in range(2)]
        wait_for(lambda: what != "wait" or len(started(self.folder)) == 2)
        return both

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
    [
        (torchrun, ["0", "0"], 2, "finish", 4),
        (srun, ["0", "1"], 1, "noise", 12 << 20),
    ],
)
def test_members_launch_together(
    members: Members, tmp_path: Path, scheme: Scheme, nodes: list[str], times: int, what: str, size: int
) -> None:
    """Once or twice; what the other's rank wrote beside its job comes to the leader. The exit code is the leader's.

    Results come whole: also more than the store takes at once, in words that do not shrink.
    """
    members.start_two(scheme, what, times)
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
    """Its agent's store outlives them, with the place where they met in it."""
    store = TCPStore("127.0.0.1", members.port, is_master=True, wait_for_workers=False)
    (tmp_path / "logs").rmdir()
    pids = []
    for count in range(2):
        (tmp_path / "logs").mkdir()
        for rank in (1, 0):  # who follows is there first
            counted = {"TORCHELASTIC_RESTART_COUNT": str(count * rank)}  # by its own agent
            of_agent = {"TORCHELASTIC_USE_AGENT_STORE": "True"} | counted
            members.start(torchrun(rank, members.port) | of_agent, "finish")
            time.sleep(0.2)
        assert members.ends() == [(3, ""), (3, "")]
        pids.append({rank["pid"] for rank in started(tmp_path).values()})
        members.processes.clear()
        shutil.rmtree(tmp_path / "logs")
    assert len(pids[0] | pids[1]) == 4
    del store


def test_a_rank_that_fails_is_named(members: Members, tmp_path: Path) -> None:
    members.start_two(torchrun, "raise")
    (code, text), (followers_code, _) = members.ends()
    assert (code, followers_code) == (1, 1)
    said = r"(?s)rank 1 \(node 0, pid \d+\) failed: ValueError: a fault.*stderr:.*0 a last word"
    assert re.match(said, text.rpartition("WorkerFailed: ")[2]), text
    assert all_ended(tmp_path)
    assert list(members.copies.glob("zerokit-*")) == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {"ASKED": "another one"},
            r"UsageError: all ranks must run the same command, but rank 1 of 2, node 0 was given \"'another one'\", "
            "and number 0 'bench'",
        ),
        (
            {"PACKAGE": "zerokit"},
            r"LaunchError: rank 1 of 2, node 0 has .*zerokit's files \w{12}, .*but this machine has .*: install",
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
    assert (code, followers_code) == (1, 2 if "ASKED" in other else 1)
    assert re.search(said, text), text
    assert started(tmp_path) == {}


def test_processes_of_another_job_at_the_same_port_change_nothing(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail, "MEET_SECONDS", 2.0)

    def mpirun(rank: int, job: str) -> Membership:
        names = {"RANK": rank, "SIZE": 2, "LOCAL_RANK": rank, "LOCAL_SIZE": 2}
        variables = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}
        found = find_membership(variables | {"MASTER_PORT": str(members.port), "PMIX_NAMESPACE": job})
        assert found is not None
        return found

    def stray() -> None:
        with pytest.raises(LaunchError, match="no rendezvous with the others"):
            joined.follow(mpirun(1, "another"), [], Interrupts())

    other = threading.Thread(target=stray)
    other.start()
    with pytest.raises(LaunchError, match="number 1 of 2 that mpirun started has not joined within 2 s"):
        joined.lead(mpirun(0, "one"), [], Interrupts()).__enter__()
    other.join()


def member(rank: int, port: int) -> Membership:
    found = find_membership(torchrun(rank, port))
    assert found is not None
    return found


def test_who_is_not_met_is_told(members: Members, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "MEET_SECONDS", 1.0)
    leads, follows = (member(rank, members.port) for rank in range(2))
    lost = replace(follows, master_addr="no-such-host.invalid", count=4)
    with pytest.raises(LaunchError, match=r"number 1 of 2 that torchrun started has not joined within 1 s"):
        joined.lead(leads, [], Interrupts()).__enter__()
    said = r"rank 1 of 2 .* no rendezvous with the others at 127.0.0.1:\d+ within 1 s \(.+\); check that the name"
    with pytest.raises(LaunchError, match=said):
        joined.follow(follows, [], Interrupts())
    with pytest.raises(LaunchError, match=r"no-such-host.invalid, does not resolve on .*: set MASTER_ADDR"):
        joined.follow(lost, [], Interrupts())
    with (
        socket.create_server(("127.0.0.1", members.port)),
        pytest.raises(LaunchError, match=r"rank 0 of 2 .* cannot listen at port \d+, .*: set MASTER_PORT"),
    ):
        joined.lead(leads, [], Interrupts()).__enter__()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_leader_that_is_gone_is_left(members: Members, tmp_path: Path, number: int) -> None:
    leader, follower = members.start_two(torchrun, "wait")
    leader.send_signal(number)
    _, said = follower.communicate(timeout=800)
    assert follower.returncode == 1
    assert "LaunchError: rank 1 of 2 that torchrun started: " in said
    rank = started(tmp_path)[1]["pid"]
    assert not Path(f"/proc/{rank}").exists()
    leader.kill()
    wait_for(lambda: all_ended(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_follower_that_is_gone_is_named(members: Members, tmp_path: Path, number: int) -> None:
    leader, follower = members.start_two(torchrun, "wait")
    follower.send_signal(number)
    _, said = leader.communicate(timeout=800)
    assert leader.returncode == 1
    assert "WorkerFailed: rank 1 of 2, node 0: nothing was heard of it for 4 s" in said
    follower.kill()
    wait_for(lambda: all_ended(tmp_path))


def test_a_follower_that_is_ended_says_so(members: Members, tmp_path: Path) -> None:
    """Nobody waits until it is taken for lost."""
    leader, follower = members.start_two(torchrun, "wait")
    follower.send_signal(signal.SIGTERM)
    _, said = leader.communicate(timeout=800)
    assert "WorkerFailed: rank 1 of 2, node 0 has ended: interrupted by SIGTERM\nlogs: " in said
    wait_for(lambda: all_ended(tmp_path))


STORE = """
import sys, time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
time.sleep(1000)
"""


def test_an_agent_that_is_stopped_is_named(members: Members, tmp_path: Path) -> None:
    """Its store does not respond: neither of the ranks is the cause."""
    with subprocess.Popen([sys.executable, "-c", STORE, str(members.port)]) as agent:
        try:
            members.start_two(
                lambda rank, port: torchrun(rank, port) | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "wait"
            )
            agent.send_signal(signal.SIGSTOP)
            for _, said in members.ends():
                assert f"torchrun's store at 127.0.0.1:{members.port} does not respond any more" in said
        finally:
            agent.kill()
    assert all_ended(tmp_path)


def test_a_signal_to_all_ends_all(members: Members, tmp_path: Path) -> None:
    """As a Ctrl-C, or whoever started them, sends it; nobody waits until others are taken for lost."""
    for process in members.start_two(torchrun, "wait"):
        process.send_signal(signal.SIGTERM)
    for _, said in members.ends():
        assert "Interrupted: interrupted by SIGTERM" in said
        assert "nothing was heard" not in said
    assert all_ended(tmp_path)
    assert list(members.copies.glob("zerokit-*")) == []


def test_cores_are_shared_among_those_that_use_them() -> None:
    def threads(*members: tuple[str, Sequence[int]]) -> list[int]:
        return leader.share_cores([{"host": host, "cores": cores} for host, cores in members], 1)

    assert threads(("a", [0, 1]), ("a", [2, 3]), ("b", [0, 1])) == [2, 2, 2]
    assert threads(("a", range(8)), ("a", range(8)), ("b", range(8))) == [4, 4, 8]
    assert threads(("a", [0]), ("a", [0])) == [1, 1]
    assert leader.share_cores([{"host": "a", "cores": range(8)}], 4) == [2]
