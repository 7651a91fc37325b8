"""Waits that a suspension does not shorten."""

from __future__ import annotations

import time

_SHARE = 3.0
_MOST_SECONDS = 5.0


class Patience:
    """A limit of `seconds` for a wait, in which only time counts that this process has been running.

    A batch system, or Ctrl-Z, stops whoever watches together with those that are watched: when both go on, nobody is
    late. The watcher asks often, so that of a longer time between two questions, at most a third of `seconds` and 5 s
    count.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._most = seconds, min(seconds / _SHARE, _MOST_SECONDS)
        self.restart()

    def restart(self) -> None:
        """Wait anew."""
        self._spent, self._asked = 0.0, time.monotonic()

    @property
    def over(self) -> bool:
        """Whether the limit has passed; ask at least every few seconds."""
        now = time.monotonic()
        self._spent += min(now - self._asked, self._most)
        self._asked = now
        return self._spent > self._seconds
