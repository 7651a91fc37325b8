"""How long a rank computes in a step: its time without what it waits for others in."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from zerokit.runtime.collectives import Collectives


class ComputeClock(Protocol):
    """Measures steps from `begin` to `end`; one that begins again before it has ended is not counted."""

    def begin(self) -> None:
        """A step begins."""

    def end(self) -> bool:
        """The step is over; whether one had begun."""

    def read(self) -> list[float]:
        """The seconds that this rank computed in each step since the last reading; waits for the device."""


class Waiting(Protocol):
    """What knows how long a rank has waited for others."""

    @property
    def waited_s(self) -> float:
        """Seconds so far."""


class HostClock:
    """The host's time less that in which it waited for other ranks."""

    def __init__(self, waiting: Waiting, now: Callable[[], float] = time.monotonic) -> None:
        self._waiting, self._time = waiting, now
        self._began: float | None = None
        self._steps: list[float] = []

    def _now(self) -> float:
        return self._time() - self._waiting.waited_s

    def begin(self) -> None:
        self._began = self._now()

    def end(self) -> bool:
        if (began := self._began) is None:
            return False
        self._began = None
        self._steps.append(self._now() - began)
        return True

    def read(self) -> list[float]:
        steps, self._steps = self._steps, []
        return steps


def _timing_event() -> Any:
    return torch.cuda.Event(enable_timing=True)


class DeviceClock:
    """The device's time less that in which its computation waited for collectives, by events on the stream.

    The host waits for nothing until it reads.
    """

    def __init__(self, make_event: Callable[[], Any] = _timing_event) -> None:
        self._make_event = make_event
        self._open: list[Any] | None = None
        self._steps: list[list[Any]] = []

    def _mark(self) -> Any:
        event = self._make_event()
        event.record()
        return event

    def begin(self) -> None:
        self._open = [self._mark()]

    def waiting(self, wait: Callable[[], None]) -> None:
        """Call `wait`, which makes the computation wait: none of a step that is being measured."""
        if (marks := self._open) is None:
            wait()
            return
        marks.append(self._mark())
        wait()
        marks.append(self._mark())

    def end(self) -> bool:
        if self._open is None:
            return False
        self._steps.append([*self._open, self._mark()])
        self._open = None
        return True

    def read(self) -> list[float]:
        steps, self._steps = self._steps, []
        if steps:
            steps[-1][-1].synchronize()
        # From the first mark to the second the device computes, to the third it waits, and so on.
        return [
            sum(start.elapsed_time(end) for start, end in zip(marks[::2], marks[1::2], strict=True)) / 1000.0
            for marks in steps
        ]


def compute_clock(collectives: Collectives) -> ComputeClock:
    """The clock of a rank of these collectives."""
    if not collectives.runs_ahead or collectives.device.type != "cuda":
        return HostClock(collectives.reporter)
    clock = DeviceClock()
    collectives.around_waits.append(clock.waiting)
    return clock
