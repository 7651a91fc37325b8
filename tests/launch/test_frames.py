"""Lines between a launcher and a node: what is written is read, what is no frame is not, files stay inside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.launch.ranks import wait_for
from zerokit.launch import frames
from zerokit.launch.failures import LaunchError
from zerokit.launch.frames import Peer, frame, pack, parse, put_file

JSON = st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3))


@given(st.sampled_from(["hello", "exit"]), st.dictionaries(st.sampled_from("abc"), JSON))
def test_a_frame_is_one_line(kind: str, content: dict[str, object]) -> None:
    line = frame(kind, **content)
    assert line.count(b"\n") == 1
    assert parse(line) == (kind, content)


@pytest.mark.parametrize(
    "line",
    [b"\n", b"Welcome to gpu01!\n", b"[1, 2]\n", b"3\n", b'{"a": 1}\n', b'{"zerokit": 1}\n', b"\xff\n"],
)
def test_other_programs_output_is_no_frame(line: bytes) -> None:
    assert parse(line) is None


def test_a_peer_that_says_nothing_is_alive_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two launches a leader may write a report for longer than others would wait for a word."""
    monkeypatch.setattr(frames, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(frames, "SILENCE_SECONDS", 2.0)
    (ours, our_end), (their_end, theirs) = os.pipe(), os.pipe()
    other_lines: list[bytes] = []
    here = Peer(os.fdopen(their_end, "rb"), open(os.devnull, "wb"), other_lines.append)  # noqa: SIM115
    there = Peer(os.fdopen(ours, "rb"), os.fdopen(theirs, "wb"))
    os.write(theirs, b"Welcome!\n")
    there.say("hello", a=1)
    wait_for(lambda: here.hear() == ("hello", {"a": 1}))
    wait_for(lambda: there.silent)  # longer than that the other one has only been alive
    assert not here.silent
    assert here.hear() is None
    there.close()
    with pytest.raises(EOFError):
        wait_for(lambda: here.hear() is not None)
    assert other_lines == [b"Welcome!\n"]
    os.close(our_end)


def test_a_file_is_put_below_the_folder_and_nowhere_else(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    report = {"name": "node-0/report.json", "content": pack(b"{}\0")}
    put_file(folder, report)
    put_file(folder, report | {"more": True})
    assert (folder / "node-0" / "report.json").read_bytes() == b"{}\0{}\0"
    (folder / "way").symlink_to(tmp_path)
    for name in ("/etc/passwd", "../other", "node-0/../../other", "way/other", "", "."):
        with pytest.raises(LaunchError, match="outside the folder"):
            put_file(folder, {"name": name, "content": pack(b"")})
