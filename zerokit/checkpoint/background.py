"""Background saves: one at a time for each optimizer."""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

from zerokit.errors import CheckpointError, ZerokitWarning
from zerokit.runtime import ZeroOptimizer

_UNREAD: dict[threading.Event, str] = {}
"""Errors of failed saves that this rank has not raised yet, by the event of their end."""


@atexit.register
def warn_of_failures() -> None:
    """Warn, at the program's end, of failed saves that were not waited for."""
    for text in _UNREAD.values():
        warnings.warn(f"a background save failed without a wait(): {text}", ZerokitWarning, stacklevel=1)


class Saving:
    """A save started by `zerokit.save(..., blocking=False)`; it succeeds or fails on all ranks together."""

    def __init__(self, work: Callable[[], Path]) -> None:
        self._work = work
        self._path: Path | None = None
        self._error: Exception | None = None
        self.seen = False
        """Whether this rank has been given the error."""
        # Not `Thread.join`: interrupted by Control-C, it makes Python take the thread for ended.
        self._ended = threading.Event()
        # No daemon: a program that ends lets it finish.
        threading.Thread(target=self._run, name="zerokit-save").start()

    def wait(self, timeout: float | None = None) -> Path:
        """The step's directory, once it is committed.

        Raises `CheckpointError` if the save failed, `ScheduleError` if a rank did not come, and `TimeoutError` after
        `timeout` seconds.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._path is not None
        return self._path

    def exception(self, timeout: float | None = None) -> Exception | None:
        """Wait, and return the exception that `wait` would raise; None after a success. Raises `TimeoutError`."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the save has not ended after {timeout:g} s")
        self.seen = True
        _UNREAD.pop(self._ended, None)
        return self._error

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._ended.is_set()

    def _run(self) -> None:
        try:
            self._path = self._work()
        except Exception as error:
            self._error = error
            _UNREAD[self._ended] = str(error)
        finally:
            del self._work
            self._ended.set()


_SAVINGS: WeakKeyDictionary[ZeroOptimizer, Saving] = WeakKeyDictionary()


def start(optimizer: ZeroOptimizer, work: Callable[[], Path]) -> Saving:
    """Start a save."""
    saving = _SAVINGS[optimizer] = Saving(work)
    return saving


def failure(optimizer: ZeroOptimizer) -> CheckpointError | None:
    """Wait for the optimizer's last save; returns its error, unless there was none or it was already returned."""
    saving = _SAVINGS.get(optimizer)
    seen = saving is None or saving.seen
    error = None if saving is None else saving.exception()
    _SAVINGS.pop(optimizer, None)  # not before: the wait may be interrupted, and a save made all the same
    if error is None or seen:
        return None
    failed = CheckpointError(f"the background save before this one failed: {error}")
    failed.__cause__ = error
    return failed
