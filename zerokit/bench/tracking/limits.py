"""An end for calls to a server that sends bytes slowly or without end, which no time-out of a single read sees."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_BYTES = 1 << 30
"""By which the memory of this process may grow in one call."""
_LOOK_SECONDS = 0.25


class Endless(BaseException):
    """A call was ended. Not an `Exception`: libraries would take one for a failed attempt, and try again."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """End the body with `Endless` after so long, or when it has taken `MOST_BYTES`; only in the main thread.

    By a timer's signal, which also interrupts a read. One that is set already goes on afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    started, before = time.monotonic(), _resident_bytes()

    def look(*_: object) -> None:
        if time.monotonic() - started > seconds:
            raise Endless(f"the answer did not end within {seconds:g} s")
        if _resident_bytes() - before > MOST_BYTES:
            raise Endless(f"the answer is longer than {MOST_BYTES >> 20} MiB")

    former = signal.signal(signal.SIGALRM, look)
    left, interval = signal.setitimer(signal.ITIMER_REAL, _LOOK_SECONDS, _LOOK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, former)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left - (time.monotonic() - started)), interval)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
