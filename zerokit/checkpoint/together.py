"""Messages between ranks while they save or load, values and errors; saves beside the training, one at a time."""

from __future__ import annotations

import atexit
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from zerokit.errors import CheckpointError, ScheduleError, UsageError, ZerokitError, ZerokitWarning
from zerokit.runtime import ZeroOptimizer
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.collectives.stalls import StallReporter

T = TypeVar("T")


class Together:
    """The ranks of one optimizer, over a group that is separate from the training's.

    A rank's number here is its position among the owners of shards: on a mesh of two axes, checkpoints are those of as
    many ranks on one axis.

    Waits end with the optimizer's time-out, in a `ScheduleError` that names the ranks which did not come; the group is
    made anew then, so that a later save is not the victim of an earlier one. Made by all ranks together.
    """

    def __init__(self, collectives: Collectives, *, background: bool = False) -> None:
        """`background`: for a thread beside the training's, which has a group and a watch of its own."""
        self.rank, self.world = collectives.position, collectives.world
        self._collectives, self.mesh = collectives, collectives.mesh
        self._purpose = "background saves" if background else "checkpoints"
        self._group = collectives.side_group(self._purpose) if self.world > 1 else None
        self._watch = StallReporter(self._group) if background and self._group else collectives.reporter

    def exchange(self, value: T) -> list[T]:
        """Every rank's `value`, in rank order."""
        if self._group is None:
            return [value]
        gathered: list[T] = [value] * self.world
        with self._waiting():
            dist.all_gather_object(gathered, value, group=self._group)
        return [gathered[self.mesh.rank(position)] for position in range(self.world)]

    def each(self, task: Callable[[], T]) -> T:
        """This rank's result of `task`, which every rank runs.

        Raises `CheckpointError` on every rank when it failed on any, with one message. (`UsageError`, if every failure
        is one.)
        """
        cause: Exception | None = None
        result: list[T] = []
        text = ""
        try:
            result.append(task())
        except Exception as error:
            cause = error
            text = str(error) if isinstance(error, ZerokitError) else f"{type(error).__name__}: {error}"
        failed: dict[str, list[int]] = {}
        misused = True
        # A checkpoint that is not there is both: what callers of `load` catch is a `CheckpointError`.
        misuse = isinstance(cause, UsageError) and not isinstance(cause, CheckpointError)
        mine = (cause is not None, misuse, text)
        for rank, (fails, misuse, message) in enumerate(self.exchange(mine)):
            if fails:
                failed.setdefault(message, []).append(self.mesh.rank(rank))
                misused = misused and misuse
        if failed:
            lines = (f"{self._named(ranks)}{message}" for message, ranks in failed.items())
            raise (UsageError if misused else CheckpointError)("; ".join(lines)) from cause
        return result[0]

    def on_first(self, task: Callable[[], T], first: int = 0) -> T:
        """The result of `task` on the rank `first`, which may differ between ranks; its error is every rank's.

        `task` runs on those that are their own first one.
        """
        results = self.exchange(self.each(lambda: [task()] if self.rank == first else []))
        return results[first][0]

    def swap(
        self, outgoing: Tensor | None, to: int | None, incoming: Tensor | None, source: int | None
    ) -> None:
        """Send bytes to a rank and receive bytes from one, at the same time, or one of the two."""
        assert self._group is not None
        with self._waiting():
            works = []
            if incoming is not None and source is not None:
                works.append(dist.irecv(incoming, group=self._group, group_src=self.mesh.rank(source)))
            if outgoing is not None and to is not None:
                works.append(dist.isend(outgoing, group=self._group, group_dst=self.mesh.rank(to)))
            for work in works:
                if work is not None:
                    work.wait()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            with self._watch.waiting(f"other ranks' part in {self._purpose}"):
                yield
        except ScheduleError:
            self._collectives.drop_side_group(self._purpose)
            raise

    def _named(self, ranks: list[int]) -> str:
        if len(ranks) == self.world:
            return ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}: "


_UNREAD: dict[Saving, str] = {}
"""Errors of failed saves that this rank has not raised yet."""


@atexit.register
def warn_of_failures() -> None:
    """Warn, at the program's end, of failed saves that were not waited for."""
    for text in _UNREAD.values():
        warnings.warn(f"a background save failed without a wait(): {text}", ZerokitWarning, stacklevel=1)


class Saving:
    """A save started by `zerokit.save(..., blocking=False)`; it succeeds or fails on all ranks together."""

    def __init__(self, work: Callable[[], Path]) -> None:
        self.result: Future[Path] = Future()
        self.seconds: float | None = None
        """How long it took beside the training, once it is done."""
        self._reported = False
        # No daemon, and no executor's thread: a program that ends lets it finish.
        threading.Thread(target=self._run, args=(work,), name="zerokit-save").start()

    def wait(self, timeout: float | None = None) -> Path:
        """The step's directory, once it is committed.

        Raises `CheckpointError` if the save failed, `ScheduleError` if a rank did not come, and `TimeoutError` after
        `timeout` seconds.
        """
        self.exception(timeout)
        return self.result.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the exception that `wait` would raise; None after a success. Raises `TimeoutError`."""
        if not self.done() and wait([self.result], timeout).not_done:
            raise TimeoutError(f"the save has not ended after {timeout:g} s")
        _UNREAD.pop(self, None)
        return self.result.exception()

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self.result.done()

    def leave_failure_to_owner(self) -> None:
        """Let whoever has begun it report its failure: the next save or load does not raise it."""
        self._reported = True

    def take_failure(self) -> BaseException | None:
        """The error that nobody has read yet, once the save has ended, unless its owner reports it."""
        return self.exception() if self in _UNREAD and not self._reported else None

    def _run(self, work: Callable[[], Path]) -> None:
        began = time.monotonic()
        try:
            path = work()
        except BaseException as error:
            _UNREAD[self] = str(error)
            self.result.set_exception(error)
        else:
            self.seconds = time.monotonic() - began
            self.result.set_result(path)


_SAVINGS: WeakKeyDictionary[ZeroOptimizer, Saving] = WeakKeyDictionary()


def start_saving(optimizer: ZeroOptimizer, work: Callable[[], Path]) -> Saving:
    """Start a save."""
    saving = _SAVINGS[optimizer] = Saving(work)
    return saving


def is_saving(optimizer: ZeroOptimizer) -> bool:
    """Whether a save of the optimizer is under way."""
    saving = _SAVINGS.get(optimizer)
    return saving is not None and not saving.done()


def finish_saving(optimizer: ZeroOptimizer, together: Together) -> None:
    """Wait for the optimizer's last save. Raises `CheckpointError` on all ranks if one has not raised its error yet."""

    def finish() -> None:
        if (saving := _SAVINGS.get(optimizer)) is not None:
            wait([saving.result])
            del _SAVINGS[optimizer]  # not before: the wait may be interrupted, and a save made all the same
            if (error := saving.take_failure()) is not None:
                raise CheckpointError(f"the background save before this one failed: {error}") from error

    together.each(finish)
