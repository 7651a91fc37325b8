"""Servers that never come to an end, and locks that are never let go, hold up nobody for ever."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zerokit.bench.tracking import limits, store
from zerokit.bench.tracking.limits import Endless, limited
from zerokit.bench.tracking.store import Store, Tracking, TrackingError
from zerokit.doctor import tracking
from zerokit.errors import ZerokitWarning

_HEAD = b"HTTP/1.1 500 No\r\nContent-Type: application/json\r\n"


def drip_headers(connection: socket.socket) -> None:
    connection.sendall(_HEAD)
    while True:
        connection.sendall(b"X")
        time.sleep(0.02)


def drip_body(connection: socket.socket) -> None:
    connection.sendall(_HEAD + b"Content-Length: 1000000\r\n\r\n")
    while True:
        connection.sendall(b"\x1b")
        time.sleep(0.02)


def flood(connection: socket.socket) -> None:
    connection.sendall(_HEAD + b"\r\n")
    while True:
        connection.sendall(bytes(1 << 20))


def flood_well(connection: socket.socket) -> None:
    """What is asked for: an error's text is passed over, without memory."""
    connection.sendall(_HEAD.replace(b"500 No", b"200 Yes") + b"\r\n")
    while True:
        connection.sendall(bytes(1 << 20))


@pytest.fixture
def serving() -> Iterator[Callable[[Callable[[socket.socket], None]], str]]:
    """Serves every connection so; gives the address."""
    with contextlib.ExitStack() as opened:

        def serve(answer: Callable[[socket.socket], None]) -> str:
            server = opened.enter_context(socket.create_server(("127.0.0.1", 0)))

            def work() -> None:
                with contextlib.suppress(OSError):
                    while True:
                        connection, _ = server.accept()
                        threading.Thread(target=speak, args=(connection,), daemon=True).start()

            def speak(connection: socket.socket) -> None:
                with connection, contextlib.suppress(OSError):
                    connection.recv(1 << 16)
                    answer(connection)

            threading.Thread(target=work, daemon=True).start()
            opened.callback(server.shutdown, socket.SHUT_RDWR)
            return f"http://127.0.0.1:{server.getsockname()[1]}"

        yield serve


@pytest.mark.parametrize("answer", [drip_headers, drip_body, flood, flood_well])
def test_calls_to_a_server_end(
    serving: Callable[[Callable[[socket.socket], None]], str],
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[socket.socket], None],
) -> None:
    monkeypatch.setattr(limits, "MOST_BYTES", 256 << 20)
    monkeypatch.setattr(store, "_CALL_SECONDS", 1000.0 if answer is flood_well else 2.0)
    said = (
        "the answer is longer than 256 MiB" if answer is flood_well else "the answer did not end within 2 s"
    )
    with pytest.raises(TrackingError, match=f"MLflow at .* cannot be used: {said}"):
        Store(Tracking(serving(answer), "experiment"))


@pytest.mark.parametrize("answer", [drip_headers, drip_body, flood])
def test_the_doctor_ends(
    serving: Callable[[Callable[[socket.socket], None]], str],
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[socket.socket], None],
) -> None:
    """What it has heard of a flood is enough to refuse the server."""
    monkeypatch.setattr(tracking, "_ALL_SECONDS", {True: 2.0, False: 2.0})
    monkeypatch.setattr(tracking, "QUICK_SECONDS", 2.0)
    for quick in (True, False):
        found = tracking.look_at_tracking(serving(answer), quick=quick)
        if answer is flood:
            assert (found.status, found.reached) == (500, True)
        else:
            assert (found.error, found.reached) == ("no answer within 2 s", False)


def test_a_timer_that_was_set_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    rung = threading.Event()
    former = signal.signal(signal.SIGALRM, lambda *_: rung.set())
    left, interval = signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(Endless, match=r"did not end within 0\.3 s"), limited(0.3):
            time.sleep(1000)
        assert rung.wait(1000)
    finally:
        signal.signal(signal.SIGALRM, former)
        signal.setitimer(signal.ITIMER_REAL, left, interval)


def test_other_threads_are_not_limited() -> None:
    """Signals come to the main one."""
    done: list[bool] = []

    def work() -> None:
        with limited(0.0):
            time.sleep(0.6)
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_a_lock_that_is_held_is_waited_for_with_a_warning_and_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody who can read the folder can hold it."""
    monkeypatch.setattr(store, "_QUIET_SECONDS", 0.1)
    monkeypatch.setattr(store, "_LOCK_SECONDS", 0.5)
    holder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(holder, fcntl.LOCK_EX)
    with pytest.warns(ZerokitWarning) as warned, store._alone(f"sqlite:///{tmp_path}/mlflow.db"):
        pass
    os.close(holder)
    assert [str(one.message) for one in warned] == [
        f"waiting for another process that holds {tmp_path} locked, for at most 0.5 s",
        f"{tmp_path} is still locked after 0.5 s: MLflow's file there is used all the same",
    ]
