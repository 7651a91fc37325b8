"""Marked processes are found and killed wherever they have gone."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest

from zerokit.launch.processes import MARK, kill_marked, marked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="marks are read from /proc")

# A process that leaves its parent, its group and its session, as torchrun's ranks and daemons do.
RUNAWAY = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"


def test_an_orphan_in_a_session_of_its_own_is_killed() -> None:
    launch_id = uuid.uuid4().hex
    subprocess.run([sys.executable, "-c", RUNAWAY], env={**os.environ, MARK: launch_id}, check=True)
    assert len(marked(launch_id)) == 1
    assert kill_marked(launch_id) == []
    assert marked(launch_id) == []


def test_other_launches_and_spared_processes_live_on() -> None:
    launch_id = uuid.uuid4().hex
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, MARK: launch_id}) as process:
        assert kill_marked(uuid.uuid4().hex) == []
        assert kill_marked(launch_id, spare=frozenset([process.pid])) == []
        assert process.poll() is None
        assert kill_marked(launch_id) == []
        assert process.wait() == -9
