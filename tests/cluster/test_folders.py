"""Copies of a launch's folder: files stay inside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from zerokit.cluster.folders import Changes, pack, pack_folder, put_file, temporary_folder
from zerokit.launch.failures import LaunchError


def test_a_file_is_put_below_the_folder_and_nowhere_else(tmp_path: Path) -> None:
    folder, content = tmp_path / "folder", pack(b"{}\0")
    put_file(folder, "node-0/report.json", content)
    put_file(folder, "node-0/report.json", content, more=True)
    assert (folder / "node-0" / "report.json").read_bytes() == b"{}\0{}\0"
    (folder / "way").symlink_to(tmp_path)
    for name in ("/etc/passwd", "../other", "node-0/../../other", "way/other", "", "."):
        with pytest.raises(LaunchError, match="outside the folder"):
            put_file(folder, name, pack(b""))


def test_what_changes_in_a_copy_is_told_once(tmp_path: Path) -> None:
    """New and changed files at the top, and below it logs, by what they have grown."""
    (source := tmp_path / "source").mkdir()
    (source / "job").write_text("work")
    (source / "rank-0").mkdir()
    (copy := tmp_path / "copy").mkdir()
    changes = Changes(copy, pack_folder(source))
    assert (copy / "job").read_text() == "work"
    assert [*changes.take(logs=True)] == []
    (copy / "result").write_text("1")
    (copy / "rank-0").mkdir()
    (log := copy / "rank-0" / "stdout.log").write_text("a word\n")
    assert [one["name"] for one in changes.take(logs=False)] == ["result"]
    for more in ("", "another\n"):
        with log.open("a") as file:
            file.write(more)
        for one in changes.take(logs=True):
            put_file(source, **one)
    assert (source / "rank-0" / "stdout.log").read_text() == "a word\nanother\n"
    assert [*changes.take(logs=True)] == []


def test_what_a_killed_process_leaves_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    program = (
        "from zerokit.cluster.folders import *\nwith temporary_folder() as f: print(f, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().strip())
        with temporary_folder() as own:
            assert {own, folder} == set(tmp_path.iterdir())  # the other one is alive
            other.send_signal(signal.SIGKILL)
            other.wait()
            with temporary_folder() as third:
                assert {own, third} == set(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == []
