"""All of zerokit's changes to disks: new files, syncs, renames, removals.

A file or a directory becomes visible whole or not at all: it is written under a temporary name beside its target,
synced, renamed, and its parent synced. All calls go through one `System`; tests replace it by one that fails or ends
the process at a given call, or forgets what was not synced.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from zerokit.errors import UsageError
from zerokit.process import PATTERN, Process

UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)
"""Errors of a file system that lacks the call."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_RENAME_EXCHANGE = 2


def path_of(given: str | os.PathLike[str]) -> Path:
    """The path that a user has given: `~` and `~name` are home directories, as in a shell.

    Raises `UsageError` for a user whose home directory is not known.
    """
    try:
        return Path(given).expanduser()
    except RuntimeError as error:
        raise UsageError(f"{given}: {error}: write the whole path, or ./~… for that name") from None


class System:
    """The calls that change a disk, one method per call. All raise `OSError`."""

    def mkdir(self, path: Path) -> None:
        os.mkdir(path)

    def create(self, path: Path) -> int:
        """Create a file; returns its descriptor for reading and writing."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write bytes; returns how many were written, which may be fewer than given."""
        return os.pwritev(fd, buffers, offset)

    def allocate(self, fd: int, size: int) -> None:
        os.posix_fallocate(fd, 0, size)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def sync_directory(self, path: Path) -> None:
        """Make the names in a directory durable, if the file system supports it: some shared folders do not."""
        fd = os.open(path, _DIRECTORY)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a path; a file or an empty directory at the target is replaced."""
        os.rename(old, new)

    def rename_new(self, old: Path, new: Path) -> None:
        """Rename a path without replacing anything, if the file system supports it."""
        if not _renameat2(old, new, _RENAME_NOREPLACE):
            os.rename(old, new)

    def exchange(self, one: Path, other: Path) -> bool:
        """Exchange two directories atomically. False if the file system cannot."""
        return _renameat2(one, other, _RENAME_EXCHANGE)

    def unlink(self, path: Path, *, folder: int | None = None) -> None:
        """Remove a file or a link; `folder` is its open directory, which is then not looked up again."""
        os.unlink(path if folder is None else path.name, dir_fd=folder)

    def rmdir(self, path: Path, *, folder: int | None = None) -> None:
        """Remove an empty directory; `folder` as for `unlink`."""
        os.rmdir(path if folder is None else path.name, dir_fd=folder)


_systems: list[System] = [System()]


def system() -> System:
    """The calls in use."""
    return _systems[-1]


@contextmanager
def replaced(other: System) -> Iterator[None]:
    """Route every change of this process through `other`, for tests."""
    _systems.append(other)
    try:
        yield
    finally:
        _systems.remove(other)


def _renameat2(old: Path, new: Path, flags: int) -> bool:
    """Linux's renameat2. False where the system or the file system has no such thing."""
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    arguments = (_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), ctypes.c_uint(flags))
    if call(*arguments) == 0:
        return True
    number = ctypes.get_errno()
    if number in UNSUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(new))


TEMPORARY = re.compile(rf"\.(?P<target>.+)\.tmp-(?P<writer>{PATTERN})\.[0-9a-f]{{6}}")
"""Names of `temporary`."""


def temporary(path: Path) -> Path:
    """A temporary name next to `path` for writing it; the name contains the process."""
    return path.with_name(f".{stem(path.name)}.tmp-{Process.current()}.{secrets.token_hex(3)}")


def stem(name: str) -> str:
    """The part of a name that its temporary name keeps: names end at 255 bytes."""
    return os.fsencode(name)[:60].decode(errors="ignore")


def write_aside(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write a small file whole or not at all, replacing an existing one.

    `durable`: also after a power cut, by syncs of the file and of its directory.
    """
    calls, work = system(), temporary(path)
    try:
        fd = calls.create(work)
        try:
            left = memoryview(content)
            while left:
                left = left[calls.write(fd, [left], len(content) - len(left)) :]
            if durable:
                calls.sync(fd)
        finally:
            os.close(fd)
        calls.rename(work, path)
    except BaseException:
        with suppress(OSError):
            calls.unlink(work)
        raise
    if durable:
        calls.sync_directory(path.parent)


def nearest(path: Path) -> Path:
    """The path itself, or the nearest directory above it that exists; one that is hidden from this user does not."""
    return next(one for one in (path, *path.parents) if os.path.exists(one))


def unnamed_file(folder: Path) -> int:
    """The descriptor of a new file that no other process sees, and that goes when this one ends. Raises `OSError`."""
    with suppress(OSError):
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    fd, name = tempfile.mkstemp(
        prefix="zerokit-", dir=folder
    )  # a file system without files that have no name
    os.unlink(name)
    return fd


def make_directories(path: Path) -> None:
    """Create a directory and its missing parents durably; an existing one is left unchanged."""
    if path.is_dir():
        return
    calls = system()
    make_directories(path.parent)
    try:
        calls.mkdir(path)
    except FileExistsError:
        if not path.is_dir():
            raise
    with suppress(PermissionError):  # a directory may allow new names and no reading
        calls.sync_directory(path.parent)


def measured(path: Path) -> tuple[int, float]:
    """Bytes of the files in a directory, or of one file, and when the newest of all was changed (seconds, epoch).

    Links are not followed; what goes away meanwhile does not count. Raises `OSError` for what cannot be looked at.
    """

    def refuse(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise error

    size, newest = 0, 0.0
    entries = [path]
    if not path.is_symlink():
        for folder, folders, names in os.walk(path, onerror=refuse):
            entries += [Path(folder, name) for name in (*folders, *names)]
    for entry in entries:
        with suppress(FileNotFoundError, NotADirectoryError):
            status = entry.lstat()
            newest = max(newest, status.st_mtime)
            size += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return size, newest


def is_own(user: int, folder: Path) -> bool:
    """Whether a file of the user number `user` in a directory was made by the user of this process.

    A file system may show files as another user's (NFS with root_squash, SMB); a new file then tells whose.
    """
    if user == os.geteuid():
        return True
    with suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_uid == user
    return False


def remove_tree(path: Path) -> None:
    """Remove a file, a link, or a directory and as much of its contents as possible; other users' files stay.

    Links are not followed, and no directory is found by its name again: whoever may write in the same folder could
    have put a link in its place since it was looked at.
    """
    with suppress(OSError):
        parent = os.open(path.parent, _DIRECTORY)
        try:
            user = os.stat(path.name, dir_fd=parent, follow_symlinks=False).st_uid
            if is_own(user, path.parent):
                _remove(path, parent, {user, os.geteuid()})
        finally:
            os.close(parent)


def _remove(path: Path, parent: int, users: set[int]) -> None:
    """Remove what `path` names in the open directory `parent`, and is one of these users'."""
    calls = system()
    with suppress(OSError):
        status = os.stat(path.name, dir_fd=parent, follow_symlinks=False)
        if status.st_uid not in users:
            return
        if not stat.S_ISDIR(status.st_mode):
            calls.unlink(path, folder=parent)
            return
        folder = os.open(path.name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            if os.fstat(folder).st_uid in users:
                for name in os.listdir(folder):
                    _remove(path / name, folder, users)
        finally:
            os.close(folder)
        calls.rmdir(path, folder=parent)
