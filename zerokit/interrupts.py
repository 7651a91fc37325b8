"""SIGINT, SIGTERM and SIGHUP as a flag to check, not an exception at any point.

The first signal is remembered; waiting code checks for it and cleans up. A second one raises
KeyboardInterrupt at once, for the user who will not wait.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

_LOOK_SECONDS = 0.05


class Interrupted(Exception):
    """A signal ended the work; its processes have ended."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        super().__init__(f"interrupted by {signal.Signals(signal_number).name}")


class Interrupts:
    """A context that catches the signals, except ignored ones (nohup); it does nothing outside the main thread."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number

    def check(self) -> None:
        """Raise `Interrupted` if a signal has arrived."""
        if self.received is not None:
            raise Interrupted(self.received)

    def wait(self, seconds: float) -> None:
        """Sleep, and raise `Interrupted` as soon as a signal arrives."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            time.sleep(_LOOK_SECONDS)
