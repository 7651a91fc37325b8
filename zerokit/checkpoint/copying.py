"""Copies of byte ranges between files by a few threads, with a checksum of each piece, into a directory made whole.

The caller's thread submits ranges one after the other, and receives their results (checksums, progress, errors) in that
order. Memory is one buffer a thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, groupby, islice
from operator import attrgetter
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from zerokit.checkpoint.checksum import Pieces
from zerokit.checkpoint.disk import new_file, sync_file
from zerokit.checkpoint.requests import Request, Target, by_file, move, neighbours, opening
from zerokit.checkpoint.source import Source
from zerokit.checkpoint.staging import Foreign, Staging, require_apart
from zerokit.errors import UsageError

BUFFER_BYTES = 1 << 18
"""One read, and one write unless it is converted: small enough for the core's cache.

Writes of a MiB take up to four times the kernel's time where free memory is scattered: ext4 looks for folios as large.
"""

TASK_BYTES = 1 << 20
"""Copied by a thread before it takes more."""

_MOST_IN_TASK = 128
"""Requests: handing a task over costs as much as copying some ten KiB."""

_MOST_REQUESTS = 1 << 14
"""Looked at together, so that a file is seldom opened twice: a target may want pieces of a thousand files."""

MOST_JOBS = 1024
"""Threads. More never help."""

_MOST_TASKS = 16
"""Unfinished tasks for each thread."""

_MOST_UNSYNCED = 16
"""Syncs to be awaited; files that wait for their last one are open."""

_FLUSH_BYTES = 32 << 20
"""Written to a target before it is flushed: a disk that begins early leaves little for the last sync."""

_TICK_SECONDS = 0.1

T = TypeVar("T")
Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all, often, in the caller's thread; what it raises ends the work."""


class Copier:
    """A context manager: after a successful end, everything is copied and every target is synced and closed.

    When it ends with an exception, nothing is being written any more, and all files are closed.
    """

    def __init__(self, *, jobs: int | None = None, total: int = 0, progress: Progress | None = None) -> None:
        """`total` bytes are announced to `progress`. Raises `UsageError` for `jobs` (threads) out of range."""
        if jobs is not None and not (type(jobs) is int and 1 <= jobs <= MOST_JOBS):
            raise UsageError(f"jobs={jobs!r}: expected 1 to {MOST_JOBS}")
        self.pieces = Pieces()
        """What was read for the targets that are closed."""
        # More than four only wait for each other's writes.
        self._jobs = jobs or min(4, len(os.sched_getaffinity(0)))
        self._total = total
        self._progress = progress
        self._done = 0
        self._batch: list[Request] = []
        self._batch_bytes = 0
        self._pending: deque[Future[list[tuple[Request, int]]] | Target] = deque()
        self._unsynced: deque[Future[None]] = deque()
        self._open: set[Target] = set()
        self._buffers = threading.local()
        self._threads = ThreadPoolExecutor(self._jobs, "zerokit-copy")
        # A thread of its own, so that those that copy need not wait for the disk.
        self._syncing = ThreadPoolExecutor(1, "zerokit-sync")

    def __enter__(self) -> Copier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.drain()
                self._await_syncs(0)
                assert not self._open
        except BaseException as failure:
            self._abandon(failure)
            raise
        else:
            self._abandon(error)

    def target(self, path: Path, size: int) -> Target:
        closing = ExitStack()
        target = Target(closing.enter_context(new_file(path, size)), path, closing, size)
        self._open.add(target)
        return target

    def copy(self, source: Source, requests: Iterable[Request]) -> None:
        """Submit requests with this copier's targets, one source file after the other."""
        left = iter(requests)
        while some := list(islice(left, _MOST_REQUESTS)):
            for request in chain.from_iterable(by_file(some).values()):
                for part in request.split(BUFFER_BYTES):
                    self._batch.append(part)
                    self._batch_bytes += part.size
                    if self._batch_bytes >= TASK_BYTES or len(self._batch) >= _MOST_IN_TASK:
                        self._flush(source)
            self._flush(source)

    def drain(self) -> None:
        """Wait until all submitted requests are copied; the targets then have their checksums."""
        self._follow(0)

    def release(self, target: Target) -> None:
        """Sync and close `target` after all submitted requests."""
        self._pending.append(target)
        self._follow(self._jobs * _MOST_TASKS)

    def _flush(self, source: Source) -> None:
        if self._batch:
            self._pending.append(self._threads.submit(self._move, source, self._batch))
            self._batch, self._batch_bytes = [], 0
            self._follow(self._jobs * _MOST_TASKS)

    def _follow(self, most: int) -> None:
        """Look at results, in order, until at most `most` are left."""
        while self._pending and (len(self._pending) > most or isinstance(self._pending[0], Target)):
            first = self._pending[0]
            if isinstance(first, Target):
                self._close(first)
            else:
                for request, crc in self._result(first):
                    target = request.target
                    assert isinstance(target, Target)
                    target.pieces.add(request.key, crc, request.size)
                    self._done += request.size
                    target.unflushed += request.size
                    if target.unflushed >= _FLUSH_BYTES:
                        target.unflushed = 0
                        # Awaited, because a write that failed is reported to one sync only.
                        flush = self._syncing.submit(sync_file, target.fd, target.size, target.path)
                        self._unsynced.append(flush)
                        self._await_syncs(_MOST_UNSYNCED)
                self._report()
            self._pending.popleft()

    def _close(self, target: Target) -> None:
        def close() -> None:
            self._open.discard(target)
            target.closing.close()

        self.pieces.update(target.pieces)
        self._unsynced.append(self._syncing.submit(close))  # its end syncs it
        self._await_syncs(_MOST_UNSYNCED)

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
        self._threads.shutdown(cancel_futures=True)
        self._syncing.shutdown(cancel_futures=True)
        if error is not None:
            for target in self._open:
                target.closing.__exit__(type(error), error, error.__traceback__)

    def _move(self, source: Source, batch: list[Request]) -> list[tuple[Request, int]]:
        buffer: memoryview | None = getattr(self._buffers, "buffer", None)
        if buffer is None:
            buffer = self._buffers.buffer = memoryview(bytearray(BUFFER_BYTES))
        done: list[tuple[Request, int]] = []
        for file, members in groupby(batch, key=attrgetter("file")):
            path, descriptor = opening(source, file)
            with descriptor as fd:
                for run in neighbours(members, BUFFER_BYTES):
                    done += move(fd, path, run, buffer)
        return done


NOT_WRITTEN = ": nothing was written: take another checkpoint"


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a conversion: threads, replacing an output, and a progress callback."""

    jobs: int | None = None
    force: bool = False
    progress: Progress | None = None

    @contextmanager
    def copying(self, source: Source, total: int | None = None) -> Iterator[Copier]:
        """What copies `total` bytes, or all of the source's; they are compared with its checksums at the end."""
        size = source.data_size if total is None else total
        with Copier(jobs=self.jobs, total=size, progress=self.progress) as copier:
            yield copier
        source.require_right([copier.pieces], NOT_WRITTEN)


@contextmanager
def converting(source: Source, target: Path, options: Options, foreign: Foreign) -> Iterator[Path]:
    """A directory beside `target`, renamed to it durably when the body succeeds, and removed when it fails.

    Raises as `Staging` does, and where one of `source` and `target` lies in the other.
    """
    for folder in source.folders:
        require_apart(folder, target)
    with Staging(target, force=options.force, foreign=foreign) as staging:
        yield staging.work
        staging.commit()
