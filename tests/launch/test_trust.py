"""Strangers neither lead nor follow: processes of another user on this machine, and of nobody between machines."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from zerokit.errors import UsageError
from zerokit.launch import joined, trust
from zerokit.launch.failures import LaunchError
from zerokit.launch.frames import frame
from zerokit.launch.interrupts import Interrupts
from zerokit.launch.membership import Membership
from zerokit.launch.network import free_port
from zerokit.versions import versions

_SECRET = "0123456789abcdef"
_START = frame("start", command=["os"], files={}, folder="/", world={"nproc_per_node": 1}, follow=False)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Membership:
    """Number 0 of two machines' processes."""
    monkeypatch.setenv(trust.SECRET, _SECRET)
    return Membership("srun", 0, 2, 1, False, socket.gethostname(), free_port())


@pytest.fixture
def near() -> Membership:
    """Number 0 of two processes on this machine."""
    return Membership("torchrun", 0, 2, 2, False, "127.0.0.1", free_port())


@contextlib.contextmanager
def running(work: Callable[[], object]) -> Iterator[None]:
    thread = threading.Thread(target=work)
    thread.start()
    yield
    thread.join()


def test_only_processes_with_the_secret_are_admitted(
    far: Membership, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others say hello at once, nothing, or what proves another secret; the one that belongs here comes after them."""
    monkeypatch.setattr(trust, "_SECONDS", 1.0)
    hello = frame("hello", index=1, asked=["bench"], host="stranger", cores=[0], versions={})
    connections = []

    def connect() -> socket.socket:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                connections.append(socket.create_connection((far.master_addr, far.master_port)))
                return connections[-1]

    def strangers_come() -> None:
        connect().sendall(hello * 10)
        connect()
        with contextlib.suppress(LaunchError):
            trust.introduce(connect(), b"another secret of theirs", "here")
        peer = joined._over(joined._connect(replace(far, index=1), Interrupts()))
        peer.say("hello", index=1, asked=["bench"], host="own", cores=[0], versions=versions())

    with running(strangers_come):
        leader = joined.Leader(far, ["bench"], Interrupts())
    assert {index: hello["host"] for index, (_, hello) in leader._members.items()} == {1: "own"}
    for connection in connections:
        connection.close()


def test_strangers_alone_are_refused_and_counted(far: Membership, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joined, "MEET_SECONDS", 3.0)

    def stranger_comes() -> None:
        while True:
            with contextlib.suppress(ConnectionRefusedError):
                socket.create_connection((far.master_addr, far.master_port)).close()
                return

    with (
        running(stranger_comes),
        pytest.raises(LaunchError, match="; 1 that did not belong to the job were refused"),
    ):
        joined.Leader(far, [], Interrupts())


def test_nobody_follows_a_stranger(far: Membership) -> None:
    """It listened at the port first, and sends what a leader would."""
    with socket.create_server(("", far.master_port)) as server:

        def mislead() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(bytes(64) + _START)

        with running(mislead), pytest.raises(LaunchError, match=f"does not know this job's {trust.SECRET}"):
            joined.follow(replace(far, index=1), [], Interrupts())


@pytest.mark.parametrize("secret", ["", "short"])
def test_several_machines_need_a_secret(
    far: Membership, monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv(trust.SECRET, secret)
    with pytest.raises(UsageError, match=f"{trust.SECRET} .*give all of them the same"):
        joined.Leader(far, [], Interrupts())
    with pytest.raises(UsageError, match=f"{trust.SECRET} .*give all of them the same"):
        joined.follow(replace(far, index=1), [], Interrupts())


def test_other_users_on_this_machine_are_refused(near: Membership, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways: for each of the two, the other is another user's."""
    monkeypatch.setattr(joined, "MEET_SECONDS", 3.0)
    monkeypatch.setattr(joined, "same_user", lambda connection: False)

    def follow() -> None:
        with pytest.raises(LaunchError, match="another user's process listens in the place of number 0"):
            joined.follow(replace(near, index=1), [], Interrupts())

    with running(follow), pytest.raises(LaunchError, match="; 1 that did not belong to the job were refused"):
        joined.Leader(near, [], Interrupts())


def test_the_system_tells_whose_process_is_at_the_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    with one, other:
        assert trust.same_user(one)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert not trust.same_user(one)


@pytest.mark.parametrize(
    ("address", "nodes", "here"),
    [
        ("127.0.0.1", 2, True),
        ("::1", 2, True),
        ("localhost", 2, True),
        ("10.0.0.1", 1, True),
        ("10.0.0.1", 2, False),
        ("node-0", 2, False),
        ("0.0.0.0", 2, False),
    ],
)
def test_where_all_are_on_one_machine(address: str, nodes: int, here: bool) -> None:
    assert Membership("srun", 0, 2, 2 // nodes, False, address, 29500).on_one_machine is here
