"""Processes: the first one of a container, played by a subreaper, and marked ones, found wherever they have gone."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import children_of
from zerokit.launch.processes import MARK, kill_marked, marked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="containers run on Linux")

# 36 is PR_SET_CHILD_SUBREAPER.
_SUPERVISED = """
import ctypes, os, signal, subprocess, sys, time
from zerokit.launch.init import leave_process_one, supervise
leave_process_one()
first = os.getpid()
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
supervise()
assert os.getpid() != first, "the work is done in a child"
print(first, flush=True)
"""


@contextlib.contextmanager
def _start(then: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", _SUPERVISED + then], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def test_a_signal_without_a_handler_ends_it_as_shells_say() -> None:
    with _start("time.sleep(600)") as process:
        assert process.stdout is not None
        first = int(process.stdout.readline())
        os.kill(first, signal.SIGTERM)
        assert process.wait(timeout=800) == 128 + signal.SIGTERM


def test_a_handler_of_the_child_sees_the_signal_once() -> None:
    then = """
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
print("ready", flush=True)
while not seen:
    time.sleep(0.01)
time.sleep(0.3)
sys.exit(10 + len(seen))
"""
    with _start(then) as process:
        assert process.stdout is not None
        first = int(process.stdout.readline())
        assert process.stdout.readline() == "ready\n"
        os.kill(first, signal.SIGTERM)
        assert process.wait(timeout=800) == 11


def test_orphans_are_reaped() -> None:
    # A shell starts `sleep` in the background and ends: its child's next parent is the first process.
    then = """
shell = subprocess.run(["sh", "-c", "sleep 600 >/dev/null & echo $!"], stdout=subprocess.PIPE, text=True)
print(shell.stdout, end="", flush=True)
time.sleep(600)
"""
    with _start(then) as process:
        assert process.stdout is not None
        first = int(process.stdout.readline())
        orphan = int(process.stdout.readline())
        assert orphan in children_of(first)
        os.kill(orphan, signal.SIGTERM)
        while Path(f"/proc/{orphan}").exists():
            time.sleep(0.02)


# A process that leaves its parent, its group and its session, as daemons do.
RUNAWAY = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"


def test_an_orphan_in_a_session_of_its_own_is_killed_and_other_launches_live_on() -> None:
    launch_id = uuid.uuid4().hex
    subprocess.run([sys.executable, "-c", RUNAWAY], env={**os.environ, MARK: launch_id}, check=True)
    assert len(marked(launch_id)) == 1
    kill_marked(uuid.uuid4().hex)
    assert len(marked(launch_id)) == 1
    kill_marked(launch_id)
    assert marked(launch_id) == []
