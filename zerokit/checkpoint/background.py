"""Background saves: one at a time for each optimizer."""

from __future__ import annotations

import atexit
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from weakref import WeakKeyDictionary

from zerokit.errors import CheckpointError, ZerokitWarning
from zerokit.runtime import ZeroOptimizer

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
        self._result: Future[Path] = Future()
        self.seen = False
        """Whether this rank has been given the error."""
        # No daemon, and no executor's thread: a program that ends lets it finish.
        threading.Thread(target=self._run, args=(work,), name="zerokit-save").start()

    def wait(self, timeout: float | None = None) -> Path:
        """The step's directory, once it is committed.

        Raises `CheckpointError` if the save failed, `ScheduleError` if a rank did not come, and `TimeoutError` after
        `timeout` seconds.
        """
        self.exception(timeout)
        return self._result.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the exception that `wait` would raise; None after a success. Raises `TimeoutError`."""
        if not self.done() and wait([self._result], timeout).not_done:
            raise TimeoutError(f"the save has not ended after {timeout:g} s")
        self.seen = True
        _UNREAD.pop(self, None)
        return self._result.exception()

    def done(self) -> bool:
        """Whether the save has ended, successfully or not."""
        return self._result.done()

    def _run(self, work: Callable[[], Path]) -> None:
        try:
            path = work()
        except BaseException as error:
            _UNREAD[self] = str(error)
            self._result.set_exception(error)
        else:
            self._result.set_result(path)


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
