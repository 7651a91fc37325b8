"""Reading and writing to the last byte, and commits by renaming.

A directory becomes visible whole or not at all: it is written under a temporary name beside its place, synced,
renamed, and its parent synced. Every failure of the operating system comes out as a `CheckpointError` that names the
file.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from zerokit.errors import CheckpointError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

LATEST_NAME = "latest"

Holds = Callable[[Path], bool]
"""Whether a folder is one that an output of this kind has inside."""

_IOV_MAX = 1024
"""Buffers that one vectored call takes, on Linux and everywhere else that has a limit."""

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)

_ADVICE = {
    errno.EACCES: "check its permissions and its owner",
    errno.EPERM: "check its permissions and its owner",
    errno.EROFS: "choose a place that can be written",
    errno.EIO: "the storage failed: look at the system's log",
    errno.EFBIG: "the file system or a limit (ulimit -f) allows no file of this size",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
}


@contextmanager
def explained(where: str | Path, task: str, *, needed: int = 0, fd: int | None = None) -> Iterator[None]:
    """Raise an `OSError` of the body as `CheckpointError`: "WHERE: cannot be TASK: …", with advice.

    `needed` bytes are compared with what is free on the disk of `fd` (or of `where`) if that is full.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = f"{needed} bytes are needed, {_free_bytes(where if fd is None else fd)} are free"
        else:
            advice = _ADVICE.get(error.errno or 0, "")
        raise CheckpointError(
            f"{where}: cannot be {task}: {reason}{': ' if advice else ''}{advice}"
        ) from error


def _free_bytes(place: str | Path | int) -> int | str:
    try:
        found = os.statvfs(place)
    except OSError:
        return "an unknown number"
    return found.f_bavail * found.f_frsize


def read_exactly(fd: int, buffers: Sequence[WriteableBuffer], offset: int, where: str | Path) -> None:
    """Fill the writable, contiguous `buffers` one after the other with the bytes of `fd` from byte `offset` on.

    Raises `CheckpointError`, naming `where`, if the file ends before or cannot be read.
    """
    with explained(where, "read", fd=fd):
        missing = _transfer(os.preadv, fd, buffers, offset)
    if missing:
        wanted = offset + sum(memoryview(buffer).nbytes for buffer in buffers)
        raise CheckpointError(
            f"{where}: truncated: it ends at byte {wanted - missing}, but bytes {offset} to {wanted} were expected"
        )


def write_exactly(fd: int, buffers: Sequence[ReadableBuffer], offset: int, where: str | Path) -> None:
    """Write the contiguous `buffers` one after the other to `fd` from byte `offset` on.

    Raises `CheckpointError`, naming `where`, if that fails; a full disk with the bytes needed and free.
    """
    needed = sum(memoryview(buffer).nbytes for buffer in buffers)
    with explained(where, "written", needed=needed, fd=fd):
        missing = _transfer(os.pwritev, fd, buffers, offset)
    if missing:
        raise CheckpointError(
            f"{where}: cannot be written: the system took {needed - missing} of {needed} bytes"
        )


def _transfer(
    call: Callable[[int, list[memoryview], int], int],
    fd: int,
    buffers: Sequence[ReadableBuffer],
    offset: int,
) -> int:
    """Call until all of `buffers` is moved; returns the bytes that are missing when a call moves nothing."""
    views = [view.cast("B") for buffer in buffers if (view := memoryview(buffer)).nbytes]
    first = 0
    while first < len(views):
        # A call may move less than asked for: 2 GiB at most on Linux, and anything on network file systems.
        moved = call(fd, views[first : first + _IOV_MAX], offset)
        if not moved:
            return sum(view.nbytes for view in views[first:])
        offset += moved
        while first < len(views) and moved >= views[first].nbytes:
            moved -= views[first].nbytes
            first += 1
        if moved:
            views[first] = views[first][moved:]
    return 0


def lay_out(fd: int, size: int, where: str | Path) -> None:
    """Give the new file `fd` its `size` in bytes, with blocks on the disk where the file system can do so.

    A full disk then shows before the work rather than in its middle, and the blocks lie together.
    """
    with explained(where, "laid out", needed=size, fd=fd):
        if size:
            try:
                os.posix_fallocate(fd, 0, size)
                return
            except OSError as error:
                if error.errno not in _UNSUPPORTED:
                    raise
        os.ftruncate(fd, size)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """The descriptor of an existing regular file, for reading.

    Raises `CheckpointError` where it is missing, may not be read or is of another kind.
    """
    with explained(path, "opened"):
        # Opening a pipe that nobody writes to would wait for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        yield fd
    finally:
        os.close(fd)


@contextmanager
def new_file(path: Path, size: int) -> Iterator[int]:
    """The descriptor of a new file of `size` bytes, laid out; synced to the disk when the body ends well.

    Raises `CheckpointError` if the file exists or cannot be made.
    """
    with explained(path, "created"):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        lay_out(fd, size, path)
        yield fd
        with explained(path, "synced", needed=size, fd=fd):
            os.fsync(fd)
    finally:
        os.close(fd)


def write_file(path: Path, content: bytes) -> None:
    """Write a new small file whole, and sync it."""
    with new_file(path, len(content)) as fd:
        write_exactly(fd, [content], 0, path)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    with explained(path, "synced"):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def require_apart(source: Path, target: Path) -> None:
    """Raises `CheckpointError` where one of the two directories is, or lies in, the other."""
    inner, outer = target.resolve(), source.resolve()
    if inner == outer:
        raise CheckpointError(f"{target}: the output is the source itself: choose another directory")
    if inner.is_relative_to(outer):
        raise CheckpointError(
            f"{target}: the output lies in its source {source}: choose a directory outside it"
        )
    if outer.is_relative_to(inner):
        raise CheckpointError(f"{target}: the output contains its source {source}: choose another directory")


def require_vacant(target: Path, *, force: bool, holds: Holds | None = None) -> None:
    """Raises `CheckpointError` unless the directory `target` can be made, or replaced if `force`.

    Only a directory of plain files, and of folders that it `holds`, is ever replaced: others are no output of zerokit.
    """
    with explained(target, "looked at"):
        if not target.parent.is_dir():
            raise CheckpointError(
                f"{target}: its parent directory {target.parent} does not exist: create it first"
            )
        if not os.path.lexists(target):
            return
        if not force:
            raise CheckpointError(
                f"{target}: exists: choose another output, or --force (force=True) to replace it"
            )
        if target.is_symlink() or not target.is_dir():
            raise CheckpointError(f"{target}: exists and is no directory: it is not replaced")
        with os.scandir(target) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False) and not (holds and holds(Path(entry.path))):
                    raise CheckpointError(
                        f"{target}: holds the directory {entry.name!r}, so it is no output of this kind: it is not "
                        "replaced"
                    )


@contextmanager
def staged(target: Path, *, force: bool = False, holds: Holds | None = None) -> Iterator[Path]:
    """A new, empty directory beside `target` that takes its place, durably, when the body ends well.

    Files must be synced by the body. If it fails, for whatever reason, the directory is removed with all it
    holds and `target` is as before. `force`: an existing target is replaced in one step. Raises `CheckpointError`
    before the body if the target exists without `force`, or is one that `require_vacant` refuses.
    """
    require_vacant(target, force=force, holds=holds)
    target = target.parent.resolve() / target.name
    work = target.parent / f".{target.name[:60]}.tmp-{secrets.token_hex(6)}"
    with explained(target, "created"):
        work.mkdir()
    try:
        yield work
        sync_directory(work)
        with explained(target, "put in place"):
            _put(work, target, force=force, holds=holds)
        sync_directory(target.parent)
    finally:
        # After an exchange these are the replaced directory's files; after a plain rename there is nothing.
        shutil.rmtree(work, ignore_errors=True)


def _put(work: Path, target: Path, *, force: bool, holds: Holds | None) -> None:
    """Rename `work` to `target`; what was there before, if `force` allows it, is then called `work`."""
    if not os.path.lexists(target):
        # Plain rename would also replace an empty directory that somebody has just made.
        if not _rename(work, target, _RENAME_NOREPLACE):
            os.rename(work, target)
        return
    require_vacant(target, force=force, holds=holds)
    if _rename(work, target, _RENAME_EXCHANGE):
        return
    aside = work.with_name(work.name + ".old")
    os.rename(target, aside)
    try:
        os.rename(work, target)
    except BaseException:
        os.rename(aside, target)
        raise
    os.rename(aside, work)


def _rename(old: Path, new: Path, flags: int) -> bool:
    """Linux's renameat2. False where the system or the file system has no such thing."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    arguments = (_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), ctypes.c_uint(flags))
    if call(*arguments) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(new))


def write_latest(run: Path, step_name: str, *manifest_crcs: int) -> None:
    """Make `step_name` the newest step of `run`, atomically and durably.

    `manifest_crcs` is the CRC-32 that the step's manifest begins with (`own_checksum`); while the step is being
    replaced, the new one's and the old one's.
    """
    work = run / f".{LATEST_NAME}.tmp-{secrets.token_hex(6)}"
    try:
        write_file(work, "".join(f"{step_name} {crc:08x}\n" for crc in manifest_crcs).encode())
        with explained(run / LATEST_NAME, "replaced"):
            os.replace(work, run / LATEST_NAME)
    except BaseException:
        work.unlink(missing_ok=True)
        raise
    sync_directory(run)
