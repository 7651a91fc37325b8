"""`pytest benchmarks/` runs, as a process: each benchmark stands beside a peer or floor, and two runs compare."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from benchmarks.measuring import ROOT

QUICK = ["--benchmark-min-rounds=1", "--benchmark-max-time=0", "--size-mb=4"]


def benchmarks(folder: Path, *words: str) -> str:
    """What pytest says; under pytest-xdist the plug-in would measure nothing."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    storage = ["-p", "no:cacheprovider", f"--benchmark-storage={folder}", f"--basetemp={folder / 'work'}"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, *QUICK, *storage],
        cwd=ROOT,
        env=own,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.full
def test_every_group_has_zerokit_and_what_it_is_compared_with(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    said = benchmarks(tmp_path, "benchmarks/", f"--benchmark-json={found}")
    groups = defaultdict[str, list[str]](list)
    for one in json.loads(found.read_text())["benchmarks"]:
        assert one["stats"]["median"] > 0
        groups[one["group"]].append(one["param"])
    subjects = {group.partition(":")[0] for group in groups}
    assert subjects >= {
        *("layout", "plan", "checksum", "copy", "reshard", "verify", "save", "load", "background save"),
        *("gather", "reduction", "host time of a step"),
    }
    for group, names in groups.items():
        ours = [name for name in names if name.startswith("zerokit")]
        assert 0 < len(ours) < len(names), group
        assert f"benchmark '{group}': {len(names)} tests" in said


def test_a_run_compares_with_an_earlier_one(tmp_path: Path) -> None:
    words = ["benchmarks/test_checkpoint_parts.py", "-k", "checksum"]
    benchmarks(tmp_path, *words, "--benchmark-save=first", "--benchmark-compare")  # with nothing yet
    said = benchmarks(tmp_path, *words, "--benchmark-compare")
    for name in ("zerokit", "zlib.crc32"):
        assert f"test_checksum[{name}] (NOW)" in said
        assert f"test_checksum[{name}] (0001_first)" in said
