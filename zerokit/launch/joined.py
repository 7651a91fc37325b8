r"""Ranks that another launcher has started: torchrun, srun, mpirun or a TrainJob (see `membership`).

    process 0 (leads)    zerokit bench ... -- launch -- rank 0
    process 1 (follows)  zerokit bench ... -- serve --- rank 1

Every process is started with one command. The first executes it; the others connect to it and serve its launches, as
nodes on other machines do (see `distant`), once both know that they belong together (see `trust`). Ranks are fresh
processes in each launch, and meet at a port of their own.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shlex
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from zerokit.errors import UsageError
from zerokit.launch.agents import GRACE_SECONDS, Agent, conduct
from zerokit.launch.distant import DistantAgent, hear, launch_frame, serve
from zerokit.launch.failures import LaunchError
from zerokit.launch.frames import SILENCE_SECONDS, Peer
from zerokit.launch.interrupts import Interrupts
from zerokit.launch.membership import Membership
from zerokit.launch.network import free_port
from zerokit.launch.ranks import Ranks, World, cores
from zerokit.launch.trust import admit, introduce, same_user, shared_secret
from zerokit.patience import Patience
from zerokit.text import without_secrets
from zerokit.versions import describe_difference, versions

MEET_SECONDS = 60.0
"""Within which all must have joined."""
_POLL_SECONDS = 0.1
_MOST_AT_ONCE = 256
"""Connections whose other end has not shown yet that it belongs here; more are closed."""


class Leader:
    """Starts launches on all members, one after the other."""

    def __init__(self, member: Membership, command_line: Sequence[str], interrupts: Interrupts) -> None:
        """Wait until all members have come, each with the same `command_line`.

        Raises `UsageError` when one has another, and `LaunchError` when one does not come or runs another program.
        """
        self._member, self._interrupts = member, interrupts
        self._members: dict[int, tuple[Peer, Mapping[str, Any]]] = {}
        try:
            with _listening(member) as server:
                self._admit(server)
            for index, (_, hello) in sorted(self._members.items()):
                where = f"number {index} on {hello['host']}"
                if hello["asked"] != list(command_line):
                    theirs, ours = (
                        without_secrets(shlex.join(one)) for one in (hello["asked"], command_line)
                    )
                    raise UsageError(
                        f"all ranks must run the same command, but {where} was given {theirs!r}, and number 0 {ours!r}"
                    )
                if (difference := describe_difference(where, hello["versions"])) is not None:
                    raise LaunchError(difference)
        except BaseException as error:
            self.dismiss(2 if isinstance(error, UsageError) else 1)
            raise

    def _admit(self, server: socket.socket) -> None:
        patience, begun = Patience(MEET_SECONDS), list[Peer]()
        missing, strangers = set(range(1, self._member.count)), _Strangers(self._member)
        while missing:
            self._interrupts.check()
            with contextlib.suppress(TimeoutError):
                strangers.ask(server.accept()[0])
            begun += map(_over, strangers.known())
            for peer in list(begun):
                with contextlib.suppress(EOFError):
                    if (message := peer.hear()) is None:
                        continue
                    if message[0] == "hello":
                        self._members[message[1]["index"]] = peer, message[1]
                begun.remove(peer)
            missing -= self._members.keys()
            if missing and patience.over:
                member = self._member
                raise LaunchError(
                    f"number {min(missing)} of {member.count} that {member.scheme} started has not joined within "
                    f"{MEET_SECONDS:g} s: look at its output, and check that it reaches "
                    f"{member.master_addr}:{member.master_port}{strangers.describe()}"
                )

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
        member = self._member
        member.require_world(nodes, nproc_per_node)
        here = {"host": socket.gethostname(), "cores": cores()}
        threads = share_cores([here, *(hello for _, (_, hello) in sorted(self._members.items()))])
        if member.whole_node:
            threads = [max(1, one // nproc_per_node) for one in threads]
        address, port = member.master_addr, free_port("")
        if member.on_one_machine:
            address, port = "127.0.0.1", free_port()
        world = World(nodes, nproc_per_node, address, port, threads=threads[0])
        start = launch_frame(world, log_dir, [module, *arguments])
        agents: list[Agent] = []
        for index, (peer, hello) in self._members.items():
            peer.say("start", **start | {"world": start["world"] | {"threads": threads[index]}})
            host = hello["host"] if hello["host"] != here["host"] else None
            agent = DistantAgent(peer, member.node_of(index), host, log_dir, hello)
            if not member.whole_node:
                agent.where = f"rank {index} of {member.count}, {agent.where}"
            agents.append(agent)
        agents.insert(0, Ranks(world, ranks_of(member, nproc_per_node), start["command"], log_dir))
        conduct(agents, log_dir, interrupts, poll)

    def dismiss(self, code: int) -> None:
        """End the others with this exit code."""
        peers = [peer for peer, _ in self._members.values()]
        for peer in peers:
            peer.say("end", code=code)
        patience = Patience(GRACE_SECONDS)
        for peer in peers:  # what they have not read yet they would lose with this process
            with contextlib.suppress(EOFError):
                while not patience.over:
                    peer.hear()
                    time.sleep(_POLL_SECONDS)


def share_cores(members: Sequence[Mapping[str, Any]]) -> list[int]:
    """The number of threads for each member, from its `host` and `cores`; shared cores are divided."""
    shares = []
    for one in members:
        sharing = sum(
            other["host"] == one["host"] and not set(one["cores"]).isdisjoint(other["cores"])
            for other in members
        )
        shares.append(max(1, len(one["cores"]) // max(1, sharing)))
    return shares


def ranks_of(member: Membership, nproc_per_node: int) -> range:
    """The ranks that a member runs."""
    if member.whole_node:
        return range(member.index * nproc_per_node, (member.index + 1) * nproc_per_node)
    return range(member.index, member.index + 1)


def follow(member: Membership, command_line: Sequence[str], interrupts: Interrupts) -> int:
    """Serve the leader's launches until it is done; returns the leader's exit code.

    Raises `LaunchError` if the leader is gone, or does not come.
    """
    peer = _over(_connect(member, interrupts))
    here = {"host": socket.gethostname(), "cores": cores(), "versions": versions()}
    peer.say("hello", index=member.index, asked=list(command_line), **here)
    try:
        while True:
            interrupts.check()
            kind, content = hear(peer) or ("", {})
            if kind == "end":
                return int(content["code"])
            if kind != "start":  # it may also be the end of a launch's ranks, which have ended by themselves
                time.sleep(_POLL_SECONDS)
                continue
            folder = Path(tempfile.mkdtemp(prefix="zerokit-member-"))
            try:
                serve(
                    peer,
                    content,
                    ranks_of(member, content["world"]["nproc_per_node"]),
                    folder,
                    interrupts.check,
                )
            finally:
                shutil.rmtree(folder, ignore_errors=True)
    except EOFError:
        raise LaunchError(
            f"{member.describe()}: number 0 is gone, or has not responded for {SILENCE_SECONDS:g} s"
        ) from None


class _Strangers:
    """Connections to the leader, each of which a thread asks whether it belongs to the job."""

    def __init__(self, member: Membership) -> None:
        self._secret = b"" if member.on_one_machine else shared_secret(member.scheme)
        self._known: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._room = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._refused = 0

    def ask(self, connection: socket.socket) -> None:
        """Without waiting for the answer."""
        if self._room.acquire(blocking=False):
            threading.Thread(target=self._ask, args=(connection,), daemon=True).start()
        else:
            connection.close()

    def _ask(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if admit(connection, self._secret) if self._secret else same_user(connection):
                self._known.put(connection)
            else:
                self._refused += 1
                connection.close()
        self._room.release()

    def known(self) -> Iterator[socket.socket]:
        """Those that belong to the job, each once."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._known.get_nowait()

    def describe(self) -> str:
        return f"; {self._refused} that did not belong to the job were refused" * bool(self._refused)


def _over(connection: socket.socket) -> Peer:
    connection.settimeout(None)
    return Peer(connection.makefile("rb"), connection.makefile("wb"))


@contextlib.contextmanager
def _listening(member: Membership) -> Iterator[socket.socket]:
    """The leader's socket, where the others reach it."""
    try:
        if member.on_one_machine:
            server = socket.socket(socket.AF_UNIX)
            server.bind(_place(member))
            server.listen()
        else:
            port = 0 if member.has_store else member.master_port
            try:
                server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
            except (OSError, ValueError):  # without IPv6; or the port is taken, which the next line says
                server = socket.create_server(("", port))
            if member.has_store:
                store, key = _store(member)
                store.set(key, str(server.getsockname()[1]))
        server.settimeout(_POLL_SECONDS)
    except (OSError, RuntimeError) as error:
        raise _unmet(member, error) from error
    with server:
        yield server


def _connect(member: Membership, interrupts: Interrupts) -> socket.socket:
    """A connection to the leader."""
    patience, port = Patience(MEET_SECONDS), member.master_port
    secret = b"" if member.on_one_machine else shared_secret(member.scheme)
    try:
        store, key = _store(member) if secret and member.has_store else (None, "")
        while True:
            interrupts.check()
            try:
                if not secret:
                    return _beside(member)
                if store is not None:
                    port = int(store.get(key)) if store.check([key]) else 0
                with contextlib.ExitStack() as opened:
                    address = (member.master_addr, port)
                    connection = opened.enter_context(socket.create_connection(address, GRACE_SECONDS))
                    introduce(connection, secret, f"{member.master_addr}:{port}")
                    opened.pop_all()
                    return connection
            except socket.gaierror as error:
                raise LaunchError(
                    f"{member.describe()}: the host of number 0, {member.master_addr}, does not resolve on this "
                    f"machine ({error.strerror}): set MASTER_ADDR to a name or an address that every node can reach"
                ) from error
            except OSError:
                if patience.over:
                    raise
            time.sleep(_POLL_SECONDS)
    except (OSError, RuntimeError) as error:
        raise _unmet(member, error) from error


def _place(member: Membership) -> str:
    """The name of the leader's Unix socket, which no file has: restarted ranks do not find that of the former ones.

    Agents that keep one store for all rounds also keep its port, and count restarts alike. Others choose a port each
    round, and one that comes later has counted fewer restarts.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if member.has_store else ""
    return f"\0zerokit-{os.geteuid()}-{member.master_port}-{restart}"


def _beside(member: Membership) -> socket.socket:
    """A connection to the leader on this machine. Raises `LaunchError` if another user's process is there."""
    with contextlib.ExitStack() as opened:
        connection = opened.enter_context(socket.socket(socket.AF_UNIX))
        connection.connect(_place(member))
        if not same_user(connection):
            raise LaunchError(f"{member.describe()}: another user's process listens in the place of number 0")
        opened.pop_all()
        return connection


def _store(member: Membership) -> tuple[Any, str]:
    """torchrun's own store, which listens where the others should meet, and the place of the leader's port in it.

    It outlives restarted ranks, and what the former ones said there. Raises `RuntimeError`.
    """
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(
        member.master_addr,
        member.master_port,
        is_master=False,
        timeout=timedelta(seconds=MEET_SECONDS),
        wait_for_workers=False,
    )
    return store, f"zerokit/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _unmet(member: Membership, error: Exception) -> LaunchError:
    return LaunchError(
        f"{member.describe()}: no rendezvous with the others at {member.master_addr}:{member.master_port} within "
        f"{MEET_SECONDS:g} s ({str(error).splitlines()[0]}); check that the name resolves to the machine of number 0 "
        "and that its port is free, or set MASTER_ADDR and MASTER_PORT"
    )
