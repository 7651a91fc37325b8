"""Reads, writes and copies to the last byte; nothing is left open when one fails."""

from __future__ import annotations

import errno
import os
import resource
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerokit.checkpoint import disk
from zerokit.checkpoint.copying import Copier
from zerokit.checkpoint.requests import Request
from zerokit.checkpoint.source import Source
from zerokit.errors import CheckpointError


@contextmanager
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 4096 bytes: nor pytest's own output, so no fixture."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@given(
    sizes=st.lists(st.integers(0, 50), max_size=12) | st.just([1] * 2500),
    offset=st.integers(0, 30),
    at_once=st.integers(20, 4000),
)
def test_what_is_written_in_pieces_is_read_in_pieces(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], offset: int, at_once: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces"
    contents = [os.urandom(size) for size in sizes]
    preadv, pwritev = os.preadv, os.pwritev

    def few(views: list[memoryview]) -> list[memoryview]:
        """No more than `at_once` bytes, as a slow network file system would take."""
        kept, room = [], at_once
        for view in views:
            kept.append(view[:room])
            room -= min(room, view.nbytes)
        return kept

    with pytest.MonkeyPatch.context() as patch, path.open("w+b", buffering=0) as file:
        patch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, few(views), at))
        patch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, few(views), at))
        disk.write_exactly(file.fileno(), contents, offset, path)
        found = [bytearray(size) for size in sizes]
        disk.read_exactly(file.fileno(), found, offset, path)
        assert found == contents
        file.seek(offset)
        assert file.read() == b"".join(contents)


def test_a_full_disk_is_told_with_needed_and_free_bytes(tmp_path: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(CheckpointError) as caught:
        disk.write_exactly(full.fileno(), [b"abc", b"de"], 0, tmp_path / "a")
    assert str(caught.value).startswith(
        f"{tmp_path / 'a'}: cannot be written: No space left on device: 5 bytes"
    )
    assert str(caught.value).endswith("are free")
    for number, words in (
        (errno.ENOSPC, "inodes are used up"),
        (errno.EDQUOT, "quota of bytes or files"),
        (errno.EACCES, "Permission denied: check its permissions and its owner"),
    ):
        with pytest.raises(CheckpointError, match=words), disk.explained(tmp_path / "new", "created"):
            raise OSError(number, os.strerror(number))  # no count of bytes: a name is all that was asked for


def test_a_file_beyond_the_limit_is_told_at_lay_out(tmp_path: Path) -> None:
    with (
        small_files(),
        pytest.raises(CheckpointError, match=r"cannot be laid out: File too large: .*ulimit -f"),
        disk.new_file(tmp_path / "a", 5000),
    ):
        pytest.fail("the body ran")
    with small_files():
        disk.write_file(tmp_path / "b", bytes(4096))
    assert (tmp_path / "b").stat().st_size == 4096


def test_files_are_no_links_and_obey_the_umask(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        (tmp_path / "out").mkdir()
        disk.write_file(tmp_path / "out" / "a", b"x")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "out" / "a").stat().st_mode) == 0o640
    (tmp_path / "out" / "link").symlink_to("a")
    for name in ("a", "link"):
        with (
            pytest.raises(CheckpointError, match=f"{name}: cannot be created: File exists"),
            disk.new_file(tmp_path / "out" / name, 1),
        ):
            pass


if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


NOT_ASKED = cast(Source, None)
"""Requests for paths need no source."""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(os.urandom(3000))
    return path


def copy_all(source: Path, target: Path, **options: object) -> None:
    """The whole file in two pieces."""
    with Copier(**options) as copier:  # type: ignore[arg-type]
        out = copier.target(target, 3000)
        copier.copy(
            NOT_ASKED, [Request("a", source, 0, 1000, out, 0), Request("b", source, 1000, 2000, out, 1000)]
        )
        copier.release(out)


def open_files() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return found


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
    with Copier(jobs=2) as copier:
        for number in range(300):
            target = copier.target(tmp_path / f"{number}", 10)
            copier.copy(NOT_ASKED, [Request("all", source, 0, 10, target, 0)])
            copier.release(target)
    assert most - before < 120
    assert len(list(tmp_path.iterdir())) == 301
