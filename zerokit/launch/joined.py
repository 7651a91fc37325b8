r"""Ranks that somebody else has started: torchrun, srun, mpirun or a TrainJob (see `membership`).

    process 0 (leads)    zerokit bench ... -- launch -- child (rank 0)
    process 1 (follows)  zerokit bench ... -- follow -- child (rank 1)

Every process runs the same command. The first does what the command says; the others do what it tells them, through a
store: start their child for this launch, end it, stop. A child a launch, so that each begins in a fresh process, and
its ranks meet at a port of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from zerokit.errors import UsageError
from zerokit.launch.agents import GRACE_SECONDS, Agent, attend, await_end, explain, pass_on
from zerokit.launch.failures import LaunchError, name_node
from zerokit.launch.frames import MOST_LOG_BYTES, FrameError, pack, put_file, relocate
from zerokit.launch.interrupts import Interrupted, Interrupts
from zerokit.launch.membership import Membership
from zerokit.launch.network import address_towards, free_port, interface_of
from zerokit.launch.processes import MARK, kill_marked

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_T = TypeVar("_T")
_MEET_SECONDS = 60.0
_ALIVE_SECONDS = 2.0
_LOST_SECONDS = 30.0
_POLL_SECONDS = 0.1
# TCPStore takes values of 8 MiB at most (MAX_PAYLOAD_LEN in TCPStoreLibUvBackend.cpp).
_PIECE_CHARACTERS = 4 << 20


class Meeting:
    """Where the members talk, through a few keys. A thread says that this one is alive, whatever else it does."""

    def __init__(self, member: Membership, seconds: float = _MEET_SECONDS) -> None:
        """Meet all others; raises `LaunchError` where that takes longer than `seconds`."""
        with _quiet_torch():
            from torch._C._distributed_c10d import PrefixStore, TCPStore

        self.member = member
        try:
            socket.getaddrinfo(member.master_addr, member.master_port)
        except OSError as error:
            raise LaunchError(
                f"{member.describe()}: the host of number 0, {member.master_addr}, does not resolve here "
                f"({error.strerror}): set MASTER_ADDR to a name or an address that every node can reach"
            ) from error
        try:
            store: Store = TCPStore(
                member.master_addr,
                member.master_port,
                is_master=member.leads and not member.has_store,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
            )
        except (
            RuntimeError,
            ValueError,
        ) as error:  # torch's DistNetworkError and DistStoreError are RuntimeErrors
            raise LaunchError(
                f"{member.describe()}: no meeting with the others at {member.master_addr}:{member.master_port} within "
                f"{seconds:g} s ({str(error).splitlines()[0]}); see that the name leads to the machine of number 0 and "
                "that its port is free, or set MASTER_ADDR and MASTER_PORT"
            ) from error
        self._store: Store = PrefixStore("zerokit-bench", store)
        self._heard: dict[int, tuple[object, float]] = {}
        self._closed = threading.Event()
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._serve, self._beat)]
        for thread in self._threads:
            thread.start()

    def _beat(self) -> None:
        with contextlib.suppress(LaunchError):  # who needs the store will find it gone
            self.put(f"alive/{self.member.index}", at=time.time())
            while not self._closed.wait(_ALIVE_SECONDS):
                self.put(f"alive/{self.member.index}", at=time.time())

    def close(self) -> None:
        """Say no more that this member is alive."""
        self._closed.set()
        self._calls.put(None)
        for thread in self._threads:
            thread.join(1.0)

    def put(self, key: str, **content: Any) -> None:
        """Write a key; raises `LaunchError` if the store is gone."""
        text = json.dumps(content)

        def write() -> None:
            if len(text) <= _PIECE_CHARACTERS:
                self._store.set(key, text)
                return
            starts = range(0, len(text), _PIECE_CHARACTERS)
            for number, start in enumerate(starts):
                self._store.set(f"{key}/piece/{number}", text[start : start + _PIECE_CHARACTERS])
            self._store.set(key, json.dumps(len(starts)))

        self._call(write)

    def get(self, key: str) -> dict[str, Any] | None:
        """What a key holds; None while it is not there. Raises `LaunchError` if the store is gone."""

        def read() -> dict[str, Any] | None:
            if not self._store.check([key]):
                return None
            found = json.loads(self._store.get(key))
            if isinstance(found, int):
                pieces = (self._store.get(f"{key}/piece/{number}") for number in range(found))
                found = json.loads(b"".join(pieces))
            content: dict[str, Any] = found
            return content

        return self._call(read)

    def _call(self, call: Callable[[], _T]) -> _T:
        """Use the store; a thread does, since a call to a machine that hangs never returns."""
        answer: queue.SimpleQueue[_T | RuntimeError] = queue.SimpleQueue()
        self._calls.put((call, answer))
        try:
            said = answer.get(timeout=_LOST_SECONDS)
        except queue.Empty:
            said = RuntimeError(f"no answer for {_LOST_SECONDS:g} s")
        if isinstance(said, RuntimeError):
            raise LaunchError(
                f"{self.member.describe()}: the others cannot be reached any more: {said}"
            ) from said
        return said

    def _serve(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, answer = asked
            try:
                answer.put(call())
            except RuntimeError as error:
                answer.put(error)

    def is_lost(self, index: int) -> bool:
        """Whether nothing was heard of a member for long."""
        said, now = self.get(f"alive/{index}"), time.monotonic()
        if index not in self._heard or self._heard[index][0] != said:
            self._heard[index] = said, now
        return now - self._heard[index][1] > _LOST_SECONDS

    def dismiss(self, code: int) -> None:
        """The leader lets the others end with this exit code."""
        self.put("end", code=code)
        deadline = time.monotonic() + GRACE_SECONDS
        # The store lives in this process: who has not read it yet would find it gone.
        for index in range(1, self.member.count):
            while (
                self.get(f"gone/{index}") is None and not self.is_lost(index) and time.monotonic() < deadline
            ):
                time.sleep(_POLL_SECONDS)


@contextlib.contextmanager
def _quiet_torch() -> Iterator[None]:
    """While torch is imported: its C++ half tells in many lines of every store that is gone, and we in one."""
    name = "TORCH_CPP_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ.setdefault(name, "ERROR")
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]  # ranks speak as they like


def own_cores() -> list[int]:
    """The cores that this process may use."""
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return list(range(os.cpu_count() or 1))


def share_cores(members: Sequence[tuple[str, Sequence[int]]]) -> list[int]:
    """How many threads each member has for itself, from its host and cores: it shares those that others also use."""
    shares = []
    for host, cores in members:
        sharing = sum(1 for other, theirs in members if other == host and not set(cores).isdisjoint(theirs))
        shares.append(max(1, len(cores) // max(1, sharing)))
    return shares


class Child:
    """This member's part of a launch: one rank, or torchrun's agent of a whole node."""

    host: str | None = None

    def __init__(self, member: Membership, asked: Mapping[str, Any], folder: Path, log_dir: Path) -> None:
        """Start it.

        Args:
            member: which part.
            asked: the launch, as the leader has told it.
            folder: where the job's files lie here.
            log_dir: for its output.
        """
        self.node = member.node
        self.directory = log_dir / f"member-{member.index}"
        self.directory.mkdir(parents=True)
        self._member = member
        self._launch_id = uuid.uuid4().hex
        rank = ["-m", "zerokit.launch.rank", asked["module"]]
        rank += relocate(asked["arguments"], asked["folder"], folder)
        command = [sys.executable, *rank]
        if member.whole_node:
            command = self._agent(asked, rank)
        with (
            (self.directory / "agent.log").open("wb") as out,
            (self.directory / "stderr.log").open("wb") as err,
        ):
            self._process = subprocess.Popen(
                command,
                env=self._variables(asked),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out if member.whole_node else err,
                start_new_session=True,
            )

    def _agent(self, asked: Mapping[str, Any], rank: Sequence[str]) -> list[str]:
        torchrun = (
            f"--nnodes {asked['nodes']} --node-rank {self._member.node} --nproc-per-node {asked['nproc_per_node']} "
            f"--max-restarts 0 --rdzv-backend static --master-addr {self._member.master_addr} "
            f"--master-port {asked['port']} --redirects 3"
        ).split()
        agent = [
            sys.executable,
            "-m",
            "zerokit.launch.agent",
            str(self.directory / "report.json"),
            str(os.getpid()),
        ]
        return [*agent, *torchrun, "--log-dir", str(self.directory), *rank]

    def _variables(self, asked: Mapping[str, Any]) -> dict[str, str]:
        member = self._member
        ours = ("TORCHELASTIC_", "PET_")  # of the launch around: this one has others
        variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        variables |= {MARK: self._launch_id, "ZEROKIT_AGENT_PID": str(os.getpid())}
        threads = asked["threads"][member.index]
        if member.whole_node:
            threads //= asked["nproc_per_node"]
        variables.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
        with contextlib.suppress(OSError):
            # gloo otherwise looks the host's own name up, which on many machines leads to loopback.
            interface = interface_of(address_towards(member.master_addr))
            if interface is not None:
                variables.setdefault("GLOO_SOCKET_IFNAME", interface)
        if not member.whole_node:
            variables |= {
                "RANK": str(member.index),
                "WORLD_SIZE": str(member.count),
                "LOCAL_RANK": str(member.local_rank),
                "LOCAL_WORLD_SIZE": str(asked["nproc_per_node"]),
                "GROUP_RANK": str(member.node),
                "MASTER_ADDR": member.master_addr,
                "MASTER_PORT": str(asked["port"]),
                "TORCHELASTIC_ERROR_FILE": str(self.directory / "error.json"),
            }
        return variables

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is None or code == 0 or self._member.whole_node:
            return code
        self._report(code)
        return code if code > 0 else 128 - code  # a signal's number tells of an agent that it was killed

    def _report(self, code: int) -> None:
        """How the rank ended, in the form of an agent's report."""
        report = self.directory / "report.json"
        if report.exists():
            return
        message: Any = ""
        with contextlib.suppress(OSError, ValueError):
            message = json.loads((self.directory / "error.json").read_text())["message"]
        failure = {
            "rank": self._member.index,
            "pid": self._process.pid,
            "exit_code": code,
            "message": message,
            "time": time.time(),
            "stderr": "stderr.log",
        }
        report.write_text(json.dumps({"failures": [failure]}))

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    def trouble(self) -> str | None:
        return None

    def end(self) -> None:
        """Kill what is left."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_SECONDS)
        kill_marked(self._launch_id, spare=frozenset([self._process.pid]))
        self._process.kill()
        self._process.wait()
        kill_marked(self._launch_id)


class Follower:
    """Another member's part, as the leader sees it."""

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
            self._code = int(done["code"])
        elif self._meeting.is_lost(self._index):
            member = self._meeting.member
            what = "node" if member.whole_node else f"rank {self._index} of {member.count},"
            where = name_node(self.node, self.host).removeprefix("node " if member.whole_node else "")
            self._trouble = (
                f"nothing was heard of {what} {where} for {_LOST_SECONDS:g} s: its process, its machine or the "
                "network between is gone"
            )
            self._code = 1

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(LaunchError):  # `poll` tells
            self._meeting.put(f"{self._key}/signal", number=number)

    def trouble(self) -> str | None:
        return self._trouble


class Leader:
    """Starts launches on all members, one after the other."""

    def __init__(self, meeting: Meeting, asked: Sequence[str], interrupts: Interrupts) -> None:
        """Wait until all members have come, each with the same command line `asked`.

        Raises `UsageError` when one has another, and `LaunchError` when one does not come.
        """
        self._meeting = meeting
        self._launches = 0
        self._members = [(socket.gethostname(), own_cores())]
        deadline = time.monotonic() + _MEET_SECONDS
        for index in range(1, meeting.member.count):
            while (ready := meeting.get(f"ready/{index}")) is None:
                interrupts.check()
                if time.monotonic() > deadline:
                    raise LaunchError(
                        f"number {index} of {meeting.member.count} that {meeting.member.scheme} started has not come "
                        f"within {_MEET_SECONDS:g} s: see what it said, and that it reaches "
                        f"{meeting.member.master_addr}:{meeting.member.master_port}"
                    )
                time.sleep(_POLL_SECONDS)
            if ready["asked"] != list(asked):
                raise UsageError(
                    f"all ranks must run the same command, but number {index} on {ready['host']} was given "
                    f"{shlex.join(ready['asked'])!r}, and number 0 {shlex.join(asked)!r}"
                )
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
        asked = {
            "module": module,
            "arguments": list(arguments),
            "folder": str(log_dir),
            "files": files,
            "nodes": nodes,
            "nproc_per_node": nproc_per_node,
            "port": free_port(""),
            "threads": share_cores(self._members),
        }
        self._meeting.put(key, **asked)
        child = Child(member, asked, log_dir, log_dir)
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


def follow(meeting: Meeting, asked: Sequence[str], interrupts: Interrupts) -> int:
    """Do what the leader says until it is done; returns its exit code.

    Args:
        meeting: with the others.
        asked: this process's command line, which must be the leader's.
        interrupts: looked at while waiting.

    Raises `LaunchError` if the leader is gone.
    """
    index = meeting.member.index
    meeting.put(f"ready/{index}", asked=list(asked), host=socket.gethostname(), cores=own_cores())
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
            f"{meeting.member.describe()}: nothing was heard of number 0 for {_LOST_SECONDS:g} s"
        )
    time.sleep(_POLL_SECONDS)


def _take_part(
    meeting: Meeting, key: str, asked: Mapping[str, Any], folder: Path, interrupts: Interrupts
) -> None:
    for name, content in asked["files"].items():
        put_file(folder, {"name": name, "content": content})
    child = Child(meeting.member, asked, folder, folder)
    signalled = None
    try:
        while child.poll() is None:
            said = meeting.get(f"{key}/signal")
            if said is not None and said["number"] != signalled:
                signalled = said["number"]
                child.send_signal(signalled)
            _stay(meeting, interrupts)
    finally:
        child.end()
        with contextlib.suppress(LaunchError):  # where the leader is gone nobody asks
            _bring_home(meeting, key, child, folder, frozenset(asked["files"]))


def _bring_home(meeting: Meeting, key: str, child: Child, folder: Path, inputs: frozenset[str]) -> None:
    """What the ranks wrote beside their job, and the ends of their logs."""
    files = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in inputs:
            content = path.read_bytes()
            files[name] = pack(content if path.parent == folder else content[-MOST_LOG_BYTES:])
    meeting.put(f"{key}/done/{meeting.member.index}", code=child.poll(), files=files)
