"""Byte ranges moved between files by a few threads, each piece's checksum taken on the way.

The caller's thread submits ranges one after the other, and receives their results (checksums, progress, errors) in that
order. Memory is one buffer a thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Generic, TypeVar

from zerokit.checkpoint.checksum import Piece, combine, crc32
from zerokit.checkpoint.disk import new_file, read_exactly, write_exactly
from zerokit.errors import UsageError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BUFFER_BYTES = 1 << 20
"""One read, and one write unless it is converted: larger ones leave the core's cache before they are written."""

_MOST_RUNS = 64
"""In one task: handing a task over costs as much as copying some ten KiB."""

MOST_JOBS = 1024
"""Threads. More never help."""

_MOST_TASKS = 16
"""Unfinished tasks for each thread."""

_MOST_UNSYNCED = 16
"""Files that are written but not synced: they are open."""

_TICK_SECONDS = 0.1

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all, often, in the caller's thread; what it raises ends the work."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Elements of `source_bytes` each become others of `element_bytes` each; no buffer ends inside an element."""

    convert: Callable[[memoryview], ReadableBuffer]
    source_bytes: int
    element_bytes: int


def default_jobs() -> int:
    """Threads that copy: more than four only wait for each other's writes."""
    return min(4, len(os.sched_getaffinity(0)))


@dataclass(eq=False)
class OpenFile:
    """A file that a `Copier` closes; `size` in bytes of one that is written."""

    fd: int
    path: Path
    closing: ExitStack
    written: bool
    size: int


@dataclass
class _Run(Generic[K]):
    """Neighbouring bytes of one file that become neighbours in another; `pieces` are their keys and sizes."""

    source: OpenFile
    offset: int
    target: OpenFile
    target_offset: int
    size: int
    pieces: list[tuple[K, int]]
    conversion: Conversion | None


class Copier(Generic[K]):
    """A context manager: when it ends well, all is copied and every target is synced and closed.

    When it ends with an exception, nothing is being written any more, and all files are closed.
    """

    def __init__(
        self,
        *,
        jobs: int | None = None,
        total: int = 0,
        progress: Progress | None = None,
        synced: Callable[[Path, int, Mapping[K, Piece]], None] | None = None,
    ) -> None:
        """`total` bytes are announced to `progress`. Raises `UsageError` for `jobs` (threads) out of range.

        `synced` is called for every target that is whole and on the disk, with its size and the pieces that were copied
        into it: one after the other, in the syncing thread. What it raises ends the work.
        """
        if jobs is not None and not 1 <= jobs <= MOST_JOBS:
            raise UsageError(f"jobs={jobs}: expected 1 to {MOST_JOBS}")
        self.pieces: dict[K, Piece] = {}
        """The checksums so far; ranges that were copied under one key count as one piece, in their order."""
        self._jobs = jobs or default_jobs()
        self._total = total
        self._progress = progress
        self._synced = synced
        self._copied: dict[OpenFile, set[K]] = {}
        """What was copied into each open target."""
        self._done = 0
        self._batch: list[_Run[K]] = []
        self._batch_bytes = 0
        self._pending: deque[Future[list[tuple[OpenFile, K, Piece]]] | OpenFile] = deque()
        self._unsynced: deque[Future[None]] = deque()
        self._open: set[OpenFile] = set()
        self._buffers = threading.local()
        self._threads = ThreadPoolExecutor(self._jobs, "zerokit-copy")
        # Of its own: threads that copy need not wait for the disk.
        self._syncing = ThreadPoolExecutor(1, "zerokit-sync")

    def __enter__(self) -> Copier[K]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._flush()
                self._follow(0)
                self._await_syncs(0)
                assert not self._open
        except BaseException as failure:
            self._abandon(failure)
            raise
        else:
            self._abandon(error)

    def source(self, path: Path, opening: AbstractContextManager[int]) -> OpenFile:
        """Open a file to copy from; `opening` gives its descriptor."""
        return self._add(path, opening, None)

    def target(self, path: Path, size: int) -> OpenFile:
        """Make a new file of `size` bytes to copy to."""
        return self._add(path, new_file(path, size), size)

    def take_over(self, pieces: Mapping[K, Piece]) -> None:
        """Count as copied what an earlier process has copied."""
        self.pieces.update(pieces)
        self._done += sum(piece.size for piece in pieces.values())

    def copy(
        self,
        key: K,
        size: int,
        source: OpenFile,
        offset: int,
        target: OpenFile,
        target_offset: int,
        conversion: Conversion | None = None,
    ) -> None:
        """Copy `size` bytes of `source` from byte `offset` on to byte `target_offset` of `target`.

        Their checksum, that of the source's bytes, is added to the piece `key`.
        """
        start = 0
        while start < size:
            start_there = target_offset + start
            if conversion is not None:
                start_there = target_offset + start // conversion.source_bytes * conversion.element_bytes
            room = BUFFER_BYTES
            last = self._batch[-1] if self._batch else None
            if (
                last is not None
                and last.source is source
                and last.target is target
                and last.offset + last.size == offset + start
                and last.target_offset + last.size == start_there
                and last.conversion is None
                and conversion is None
                and last.size < BUFFER_BYTES
            ):
                room -= last.size
            else:
                last = _Run(source, offset + start, target, start_there, 0, [], conversion)
                self._batch.append(last)
            part = min(room, size - start)
            last.pieces.append((key, part))
            last.size += part
            start += part
            self._batch_bytes += part
            if self._batch_bytes >= BUFFER_BYTES or len(self._batch) >= _MOST_RUNS:
                self._flush()

    def drain(self) -> None:
        """Wait until everything that was handed over so far is copied; `pieces` has its checksums then."""
        self._flush()
        self._follow(0)

    def release(self, file: OpenFile) -> None:
        """Close `file` when all that was handed over so far is done; a target is synced before."""
        self._flush()
        self._pending.append(file)
        self._follow(self._jobs * _MOST_TASKS)

    def _add(self, path: Path, opening: AbstractContextManager[int], size: int | None) -> OpenFile:
        closing = ExitStack()
        file = OpenFile(closing.enter_context(opening), path, closing, size is not None, size or 0)
        self._open.add(file)
        return file

    def _flush(self) -> None:
        if self._batch:
            self._pending.append(self._threads.submit(self._move, self._batch))
            self._batch, self._batch_bytes = [], 0
            self._follow(self._jobs * _MOST_TASKS)

    def _follow(self, most: int) -> None:
        """Look at results, in order, until at most `most` are left."""
        while self._pending and (len(self._pending) > most or isinstance(self._pending[0], OpenFile)):
            first = self._pending[0]
            if isinstance(first, OpenFile):
                self._close(first)
            else:
                for target, key, piece in self._result(first):
                    self._copied.setdefault(target, set()).add(key)
                    before = self.pieces.get(key)
                    self.pieces[key] = piece if before is None else combine((before, piece))
                    self._done += piece.size
                self._report()
            self._pending.popleft()

    def _close(self, file: OpenFile) -> None:
        if file.written:
            pieces = {key: self.pieces[key] for key in self._copied.pop(file, ())}
            self._unsynced.append(self._syncing.submit(self._sync, file, pieces))
            self._await_syncs(_MOST_UNSYNCED)
        else:
            self._open.discard(file)
            file.closing.close()

    def _await_syncs(self, most: int) -> None:
        while len(self._unsynced) > most:
            self._result(self._unsynced[0])
            self._unsynced.popleft()

    def _result(self, future: Future[T]) -> T:
        while not future.done():
            wait([future], timeout=_TICK_SECONDS)
            self._report()
        return future.result()

    def _report(self) -> None:
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _abandon(self, error: BaseException | None) -> None:
        """End the threads, then close what is open without syncing it."""
        self._threads.shutdown(cancel_futures=True)
        self._syncing.shutdown(cancel_futures=True)
        if error is not None:
            for file in self._open:
                file.closing.__exit__(type(error), error, error.__traceback__)

    def _move(self, batch: list[_Run[K]]) -> list[tuple[OpenFile, K, Piece]]:
        """In a thread."""
        buffer: memoryview | None = getattr(self._buffers, "buffer", None)
        if buffer is None:
            buffer = self._buffers.buffer = memoryview(bytearray(BUFFER_BYTES))
        pieces = []
        for run in batch:
            view = buffer[: run.size]
            read_exactly(run.source.fd, [view], run.offset, run.source.path)
            start = 0
            for key, size in run.pieces:
                pieces.append((run.target, key, Piece(crc32(view[start : start + size]), size)))
                start += size
            content = view if run.conversion is None else run.conversion.convert(view)
            write_exactly(run.target.fd, [content], run.target_offset, run.target.path)
        return pieces

    def _sync(self, file: OpenFile, pieces: Mapping[K, Piece]) -> None:
        """In the syncing thread."""
        self._open.discard(file)
        file.closing.close()
        if self._synced is not None:
            self._synced(file.path, file.size, pieces)
