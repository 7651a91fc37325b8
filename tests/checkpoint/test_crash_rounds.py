"""scripts/crash-rounds: one of its rounds of real kills."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_nothing_is_lost_in_a_round() -> None:
    words = ["--kind", "background", "--rounds", "1", "--seed", "5", "--json"]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "crash_rounds.py", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["kills_of_one"] + report["kills_of_all"] == 1
    assert report["saves"] > 0
    faults = ("lost_steps", "blocked_resumes", "damaged_steps", "left_behind", "unclear_ends")
    assert [report[fault] for fault in faults] == [0] * 5
