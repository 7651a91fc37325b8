"""Marked processes are found wherever they have gone, and process 1 of a container ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid

import pytest

from tests.support.processes import children_of
from zerokit.launch.processes import MARK, kill_marked, marked

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


@pytest.mark.netns
def test_process_one_of_a_container_ends_at_sigterm() -> None:
    """The kernel ends it by no signal that it does not handle."""
    program = "import time, zerokit.cli as it; it.cli = lambda **_: print(1, flush=True) or time.sleep(600); it.main()"
    words = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        (first,) = children_of(process.pid)
        os.kill(first, signal.SIGTERM)
        assert process.wait(timeout=800) == 128 + signal.SIGTERM
