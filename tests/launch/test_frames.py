"""Lines between a launcher and a node: what is written is read, what is no frame is not, files stay inside."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerokit.launch.frames import FrameError, frame, inside, pack, parse, put_file, relocate, unpack

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


@given(st.binary())
def test_bytes_come_back(data: bytes) -> None:
    assert unpack(pack(data)) == data


@pytest.mark.parametrize("text", ["?", "AAAA", pack(b"whole" * 100)[:-8]])
def test_a_damaged_file_is_refused(text: str) -> None:
    with pytest.raises(FrameError, match="damaged"):
        unpack(text)


@pytest.mark.parametrize("name", ["/etc/passwd", "../other", "node-0/../../other", "", "."])
def test_files_outside_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(FrameError, match="outside the folder"):
        inside(tmp_path, name)


def test_a_link_that_leads_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "way").symlink_to(tmp_path)
    with pytest.raises(FrameError, match="outside the folder"):
        put_file(tmp_path / "folder", {"name": "way/other", "content": pack(b"")})


def test_a_file_is_put_below_the_folder(tmp_path: Path) -> None:
    put_file(tmp_path, {"name": "node-0/report.json", "content": pack(b"{}")})
    assert [path.name for path in (tmp_path / "node-0").iterdir()] == ["report.json"]
    assert (tmp_path / "node-0" / "report.json").read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("argument", "there"),
    [
        ("/here/job", "/copy"),
        ("/here/job/settings.json", "/copy/settings.json"),
        ("--out=/here/job/x", "--out=/copy/x"),
        ("/here/job-2/settings.json", "/here/job-2/settings.json"),
        ("/else/here/job/x", "/else/here/job/x"),
        ("2", "2"),
    ],
)
def test_only_paths_in_the_folder_become_the_copys(argument: str, there: str) -> None:
    assert relocate([argument], "/here/job", Path("/copy")) == [there]
