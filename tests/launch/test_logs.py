"""Ranks' logs, shown line by line while they grow."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerokit.launch import logs as launch_logs
from zerokit.launch.logs import RankLogs


def log_of(folder: Path, rank: int, name: str = "stdout") -> Path:
    (folder / f"rank-{rank}").mkdir()
    return folder / f"rank-{rank}" / f"{name}.log"


@given(st.lists(st.text("aé\n", max_size=8), max_size=8))
def test_complete_lines_are_shown_once(tmp_path_factory: object, pieces: list[str]) -> None:
    folder = tmp_path_factory.mktemp("logs")  # type: ignore[attr-defined]
    shown: list[str] = []
    logs, path = RankLogs(folder, lambda line, stream: shown.append(line)), log_of(folder, 2)
    with path.open("ab") as file:
        for piece in pieces:
            for part in (piece.encode()[:3], piece.encode()[3:]):  # also in the middle of a character
                file.write(part)
                file.flush()
                logs.look()
    *lines, rest = "".join(pieces).split("\n")
    assert shown == [f"rank 2: {line}" for line in lines]
    logs.look(last=True)
    assert shown[len(lines) :] == ([f"rank 2: {rest}"] if rest else [])


def test_every_rank_is_named_and_other_files_are_not_shown(tmp_path: Path) -> None:
    shown: list[tuple[str, str]] = []
    log_of(tmp_path, 1).write_text("out\n")
    log_of(tmp_path, 3, "stderr").write_text("err\nno end")
    (tmp_path / "rank-3/error.json").write_text("{}\n")
    logs = RankLogs(tmp_path, lambda *what: shown.append(what))
    logs.look()
    logs.look()
    assert shown == [("rank 1: out", "stdout"), ("rank 3: err", "stderr")]


def test_a_progress_bar_is_shown_now_and_then_and_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    logs, path = RankLogs(tmp_path, lambda line, stream: shown.append(line)), log_of(tmp_path, 0, "stderr")
    with path.open("ab", buffering=0) as file:
        for number in range(3):
            file.write(b"\r %d%%|" % number)
            logs.look()
        assert shown == ["rank 0:  0%|"]
        monkeypatch.setattr(launch_logs, "_REDRAWN_SECONDS", 0.0)
        logs.look()
        file.write(b"\r 3%|\r 4%|")
        logs.look()
        assert shown[1:] == ["rank 0:  4%|"]
        file.write(b"\r 9%|\nwhole\r\n\r ba\r    \r")
        logs.look(last=True)
        assert shown[2:] == ["rank 0:  9%|", "rank 0: whole"]
