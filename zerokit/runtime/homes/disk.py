"""A home on a disk: one file a rank, which has no name and goes with the process, however it ends.

One thread reads and writes it, one request after the other. Where the states of a node's ranks take at most half of its
available memory, that goes through the page cache, so that the system writes while the model computes; else past it
(`O_DIRECT`), as they would push everything else out of it. A step of 206 M parameters on two ranks took 0.6 to 1.0 of
the disk's time for the states' way with the cache, and 1.2 to 1.3 past it (2026-11-28, benchmarks/states.py).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from zerokit.available import available_bytes
from zerokit.errors import StorageError, UsageError
from zerokit.files import UNSUPPORTED, unnamed_file
from zerokit.runtime.homes.copies import using
from zerokit.runtime.homes.elsewhere import PAGE, Elsewhere, Moving, Place
from zerokit.runtime.homes.home import Elements, Stored
from zerokit.runtime.homes.staging import Run, Staging
from zerokit.runtime.masters import OwnedUnit
from zerokit.runtime.pinning import content_of, pages

_PIECE = 64 << 20
"""Bytes: the system moves at most two GiB at once."""


class _Moving:
    """A request that the thread of a file works on."""

    def __init__(self, future: Future[None]) -> None:
        self.wait = future.result


class File:
    """A file of no name in `directory`. Its methods raise `StorageError`, which names the directory."""

    def __init__(self, directory: Path, *, cached: bool = True) -> None:
        """Raises `UsageError` where no file can be made there. Not `cached`: past the page cache, if it can be."""
        self.directory = directory
        try:
            self.fd = unnamed_file(directory)
        except OSError as error:
            raise UsageError(
                f"states={str(directory)!r}: no file can be made there ({error.strerror}): expected a directory on a "
                "disk of this node, with room for this rank's masters and states"
            ) from error
        weakref.finalize(self, _discard, self.fd, os.getpid())
        self._lost: list[str] = []
        """Why writes failed: what is in the file is not what was to be there."""
        self._direct = self.fd
        if not cached and (direct := _past_the_cache(self.fd)) is not None:
            self._direct = direct
            weakref.finalize(self, os.close, direct)

    @property
    def size(self) -> int:
        return os.fstat(self.fd).st_size

    def grow(self, end: int) -> None:
        """Have the disk keep `end` bytes for it."""
        start = self.size
        if end <= start:
            return
        try:
            os.posix_fallocate(self.fd, start, end - start)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.truncate(self.fd, start)
            raise StorageError(
                f"states={str(self.directory)!r}: {(end - start) / 1e6:,.1f} MB more for this rank's masters and "
                f"states cannot be had there ({error.strerror}): free some, or name another directory"
            ) from error

    def read(self, memory: memoryview, offset: int, *, direct: bool = False) -> None:
        """Fill `memory` from byte `offset` on; `direct` if all of it begins and ends with pages."""
        self._require_right()
        with self._explained("read"):
            while memory:
                done = os.preadv(self._direct if direct else self.fd, [memory[:_PIECE]], offset)
                if not done:
                    raise OSError(errno.EIO, f"the file ends at byte {offset}")
                memory, offset = memory[done:], offset + done

    def write(self, memory: memoryview, offset: int) -> None:
        """Write `memory` to byte `offset` and what follows; all of it begins and ends with pages."""
        try:
            with self._explained("written"):
                while memory:
                    done = os.pwritev(self._direct, [memory[:_PIECE]], offset)
                    memory, offset = memory[done:], offset + done
        except StorageError as error:
            self._lost.append(str(error))
            raise

    def renew(self) -> None:
        """Note that all of it is about to be written anew."""
        self._lost.clear()

    def _require_right(self) -> None:
        if self._lost:
            raise StorageError(f"{self._lost[0]}, so they are incomplete: load a checkpoint")

    def copy(self) -> File:
        """Another file with the same bytes, which share the disk's blocks where the file system can do that."""
        self._require_right()
        made, offset, size = File(self.directory), 0, self.size
        made.grow(size)
        with self._explained("copied"):
            while offset < size:
                done = _copy(self.fd, made.fd, offset, size - offset)
                if not done:
                    raise OSError(errno.EIO, f"the file ends at byte {offset}")
                offset += done
        return made

    @contextlib.contextmanager
    def _explained(self, done: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"states in {self.directory} cannot be {done}: {error.strerror or error}"
            ) from error


@dataclass(frozen=True, slots=True)
class StoredOnDisk:
    """A tensor in a file, or so many elements from `start` on of a flat one, if `numel` says how many."""

    file: File
    place: Place
    start: int = 0
    numel: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.place.tensor.dtype

    @property
    def nbytes(self) -> int:
        numel = self.place.tensor.numel() if self.numel is None else self.numel
        return numel * self.dtype.itemsize

    def __getitem__(self, elements: slice) -> StoredOnDisk:
        start, stop, _ = elements.indices(self.nbytes // self.dtype.itemsize)
        return replace(self, start=self.start + start, numel=max(stop - start, 0))

    def read(self) -> Tensor:
        memory = torch.empty(self.nbytes, dtype=torch.uint8)
        self.file.read(content_of(memory), self.place.offset + self.start * self.dtype.itemsize)
        own = memory.view(self.dtype)
        return own if self.numel is not None else own.as_strided(self.place.tensor.shape, self.place.stride)


class DiskHome(Elsewhere):
    """A file in `directory`, which a thread of its own reads and writes; for a device through a `staging`."""

    name = "disk"

    def __init__(self, directory: Path, rooms: Mapping[int, int], staging: Staging | None = None) -> None:
        """Raises `StorageError` where the directory has no room for these `rooms`, by unit."""
        nbytes = sum(rooms.values())
        self.file, self._staging = File(directory, cached=fits_the_cache(nbytes)), staging
        self.file.grow(nbytes)
        device = torch.device("cpu") if staging is None else staging.stream.device
        self._thread = ThreadPoolExecutor(1, "zerokit-states", *using(device))
        super().__init__(rooms)

    def grow(self, start: int, end: int) -> None:
        self.file.grow(end)

    def forget(self, unit: OwnedUnit) -> None:
        super().forget(unit)
        os.truncate(self.file.fd, min(self._end, self.file.size))

    def renew(self) -> None:
        self.file.renew()

    def buffer(self, nbytes: int) -> Tensor:
        if self._staging is None:
            return pages(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self._staging.stream.device)

    def fetch(self, places: Sequence[Place], memory: Tensor, after: Moving | None) -> _Moving:
        # The thread has written the buffer's last content by then.
        runs = list(_runs(places))
        if self._staging is not None:
            now = self._staging.stream.mark()
            return _Moving(self._thread.submit(self._staging.read, self.file, runs, memory, now))
        content = content_of(memory)

        def read() -> None:
            for offset, at, size in runs:
                self.file.read(content[at : at + size], offset, direct=True)

        return _Moving(self._thread.submit(read))

    def put(self, places: Sequence[Place], memory: Tensor) -> _Moving:
        runs = list(_runs(places))
        if self._staging is not None:
            now = self._staging.stream.mark()
            return _Moving(self._thread.submit(self._staging.write, self.file, runs, memory, now))
        content = content_of(memory)

        def write() -> None:
            for offset, at, size in runs:
                self.file.write(content[at : at + size], offset)

        return _Moving(self._thread.submit(write))

    def stored(self, place: Place) -> Elements:
        return StoredOnDisk(self.file, place)

    def keep(self) -> Callable[[Stored], Stored]:
        copy = self.file.copy()
        return lambda stored: replace(stored, file=copy) if isinstance(stored, StoredOnDisk) else stored


def _runs(places: Sequence[Place]) -> Iterator[Run]:
    """Byte of the store, byte of a buffer, and size, of what lies together in both."""
    first: Run | None = None
    for place in places:
        size = -(-place.nbytes // PAGE) * PAGE
        if first is not None and (first[0] + first[2], first[1] + first[2]) == (place.offset, place.at):
            first = (first[0], first[1], first[2] + size)
            continue
        if first is not None:
            yield first
        first = (place.offset, place.at, size)
    if first is not None:
        yield first


def _discard(fd: int, process: int) -> None:
    """Close a file and give its room back, also while forked processes have it open; these give back nothing."""
    if os.getpid() == process:
        os.truncate(fd, 0)
    os.close(fd)


def _copy(source: int, target: int, offset: int, size: int) -> int:
    """Copy up to `size` bytes at byte `offset` of a file to the same place in another; returns how many."""
    try:
        return os.copy_file_range(source, target, size, offset, offset)
    except OSError as error:
        if error.errno not in (*UNSUPPORTED, errno.EXDEV):
            raise
    return os.pwrite(target, os.pread(source, min(size, _PIECE), offset), offset)


def fits_the_cache(nbytes: int) -> bool:
    """Whether the states of this node's ranks, so many bytes each, fit into half of the memory that is available."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return 2 * ranks * nbytes <= available_bytes()


def _past_the_cache(fd: int) -> int | None:
    """A descriptor of the same file whose reads and writes go past the page cache, if they can there."""
    try:
        direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except (OSError, AttributeError):
        return None
    try:
        with mmap.mmap(-1, PAGE) as page:
            os.pwritev(direct, [page], 0)
            os.preadv(direct, [page], 0)
        os.truncate(fd, 0)
    except OSError:
        os.close(direct)
        return None
    return direct
