"""Marked processes are found wherever they have gone."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

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
