"""Raises an exception at one line of zerokit's own code: the place of an interrupt, or of a user's error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import zerokit

_PACKAGE = str(Path(zerokit.__file__).parent / "runtime")


class Interrupted(BaseException):
    """Like a KeyboardInterrupt: no `except Exception` holds it."""


class Interruption:
    """Counts the lines of zerokit's runtime that this thread runs, and raises `Interrupted` before line number `at`.

    `where` says where that was; None where fewer lines were run, or where Python dropped the exception (a generator's
    end). Waits are left out: how many lines they take depends on the other ranks.
    """

    def __init__(self, at: int) -> None:
        self.lines, self.where = 0, ""
        self._at = at

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        waits = code.co_name in ("until", "attempt_all", "attempt", "pause", "released", "taken", "arrive")
        return self._line if code.co_filename.startswith(_PACKAGE) and not waits else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self._at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise Interrupted(self.where)
        return self._line

    @contextmanager
    def armed(self) -> Iterator[None]:
        """A context in which lines are counted; what it raises ends there."""
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            yield
        except Interrupted:
            pass
        else:
            self.where = ""
        finally:
            sys.settrace(before)
