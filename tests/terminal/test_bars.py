"""What offline commands show while they work, and how they write sizes and names."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import environment
from tests.support.checkpoints import example_content, example_layout, write_checkpoint
from zerokit.bench.record.status import Progress
from zerokit.terminal import bars
from zerokit.terminal.working import byte_bar
from zerokit.text import decimal_size, printable


def test_a_bar_is_drawn_on_a_terminal_and_stdout_stays_data(tmp_path: Path) -> None:
    layout = example_layout(2)
    write_checkpoint(tmp_path / "step", layout, example_content(layout))
    master, terminal = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "zerokit", "verify", "step"],
            cwd=tmp_path,
            env=environment(tmp_path, TERM="xterm"),
            stdout=subprocess.PIPE,
            stderr=terminal,
            check=True,
            timeout=800,
        )
        drawn = os.read(master, 1 << 16).decode()
    finally:
        os.close(terminal)
        os.close(master)
    assert "verifying" in drawn
    assert "100%" in drawn or "kB" in drawn
    assert done.stdout.startswith(b"step: intact: step 100 of 2 ranks")


def test_no_bar_is_drawn_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    with byte_bar("verifying") as show:
        assert show is None
    assert capsys.readouterr() == ("", "")


def test_sizes_are_decimal_and_control_characters_escaped() -> None:
    sizes = (0, 999, 1000, 999_999, 2_200_000_000, 5 * 10**18)
    shown = ["0 bytes", "999 bytes", "1.0 kB", "1000.0 kB", "2.2 GB", "5000.0 PB"]
    assert [decimal_size(size) for size in sizes] == shown
    assert printable("wörter\x1b[2J\n\u202e") == "wörter\\x1b[2J\\n\\u202e"


def test_without_a_terminal_a_line_now_and_then_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bars, "_LINE_SECONDS", 0.0)
    shown = bars.Bars()
    with shown:
        shown.show(Progress(done=3, total=9, warmup=4, loss=None, step_ms=None))
        shown.show(Progress(done=7, total=9, warmup=4, loss=2.5, step_ms=12.4))
        monkeypatch.setattr(bars, "_LINE_SECONDS", 1e9)
        shown.show(Progress(done=8, total=9, warmup=4, loss=2.4, step_ms=12.4))
    told = capsys.readouterr()
    assert told.err.splitlines() == ["warm-up: step 3 of 9", "measuring: step 7 of 9  loss 2.500  12 ms"]
    assert told.out == ""
