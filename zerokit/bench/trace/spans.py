"""Spans of one rank, and the marks that they begin and end with.

A mark is a reading of the host's clock, or an event on a stream of a device, which tells its time once it is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

STEP, COMPUTE, UPDATE, WAITS = "step", "compute", "update", "waits"
GATHERS, REDUCTIONS, OWNERS = "gathers", "reductions", "to and from owners"
TRACKS = (STEP, COMPUTE, UPDATE, WAITS, GATHERS, REDUCTIONS, OWNERS)
"""In the order in which they are shown."""

now = time.perf_counter
"""Monotonic, and one clock for all processes of a Linux host."""


@dataclass(frozen=True, slots=True)
class Span:
    """What took place on a `track` between two times of this rank's clock, in seconds.

    `about` are facts for its details: units, bytes.
    """

    track: str
    name: str
    start: float
    stop: float
    about: Mapping[str, Any]


class Marks(Protocol):
    """A clock whose marks are read when all is over."""

    def mark(self) -> Any:
        """Mark this moment."""

    def read(self, mark: Any) -> float:
        """The time of a mark, in seconds of this host's clock."""


class HostMarks:
    """The host's clock."""

    def mark(self) -> float:
        return now()

    def read(self, mark: float) -> float:
        return mark


ANCHORS = 5


class DeviceMarks:
    """Events on the current stream, for which the host does not wait.

    Their times are measured from an event whose time the host knows: it waits for `ANCHORS` and takes the one that it
    waited least for. `uncertainty_s` is half of that.
    """

    def __init__(
        self,
        make_event: Callable[[], Any],
        clock: Callable[[], float] = now,
    ) -> None:
        self._make_event = make_event
        self.uncertainty_s, self._at, self._anchor = min(
            (self._set_anchor(clock) for _ in range(ANCHORS)), key=lambda anchor: anchor[0]
        )

    def _set_anchor(self, clock: Callable[[], float]) -> tuple[float, float, Any]:
        event, before = self._make_event(), clock()
        event.record()
        event.synchronize()
        after = clock()
        return (after - before) / 2, (before + after) / 2, event

    def mark(self) -> Any:
        event = self._make_event()
        event.record()
        return event

    def read(self, mark: Any) -> float:
        return self._at + float(self._anchor.elapsed_time(mark)) / 1000.0


class Stretch:
    """A span under way; `begin` and `end` count once each."""

    def __init__(self, marks: Marks, track: str, name: str, **about: Any) -> None:
        self._marks, self._track, self._name, self._about = marks, track, name, about
        self._begun: Any = None
        self._ended: Any = None

    def begin(self) -> None:
        if self._begun is None:
            self._begun = self._marks.mark()

    def end(self) -> None:
        if self._ended is None:
            self._ended = self._marks.mark()

    def over(self, end: float) -> Span:
        """The span; one that has not ended lasts until the `end`."""
        stop = end if self._ended is None else self._marks.read(self._ended)
        start = stop if self._begun is None else self._marks.read(self._begun)
        return Span(self._track, self._name, min(start, stop), stop, self._about)
