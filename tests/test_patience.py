"""Time in which a watcher was stopped itself does not count: suspended jobs go on."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.launch.ranks import wait_for
from zerokit.cluster.mail import Peer
from zerokit.launch import processes
from zerokit.patience import Patience


class Clock:
    """A monotonic clock that a suspension sets forward."""

    def __init__(self) -> None:
        self._now, self._ahead = time.monotonic, 0.0

    def __call__(self) -> float:
        return self._now() + self._ahead

    def suspend(self, seconds: float) -> None:
        self._ahead += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


def _looks(patience: Patience, clock: Clock) -> int:
    """How often the watcher looks, every 5 s, until its limit has passed."""
    looks = 0
    while not patience.over:
        clock.suspend(5.0)
        looks += 1
    return looks


def test_a_limit_passes_only_while_its_watcher_runs(clock: Clock) -> None:
    patience = Patience(3600.0)
    for _ in range(100):
        clock.suspend(5.0)
        assert not patience.over
    clock.suspend(86400.0)  # as one of 5 s
    assert _looks(patience, clock) == (3600 - 500) // 5
    patience.restart()
    clock.suspend(4000.0)
    assert _looks(patience, clock) == 3600 // 5


def test_a_short_limit_outlasts_a_suspension_too(clock: Clock) -> None:
    patience = Patience(3.0)
    clock.suspend(3600.0)
    assert not patience.over


def test_a_peer_is_not_silent_as_its_listener_was_suspended(clock: Clock) -> None:
    peer = Peer("1", "leader", 15.0)

    def silent() -> bool:
        try:
            return peer.hear() is not None
        except EOFError:
            return True

    clock.suspend(3600.0)
    found = [silent()]
    for _ in range(4):
        clock.suspend(6.0)
        found.append(silent())
    assert found == [False, False, False, True, True]


@pytest.fixture
def stopped() -> Iterator[psutil.Process]:
    process = subprocess.Popen(["sleep", "3600"])
    process.send_signal(signal.SIGSTOP)
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def test_a_rank_that_was_stopped_with_its_launcher_goes_on(clock: Clock, stopped: psutil.Process) -> None:
    watch = processes.StoppedProcesses()
    wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED)
    watch.look([stopped.pid])
    clock.suspend(3600.0)  # the launcher goes on first
    watch.look([stopped.pid])
    stopped.resume()
    wait_for(lambda: stopped.status() == psutil.STATUS_SLEEPING)
    watch.look([stopped.pid])
    assert not watch.explain(stopped.pid)
    stopped.suspend()
    wait_for(lambda: stopped.status() == psutil.STATUS_STOPPED)
    while not watch.explain(stopped.pid):
        watch.look([stopped.pid])
        clock.suspend(1.0)
