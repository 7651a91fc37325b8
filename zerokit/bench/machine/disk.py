"""How fast the disk of a directory is for states that live there: large pieces, written over and read back.

The file has no name, so that nothing is left of it even if the process is killed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zerokit.files import unnamed_file

PIECE_BYTES = 8 << 20
MOST_BYTES = 1 << 30
SYNCED_BYTES = 64 << 20
"""Where the page cache takes what is written, the clock is read each time that so much of it is on the disk."""
SECONDS = 0.4
"""Each of three passes takes about so long."""
_LEAST_PIECES = 4
_SHARE_OF_FREE = 10

_Call = Callable[[int, list[mmap.mmap], int], int]
"""`os.pwritev` or `os.preadv`."""


@dataclass(frozen=True, slots=True)
class DiskRates:
    """Sequential rates of a disk."""

    # Whether the page cache had no part in it (O_DIRECT); else it was emptied before the file was read.
    direct: bool
    size_bytes: int  # of the file
    write_bytes_per_s: float  # of overwriting it, until it is on the disk
    read_bytes_per_s: float  # of reading it

    def visit_seconds(self, nbytes: float) -> float:
        """The time in which so many bytes come from the disk and go back to it."""
        return nbytes / self.read_bytes_per_s + nbytes / self.write_bytes_per_s


def measure_disk(folder: Path, free_bytes: int) -> DiskRates | None:
    """The rates of `folder`'s disk, with a file that is at most a tenth of what is free; None where that is too little.

    Raises `OSError`.
    """
    pieces = min(MOST_BYTES, free_bytes // _SHARE_OF_FREE) // PIECE_BYTES
    if pieces < _LEAST_PIECES:
        return None
    with mmap.mmap(-1, PIECE_BYTES) as memory:  # begins at a page, as direct transfers need it
        memory.write(os.urandom(PIECE_BYTES))  # a file system that compresses must not look fast
        fd, direct = _open(folder, memory)
        try:
            group = 1 if direct else SYNCED_BYTES // PIECE_BYTES
            # States are written over: what a file system does for new pieces of a file is no part of that.
            pieces, _ = _move(os.pwritev, fd, memory, pieces, group)
            written, write_s = _move(os.pwritev, fd, memory, pieces, group)
            if not direct:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            read, read_s = _move(os.preadv, fd, memory, pieces)
        finally:
            os.close(fd)
    return DiskRates(
        direct, pieces * PIECE_BYTES, written * PIECE_BYTES / write_s, read * PIECE_BYTES / read_s
    )


def _open(folder: Path, memory: mmap.mmap) -> tuple[int, bool]:
    """A file without a name, and whether it is read and written past the page cache."""
    fd = unnamed_file(folder)
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        _whole(os.pwritev(fd, [memory], 0))
    except OSError as error:  # file systems may refuse it at once, or when it is used
        if error.errno != errno.EINVAL:
            os.close(fd)
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return fd, False
    return fd, True


def _move(call: _Call, fd: int, memory: mmap.mmap, pieces: int, group: int = 1) -> tuple[int, float]:
    """Write or read up to so many pieces, in whole groups until the time is up, and wait until they are on the disk.

    Returns how many there were, and the seconds.
    """
    started = time.perf_counter()
    for number in range(1, pieces + 1):
        _whole(call(fd, [memory], (number - 1) * PIECE_BYTES))
        if number % group == 0:
            if group > 1:
                os.fdatasync(fd)
            if time.perf_counter() - started > SECONDS:
                break
    os.fdatasync(fd)
    return number, max(time.perf_counter() - started, 1e-9)


def _whole(moved: int) -> None:
    if moved != PIECE_BYTES:
        raise OSError(errno.EIO, f"{moved} of {PIECE_BYTES} bytes were read or written")
