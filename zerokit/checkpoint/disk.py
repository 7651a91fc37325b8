"""Complete reads and writes of files, with errors that name the place.

Every failure of the operating system comes out as a `CheckpointError` that names the file: a `StorageError`, unless
it is that nothing is there. A missing file is a damaged checkpoint. One that could not be read just now is not: whoever
passes over damaged checkpoints must not pass over it (`despite_damage`).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from zerokit import files
from zerokit.errors import CheckpointError, StorageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

MAX_TEXT_BYTES = 1 << 28
"""The largest file that is read whole: a damaged size must not take all memory."""

_IOV_MAX = 1024
"""Buffers that one vectored call takes, on Linux and everywhere else that has a limit."""

_ABSENT = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
"""Errors which say that there is nothing at a path."""

_ADVICE = {
    errno.EACCES: "check its permissions and its owner",
    errno.EPERM: "check its permissions and its owner",
    errno.EROFS: "choose a directory that can be written",
    errno.EIO: "the storage failed: look at the system's log",
    errno.EFBIG: "the file system or a limit (ulimit -f) allows no file of this size",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ESTALE: "the file server has let go of it: try again, and look at the mount if that fails too",
    errno.ENOSPC: "make room there: its bytes or its inodes are used up (df, df -i)",
    errno.EDQUOT: "make room there: your quota of bytes or files is used up",
}


@contextmanager
def explained(where: str | Path, task: str, *, needed: int = 0, fd: int | None = None) -> Iterator[None]:
    """Raise an `OSError` of the body as `CheckpointError`: "WHERE: cannot be TASK: …", with advice.

    A file in the directory `where` is named where the error names it. It is a `StorageError`, unless nothing is there.

    `needed` bytes are compared with what is free on the disk of `fd` (or of `where`) if that is full.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.ENOSPC and needed:
            advice = f"{needed} bytes are needed, {_free_bytes(where if fd is None else fd)} are free"
        else:
            advice = _ADVICE.get(error.errno or 0, "")
        inner = isinstance(error.filename, str) and error.filename.startswith(f"{where}{os.sep}")
        where = error.filename if inner else where
        kind = CheckpointError if error.errno in _ABSENT else StorageError
        raise kind(f"{where}: cannot be {task}: {reason}{': ' if advice else ''}{advice}") from error


class despite_damage:
    """Go on after the body where it finds a checkpoint missing or damaged, not where one cannot be read."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        return kind is not None and issubclass(kind, CheckpointError) and not issubclass(kind, StorageError)


def status_of(path: str | os.PathLike[str], *, follow: bool = True) -> os.stat_result | None:
    """What the system says about a path; None where nothing is there. Raises `StorageError`."""
    with explained(os.fspath(path), "looked at"):
        try:
            return os.stat(path, follow_symlinks=follow)
        except ValueError:  # a name that no file can have, such as one with a NUL
            return None
        except OSError as error:
            if error.errno in _ABSENT:
                return None
            raise


def is_there(path: str | os.PathLike[str]) -> bool:
    """Whether the path has a file of any kind, a link to nothing too. Raises `StorageError`."""
    return status_of(path, follow=False) is not None


def is_kind(path: str | os.PathLike[str], kind: Callable[[int], bool]) -> bool:
    """Whether the path itself, no link followed, is of a kind, such as `stat.S_ISDIR`. Raises `StorageError`."""
    status = status_of(path, follow=False)
    return status is not None and kind(status.st_mode)


def is_directory(path: str | os.PathLike[str]) -> bool:
    """Whether the path leads to a directory. Raises `StorageError`."""
    status = status_of(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether the path leads to a regular file. Raises `StorageError`."""
    status = status_of(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def _free_bytes(where: str | Path | int) -> int | str:
    try:
        state = os.statvfs(where)
    except OSError:
        return "an unknown number"
    return state.f_bavail * state.f_frsize


def read_exactly(fd: int, buffers: Sequence[WriteableBuffer], offset: int, where: str | Path) -> None:
    """Fill the writable, contiguous `buffers` one after the other with the bytes of `fd` from byte `offset` on.

    Raises `CheckpointError`, naming `where`, if the file ends before or cannot be read.
    """
    with explained(where, "read", fd=fd):
        missing = _transfer(os.preadv, fd, buffers, offset)
    if missing:
        wanted = offset + sum(memoryview(buffer).nbytes for buffer in buffers)
        raise CheckpointError(
            f"{where}: truncated: the file ends at byte {wanted - missing}, but bytes {offset} to {wanted} were "
            "expected"
        )


def write_exactly(fd: int, buffers: Sequence[ReadableBuffer], offset: int, where: str | Path) -> None:
    """Write the contiguous `buffers` one after the other to `fd` from byte `offset` on.

    Raises `CheckpointError`, naming `where`, if that fails; a full disk with the bytes needed and free.
    """
    needed = sum(memoryview(buffer).nbytes for buffer in buffers)
    with explained(where, "written", needed=needed, fd=fd):
        missing = _transfer(files.system().write, fd, buffers, offset)
    if missing:
        raise CheckpointError(
            f"{where}: cannot be written: the system took {needed - missing} of {needed} bytes"
        )


def _transfer(
    call: Callable[[int, list[memoryview], int], int], fd: int, buffers: Sequence[ReadableBuffer], offset: int
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
    """Set the `size` in bytes of the new file `fd`, and allocate its blocks if the file system supports it.

    A full disk then shows before the work rather than in its middle, and the blocks lie together.
    """
    with explained(where, "laid out", needed=size, fd=fd):
        if size:
            try:
                files.system().allocate(fd, size)
                return
            except OSError as error:
                if error.errno not in files.UNSUPPORTED:
                    raise
        files.system().truncate(fd, size)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    """Open an existing regular file for reading; a context manager with its descriptor.

    Raises `CheckpointError` where it is missing, may not be read or is of another kind.
    """
    with explained(path, "opened"):
        # Opening a pipe without a writer would block for ever.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        with explained(path, "looked at"):
            status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        yield fd
    finally:
        with suppress(OSError):  # nothing was written, and nothing can be lost
            os.close(fd)


def size_of(fd: int, path: str | Path) -> int:
    """The size of an open file in bytes. Raises `CheckpointError`, naming `path`."""
    with explained(path, "looked at"):
        return os.fstat(fd).st_size


def read_whole(path: Path, size: int | None = None, *, limit: int = MAX_TEXT_BYTES) -> bytes:
    """A small file's contents, which must be `size` bytes if given, and not more than `limit`.

    Raises `CheckpointError`, naming the file.
    """
    with opened(path) as fd:
        actual = size_of(fd, path)
        if size is not None:
            check_size(fd, size, path)
        if actual > limit:
            raise CheckpointError(f"{path}: {actual} bytes, more than the {limit} that it may have")
        content = bytearray(actual)
        read_exactly(fd, [content], 0, path)
    return bytes(content)


def read_part(path: Path, offset: int, size: int) -> bytearray:
    """`size` bytes of a file from byte `offset` on. Raises `CheckpointError`."""
    content = bytearray(size)
    with opened(path) as fd:
        read_exactly(fd, [content], offset, path)
    return content


def check_size(fd: int, size: int, path: Path) -> None:
    """Raises `CheckpointError` unless the open file has `size` bytes."""
    actual = size_of(fd, path)
    if actual != size:
        raise CheckpointError(
            f"{path}: {'truncated' if actual < size else 'too long'}: {actual} bytes, expected {size}"
        )


def entries_of(folder: Path) -> list[os.DirEntry[str]]:
    """Its entries by name; none of a directory that is not there, or that another process removes meanwhile."""
    gone = suppress(FileNotFoundError, NotADirectoryError)
    with explained(folder, "listed"), gone, os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)
    return []


def check_file(path: Path, size: int) -> None:
    """Raises `CheckpointError` unless there is a regular file of `size` bytes that can be opened."""
    with opened(path) as fd:
        check_size(fd, size, path)


@contextmanager
def new_file(path: Path, size: int) -> Iterator[int]:
    """Create a file of `size` bytes; it is synced to disk after a successful body.

    Raises `CheckpointError` if the file exists or cannot be made.
    """
    with explained(path, "created"):
        fd = files.system().create(path)
    try:
        lay_out(fd, size, path)
        yield fd
        sync_file(fd, size, path)
    finally:
        with explained(path, "closed"):
            os.close(fd)


def sync_file(fd: int, size: int, path: Path) -> None:
    """Bring what was written to a file of `size` bytes to the disk. Raises `CheckpointError`."""
    with explained(path, "synced", needed=size, fd=fd):
        files.system().sync(fd)


def write_file(path: Path, content: bytes) -> None:
    """Write a small new file whole, and sync it."""
    with new_file(path, len(content)) as fd:
        write_exactly(fd, [content], 0, path)


def make_directory(path: Path) -> None:
    """Make a new directory in one that is there."""
    with explained(path, "created"):
        files.system().mkdir(path)


def sync_directory(path: Path) -> None:
    """Sync a directory, so that its names are durable."""
    with explained(path, "synced"):
        files.system().sync_directory(path)
