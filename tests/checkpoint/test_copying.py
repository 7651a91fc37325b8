"""Ranges moved by threads: the right bytes, the right checksums, and nothing left open when something fails."""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerokit import files
from zerokit.checkpoint import copying
from zerokit.checkpoint.checksum import Piece
from zerokit.checkpoint.copying import Conversion, Copier
from zerokit.checkpoint.disk import opened
from zerokit.errors import CheckpointError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(3000))
    return path


def copy_all(source: Path, target: Path, **options: object) -> None:
    """The whole file in two pieces."""
    with Copier[int](**options) as copier:  # type: ignore[arg-type]
        file, out = copier.source(source, opened(source)), copier.target(target, 3000)
        copier.copy(0, 1000, file, 0, out, 0)
        copier.copy(1, 2000, file, 1000, out, 1000)
        copier.release(file)
        copier.release(out)


def open_files() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return found


@settings(max_examples=40)
@given(data=st.data())
def test_any_ranges_between_any_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("ranges")
    contents = [os.urandom(size) for size in data.draw(st.lists(st.integers(0, 300), min_size=1, max_size=3))]
    for number, content in enumerate(contents):
        (folder / f"source{number}").write_bytes(content)
    targets: list[bytearray] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "BUFFER_BYTES", data.draw(st.sampled_from([8, 24, 1 << 20])))
        patch.setattr(copying, "_MOST_RUNS", data.draw(st.integers(1, 3)))
        with Copier[str](jobs=data.draw(st.integers(1, 3))) as copier:
            expected: dict[str, bytes] = {}
            for number in range(data.draw(st.integers(1, 3))):
                parts = []
                for _ in range(data.draw(st.integers(0, 8))):
                    which = data.draw(st.integers(0, len(contents) - 1))
                    start = data.draw(st.integers(0, len(contents[which])))
                    parts.append((which, start, data.draw(st.integers(0, len(contents[which]) - start))))
                    if data.draw(st.booleans()):  # what follows at once, in both files: one run
                        parts.append((which, sum(parts[-1][1:]), len(contents[which]) - sum(parts[-1][1:])))
                whole = bytearray(sum(size for *_, size in parts))
                target = copier.target(folder / f"target{number}", len(whole))
                sources = [copier.source(path, opened(path)) for path in sorted(folder.glob("source*"))]
                offset = 0
                for which, start, size in parts:
                    key = data.draw(st.sampled_from("abc"))
                    copier.copy(key, size, sources[which], start, target, offset)
                    content = contents[which][start : start + size]
                    if content:
                        expected[key] = expected.get(key, b"") + content
                    whole[offset : offset + size] = content
                    offset += size
                for file in (*sources, target):
                    copier.release(file)
                targets.append(whole)
    assert [(folder / f"target{number}").read_bytes() for number in range(len(targets))] == targets
    assert copier.pieces == {key: Piece(zlib.crc32(part), len(part)) for key, part in expected.items()}


def test_a_conversion_keeps_elements_whole(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "BUFFER_BYTES", 64)
    halves = Conversion(lambda view: bytes(view[2::4]), 4, 1)
    with Copier[str](jobs=2) as copier:
        file, target = copier.source(source, opened(source)), copier.target(tmp_path / "out", 500)
        copier.copy("a", 2000, file, 1000, target, 0, halves)
        copier.release(file)
        copier.release(target)
    content = source.read_bytes()[1000:]
    assert (tmp_path / "out").read_bytes() == content[2::4]
    assert copier.pieces == {"a": Piece(zlib.crc32(content), 2000)}


@pytest.mark.parametrize("what", ["read", "written", "synced", "interrupted"])
def test_a_failure_ends_the_threads_and_closes_the_files(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    before, threads = open_files(), set(threading.enumerate())

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    kind: type[BaseException] = CheckpointError
    message = f"(source|out): cannot be {what}: Input/output error"
    if what == "interrupted":
        kind, message = KeyboardInterrupt, "^$"
    else:
        monkeypatch.setattr(os, {"read": "preadv", "written": "pwritev", "synced": "fsync"}[what], fail)
    with pytest.raises(kind, match=message):
        copy_all(source, tmp_path / "out", progress=interrupt if what == "interrupted" else None)
    assert open_files() == before
    assert set(threading.enumerate()) == threads


def test_many_files_are_not_open_at_once(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 0
    preadv = os.preadv

    def count(fd: int, views: Sequence[WriteableBuffer], offset: int) -> int:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")))
        return preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", count)
    before = len(os.listdir("/proc/self/fd"))
    with Copier[int](jobs=2) as copier:
        for number in range(300):
            file, target = copier.source(source, opened(source)), copier.target(tmp_path / f"{number}", 10)
            copier.copy(number, 10, file, 0, target, 0)
            copier.release(file)
            copier.release(target)
    assert most - before < 120
    assert len(list(tmp_path.iterdir())) == 301


def test_files_are_told_when_they_are_on_the_disk(tmp_path: Path, source: Path) -> None:
    """With what was copied into each; a failure there ends the work."""
    order: list[object] = []

    class Recording(files.System):
        def sync(self, fd: int) -> None:
            order.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name)

    def synced(path: Path, size: int, pieces: Mapping[int, Piece]) -> None:
        content = path.read_bytes()
        parts = {0: content[:1000], 1: content[1000:]}
        assert pieces == {key: Piece(zlib.crc32(part), len(part)) for key, part in parts.items() if part}
        assert size == len(content)
        order.append((path.name, sorted(pieces)))
        if path.name == "last":
            raise CheckpointError("no room")

    with files.replaced(Recording()):
        with Copier[int](jobs=2, synced=synced) as copier:
            empty = copier.target(tmp_path / "empty", 0)
            copier.release(empty)
        copy_all(source, tmp_path / "out", synced=synced)
        with pytest.raises(CheckpointError, match="no room"):
            copy_all(source, tmp_path / "last", synced=synced)
    assert order == ["empty", ("empty", []), "out", ("out", [0, 1]), "last", ("last", [0, 1])]
