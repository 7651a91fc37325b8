"""Saves that are written beside the training: one at a time for each optimizer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from weakref import WeakKeyDictionary

from zerokit.errors import CheckpointError
from zerokit.runtime import ZeroOptimizer


class Saving:
    """A save that `zerokit.save(..., blocking=False)` has begun; it succeeds or fails on all ranks alike."""

    def __init__(self, work: Callable[[], Path]) -> None:
        self._work = work
        self._path: Path | None = None
        self._error: Exception | None = None
        self.seen = False
        """Whether this rank has been given the error."""
        # No daemon: a program that ends lets it finish.
        self._thread = threading.Thread(target=self._run, name="zerokit-save")
        self._thread.start()

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
        """Waits, and returns what `wait` would raise; None after a success. Raises `TimeoutError`."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the save has not ended after {timeout:g} s")
        self.seen = True
        return self._error

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._path = self._work()
        except Exception as error:
            self._error = error
        del self._work


_SAVINGS: WeakKeyDictionary[ZeroOptimizer, Saving] = WeakKeyDictionary()


def start(optimizer: ZeroOptimizer, work: Callable[[], Path]) -> Saving:
    """Begin a save."""
    saving = _SAVINGS[optimizer] = Saving(work)
    return saving


def finished(optimizer: ZeroOptimizer) -> Callable[[], None]:
    """Wait for the optimizer's last save; what is returned raises its error, unless this rank has been given it."""
    saving = _SAVINGS.pop(optimizer, None)
    seen = saving is None or saving.seen
    error = None if saving is None else saving.exception()

    def surface() -> None:
        if error is not None and not seen:
            raise CheckpointError(f"the background save before this one failed: {error}") from error

    return surface
