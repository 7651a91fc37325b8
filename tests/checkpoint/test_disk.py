"""Reads and writes to the last byte; directories that appear whole or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerokit.checkpoint import disk
from zerokit.errors import CheckpointError


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A target that exists, with one file."""
    target = tmp_path / "out"
    target.mkdir()
    (target / "file").write_text("old")
    return target


@contextmanager
def small_files() -> Iterator[None]:
    """No file of this process may grow beyond 4096 bytes: nor pytest's own output, so no fixture."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@given(sizes=st.lists(st.integers(0, 50), max_size=12), offset=st.integers(0, 30), at_once=st.integers(1, 40))
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


def test_more_buffers_than_one_call_takes(tmp_path: Path) -> None:
    content = os.urandom(2500)
    with disk.new_file(tmp_path / "many", len(content)) as fd:
        disk.write_exactly(fd, [content[i : i + 1] for i in range(len(content))], 0, "many")
        found = [bytearray(1) for _ in content]
        disk.read_exactly(fd, found, 0, "many")
    assert b"".join(found) == content


def test_a_file_that_ends_early_is_truncated(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"0123456789")
    with disk.opened(path) as fd, pytest.raises(CheckpointError) as caught:
        disk.read_exactly(fd, [bytearray(4), bytearray(8)], 3, path)
    assert str(caught.value) == f"{path}: truncated: it ends at byte 10, but bytes 3 to 15 were expected"


def test_a_full_disk_is_told_with_needed_and_free_bytes(tmp_path: Path) -> None:
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(CheckpointError) as caught:
        disk.write_exactly(full.fileno(), [b"abc", b"de"], 0, tmp_path / "a")
    assert str(caught.value).startswith(
        f"{tmp_path / 'a'}: cannot be written: No space left on device: 5 bytes"
    )
    assert str(caught.value).endswith("are free")


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


def test_a_file_system_without_fallocate_still_gives_the_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with disk.new_file(tmp_path / "a", 5000):
        pass
    with disk.new_file(tmp_path / "empty", 0):
        pass
    assert [(tmp_path / name).stat().st_size for name in ("a", "empty")] == [5000, 0]


def test_a_storage_failure_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match="a: cannot be synced: Input/output error: the storage failed"):
        disk.write_file(tmp_path / "a", b"x")


def test_files_are_made_new_and_obey_the_umask(tmp_path: Path) -> None:
    mask = os.umask(0o027)
    try:
        with disk.staged(tmp_path / "out") as work:
            disk.write_file(work / "a", b"x")
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "out" / "a").stat().st_mode) == 0o640
    with pytest.raises(CheckpointError, match="a: cannot be created: File exists"):
        disk.write_file(tmp_path / "out" / "a", b"y")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name, message in (
        ("pipe", "not a regular file"),
        (".", "not a regular file"),
        ("none", "cannot be opened: No such file or directory"),
    ):
        with pytest.raises(CheckpointError, match=message), disk.opened(tmp_path / name):
            pytest.fail("the body ran")


def test_a_staged_directory_appears_when_it_is_whole(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with disk.staged(target) as work:
        assert work.parent == tmp_path
        assert work.name.startswith(".out.tmp-")
        disk.write_file(work / "a", b"new")
        assert not target.exists()
    assert names(tmp_path) == ["out"]
    assert (target / "a").read_bytes() == b"new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, CheckpointError])
@pytest.mark.parametrize("force", [False, True])
def test_a_failure_leaves_everything_as_it_was(
    tmp_path: Path, old: Path, error: type[BaseException], force: bool
) -> None:
    target = old if force else tmp_path / "fresh"

    def fail(work: Path) -> None:
        disk.write_file(work / "a", b"new")
        raise error

    with pytest.raises(error), disk.staged(target, force=force) as work:
        fail(work)
    assert names(tmp_path) == ["out"]
    assert (old / "file").read_text() == "old"


@pytest.mark.parametrize("exchange", [True, False], ids=["renameat2", "rename"])
def test_force_replaces_the_whole_directory(
    tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(disk, "_rename", lambda *_: False)
    with disk.staged(old, force=True) as work:
        disk.write_file(work / "a", b"new")
        assert (old / "file").read_text() == "old"
    assert names(tmp_path) == ["out"]
    assert names(old) == ["a"]


def test_the_exchange_is_one_step_here(tmp_path: Path) -> None:
    """Where the kernel has renameat2 there is no moment with neither directory."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x").touch()
    if disk._rename(tmp_path / "a", tmp_path / "b", disk._RENAME_EXCHANGE):
        assert names(tmp_path / "a") == ["x"]
    with pytest.raises(FileNotFoundError):
        disk._rename(tmp_path / "none", tmp_path / "c", disk._RENAME_NOREPLACE)


def test_a_system_without_renameat2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: object())
    with disk.staged(tmp_path / "out") as work:
        disk.write_file(work / "a", b"new")
    assert names(tmp_path) == ["out"]


def test_a_failed_replacement_by_two_renames_puts_the_old_one_back(
    tmp_path: Path, old: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename, calls = os.rename, 0

    def second_fails(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    monkeypatch.setattr(disk, "_rename", lambda *_: False)
    monkeypatch.setattr(os, "rename", second_fails)
    with pytest.raises(CheckpointError, match="out: cannot be put in place"), disk.staged(old, force=True):
        pass
    assert names(tmp_path) == ["out"]
    assert (old / "file").read_text() == "old"


@pytest.mark.parametrize("kind", ["file", "empty", "full"])
@pytest.mark.parametrize("late", [False, True])
def test_what_exists_is_not_replaced_without_force(tmp_path: Path, kind: str, late: bool) -> None:
    target = tmp_path / "out"

    def appear() -> None:
        if kind == "file":
            target.touch()
        else:
            target.mkdir()
            if kind == "full":
                (target / "file").touch()

    if not late:
        appear()
    with pytest.raises(CheckpointError, match="exists"), disk.staged(target):
        appear()
    assert names(tmp_path) == ["out"]
    assert target.is_file() or names(target) == (["file"] if kind == "full" else [])


def test_force_replaces_directories_of_files_only(tmp_path: Path, old: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(old)
    (tmp_path / "home" / "documents").mkdir(parents=True)
    for name, message in (
        ("file", "exists and is no directory"),
        ("link", "exists and is no directory"),
        ("home", "holds the directory 'documents', so it is no output of this kind"),
        ("none/out", "its parent directory .*none does not exist"),
    ):
        with pytest.raises(CheckpointError, match=message), disk.staged(tmp_path / name, force=True):
            pytest.fail("the body ran")
    assert names(tmp_path) == ["file", "home", "link", "out"]


def test_long_names_fit(tmp_path: Path) -> None:
    target = tmp_path / ("é" * 120)
    with disk.staged(target):
        pass
    assert target.is_dir()


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("a", "a", "the output is the source itself"),
        ("a", "b/../a/", "the output is the source itself"),
        ("a", "a/b", "lies in its source"),
        ("a/b/c", "a", "contains its source"),
        ("link", "a/b", "lies in its source"),
        ("a", "ab", None),
        ("a/b", "a/b.to-4", None),
    ],
)
def test_source_and_target_are_apart(tmp_path: Path, source: str, target: str, message: str | None) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    if message is None:
        disk.require_apart(tmp_path / source, tmp_path / target)
        return
    with pytest.raises(CheckpointError, match=message):
        disk.require_apart(tmp_path / source, tmp_path / target)


def test_latest_is_replaced_in_one_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.write_latest(tmp_path, "step-00000001", 0xAB)
    disk.write_latest(tmp_path, "step-00000002", 0x1A2B3C4D)
    assert (tmp_path / "latest").read_text() == "step-00000002 1a2b3c4d\n"

    def fail(source: Path, target: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CheckpointError, match="latest: cannot be replaced"):
        disk.write_latest(tmp_path, "step-00000003", 1)
    assert names(tmp_path) == ["latest"]
    assert (tmp_path / "latest").read_text() == "step-00000002 1a2b3c4d\n"
