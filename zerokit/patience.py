"""Waits with an end: some that a suspension does not shorten, and some for answers that cannot be called off."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

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


def within(question: Callable[[], T], seconds: float) -> T:
    """The answer, or its error, or a TimeoutError: a lookup cannot be stopped, so its thread is left behind."""
    answer: Future[T] = Future()

    def ask() -> None:
        try:
            answer.set_result(question())
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
