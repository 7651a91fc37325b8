r"""Ranks that another launcher has started: torchrun, srun, mpirun or a TrainJob (see `membership`).

    process 0 (leads)    zerokit bench ... -- launch -- child (rank 0)
    process 1 (follows)  zerokit bench ... -- follow -- child (rank 1)

Every process is started with one command. The first executes it; the others follow its requests, through a
store: start their child for this launch, end it, stop. A child a launch, so that each begins in a fresh process, and
its ranks meet at a port of their own.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zerokit.errors import UsageError
from zerokit.launch.agents import GRACE_SECONDS, Agent, attend, await_end, explain, pass_on
from zerokit.launch.child import Child, own_cores, share_cores
from zerokit.launch.failures import LaunchError, name_node
from zerokit.launch.frames import MOST_LOG_BYTES, FrameError, pack, put_file
from zerokit.launch.interrupts import Interrupted, Interrupts
from zerokit.launch.meeting import POLL_SECONDS, Meeting
from zerokit.launch.network import free_port
from zerokit.text import without_secrets
from zerokit.versions import describe_difference, versions


class Follower:
    """The leader's view of another member's part."""

    def __init__(self, meeting: Meeting, index: int, host: str, key: str, log_dir: Path) -> None:
        member = meeting.member
        self._index, self._meeting, self._key, self._log_dir = index, meeting, key, log_dir
        self.node = index if member.whole_node else index // (member.nproc_per_node or 1)
        self.host = host if host != socket.gethostname() else None
        self.directory = log_dir / f"member-{index}"
        self.directory.mkdir(parents=True, exist_ok=True)
        self._code: int | None = None
        self._trouble: str | None = None

    def poll(self) -> int | None:
        if self._code is None:
            try:
                self._look()
            except (LaunchError, FrameError, OSError) as error:
                self._trouble, self._code = str(error), 1
        return self._code

    def _look(self) -> None:
        done = self._meeting.get(f"{self._key}/done/{self._index}")
        if done is not None:
            for name, content in done["files"].items():
                put_file(self._log_dir, {"name": name, "content": content})
            if done["stopped"] is not None:
                self._trouble = f"{name_node(self.node, self.host)}: its torchrun agent {done['stopped']}"
            self._code = int(done["code"])
        elif self._meeting.is_lost(self._index):
            member = self._meeting.member
            what = "node" if member.whole_node else f"rank {self._index} of {member.count},"
            where = name_node(self.node, self.host).removeprefix("node " if member.whole_node else "")
            self._trouble = (
                f"nothing was heard of {what} {where} for {self._meeting.patience.lost:g} s: its process, its "
                "machine or the network between is gone"
            )
            self._code = 1

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(LaunchError):  # `poll` reports it
            self._meeting.put(f"{self._key}/signal", number=number)

    def trouble(self) -> str | None:
        return self._trouble


class Leader:
    """Starts launches on all members, one after the other."""

    def __init__(self, meeting: Meeting, command_line: Sequence[str], interrupts: Interrupts) -> None:
        """Wait until all members have come, each with the same `command_line`.

        Raises `UsageError` when one has another, and `LaunchError` when one does not come or runs another program.
        """
        self._meeting = meeting
        self._launches = 0
        self._members = [(socket.gethostname(), own_cores())]
        deadline = time.monotonic() + meeting.patience.meet
        for index in range(1, meeting.member.count):
            while (ready := meeting.get(f"ready/{index}")) is None:
                interrupts.check()
                meeting.admit(index)
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"number {index} of {meeting.member.count} that {meeting.member.scheme} started has not joined "
                        f"within {meeting.patience.meet:g} s: look at its output, and check that it reaches "
                        f"{meeting.member.master_addr}:{meeting.member.master_port}"
                    )
                time.sleep(POLL_SECONDS)
            if ready["asked"] != list(command_line):
                theirs, ours = (without_secrets(shlex.join(one)) for one in (ready["asked"], command_line))
                raise UsageError(
                    f"all ranks must run the same command, but number {index} on {ready['host']} was given "
                    f"{theirs!r}, and number 0 {ours!r}"
                )
            where = f"number {index} on {ready['host']}"
            if (difference := describe_difference(where, ready.get("versions"))) is not None:
                raise LaunchError(difference)
            self._members.append((ready["host"], ready["cores"]))

    def launch(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        nodes: int,
        nproc_per_node: int,
        log_dir: Path,
        interrupts: Interrupts,
        poll: Callable[[], None] = lambda: None,
    ) -> None:
        """Run `python -m module arguments` on every member's ranks and wait for all of them; see `remote.launch_on`.

        Raises `UsageError` when these are not as many ranks as the members have.
        """
        member = self._meeting.member
        member.require_world(nodes, nproc_per_node)
        key = f"launch/{self._launches}"
        self._launches += 1
        files = {path.name: pack(path.read_bytes()) for path in log_dir.iterdir() if path.is_file()}
        request = {
            "module": module,
            "arguments": list(arguments),
            "folder": str(log_dir),
            "files": files,
            "nodes": nodes,
            "nproc_per_node": nproc_per_node,
            "port": free_port(""),
            "threads": share_cores(self._members),
        }
        self._meeting.put(key, **request)
        child = Child(member, request, log_dir, log_dir)
        agents: list[Agent] = [child]
        agents += [
            Follower(self._meeting, index, self._members[index][0], key, log_dir)
            for index in range(1, member.count)
        ]
        try:
            attend(agents, interrupts, poll)
            if any(agent.poll() != 0 for agent in agents):
                raise explain(agents, log_dir)
        except Interrupted as error:
            pass_on(agents, error.signal_number)
            raise
        finally:
            with contextlib.suppress(LaunchError):  # where the store is gone, the others see it too
                self._meeting.put(f"{key}/signal", number=int(signal.SIGKILL))
            child.end()
            await_end(agents, GRACE_SECONDS)


def follow(meeting: Meeting, command_line: Sequence[str], interrupts: Interrupts) -> int:
    """Run the leader's requests until it is done; returns the leader's exit code.

    Args:
        meeting: with the others.
        command_line: of this process, which must be the leader's.
        interrupts: looked at while waiting.

    Raises `LaunchError` if the leader is gone.
    """
    index = meeting.member.index
    meeting.put(
        f"ready/{index}",
        asked=list(command_line),
        host=socket.gethostname(),
        cores=own_cores(),
        versions=versions(),
    )
    try:
        return _follow(meeting, interrupts)
    finally:
        with contextlib.suppress(LaunchError):  # where the leader is gone it does not wait for this
            meeting.put(f"gone/{index}")


def _follow(meeting: Meeting, interrupts: Interrupts) -> int:
    launches = 0
    while True:
        key = f"launch/{launches}"
        while (launch := meeting.get(key)) is None:
            if (end := meeting.get("end")) is not None:
                return int(end["code"])
            _stay(meeting, interrupts)
        launches += 1
        folder = Path(tempfile.mkdtemp(prefix="zerokit-member-"))
        try:
            _take_part(meeting, key, launch, folder, interrupts)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _stay(meeting: Meeting, interrupts: Interrupts) -> None:
    interrupts.check()
    if meeting.is_lost(0):
        raise LaunchError(
            f"{meeting.member.describe()}: number 0 has not responded for {meeting.patience.lost:g} s"
        )
    time.sleep(POLL_SECONDS)


def _take_part(
    meeting: Meeting, key: str, request: Mapping[str, Any], folder: Path, interrupts: Interrupts
) -> None:
    for name, content in request["files"].items():
        put_file(folder, {"name": name, "content": content})
    child = Child(meeting.member, request, folder, folder)
    signalled = None
    try:
        while child.poll() is None:
            sent = meeting.get(f"{key}/signal")
            if sent is not None and sent["number"] != signalled:
                signalled = sent["number"]
                child.send_signal(signalled)
            _stay(meeting, interrupts)
    finally:
        child.end()
        with contextlib.suppress(LaunchError):  # a leader that is gone does not need it
            _send_back(meeting, key, child, folder, frozenset(request["files"]))


def _send_back(meeting: Meeting, key: str, child: Child, folder: Path, inputs: frozenset[str]) -> None:
    """Send what the ranks wrote beside their job, and the ends of their logs."""
    files = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in inputs:
            content = path.read_bytes()
            files[name] = pack(content if path.parent == folder else content[-MOST_LOG_BYTES:])
    meeting.put(f"{key}/done/{meeting.member.index}", code=child.poll(), stopped=child.stopped(), files=files)
