"""How long steps take: by the host's clock, or by events of a CUDA device that the host does not wait for.

clock.begin(), one step, clock.end(), again and again, then clock.read(): the milliseconds of each of these steps
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from zerokit.bench.machine.accelerator import Accelerator


class Event(Protocol):
    """A mark in the device's work, as `torch.cuda.Event(enable_timing=True)` is one."""

    def record(self) -> None:
        """Have the device take the time when it has done all that it was asked for so far."""

    def elapsed_time(self, end_event: Any, /) -> float:
        """Milliseconds from this one to a later one, once both are over."""


class Clock(ABC):
    """Times steps; `runs_ahead` says whether the host may ask for a step before the last one is over."""

    runs_ahead: bool
    window_ms: float | None
    """Wall clock of the steps read so far, where that is another measurement than their own times."""

    @abstractmethod
    def begin(self) -> None:
        """A step is asked for from here on."""

    @abstractmethod
    def end(self) -> None:
        """The step has been asked for."""

    @abstractmethod
    def read(self) -> list[float]:
        """Milliseconds of each step since the last reading, once all are over."""


class HostClock(Clock):
    """From `begin` to `end`: on a host a step that was asked for is over."""

    runs_ahead = False
    window_ms = None

    def __init__(self) -> None:
        self._started = 0.0
        self._steps: list[float] = []

    def begin(self) -> None:
        self._started = time.perf_counter()

    def end(self) -> None:
        self._steps.append((time.perf_counter() - self._started) * 1000.0)

    def read(self) -> list[float]:
        steps, self._steps = self._steps, []
        return steps


class DeviceClock(Clock):
    """Events at the boundaries of steps: one before the first, one after each.

    The device is waited for before the first step, so that none of what came before is in it, and once by `read`.
    Between these the host's wall clock runs as well (`window_ms`): it and the sum of the steps must agree, but for the
    time that the host takes to ask for the first kernel and to learn of the end of the last.

    Args:
        make_event: makes one that has not been recorded.
        synchronize: waits until the device has done everything.
    """

    runs_ahead = True

    def __init__(self, make_event: Callable[[], Event], synchronize: Callable[[], None]) -> None:
        self._make_event = make_event
        self._synchronize = synchronize
        self._boundaries: list[Event] = []
        self._started = 0.0
        self.window_ms: float = 0.0

    def begin(self) -> None:
        if not self._boundaries:
            self._synchronize()
            self._started = time.perf_counter()
            self.end()

    def end(self) -> None:
        boundary = self._make_event()
        boundary.record()
        self._boundaries.append(boundary)

    def read(self) -> list[float]:
        if not self._boundaries:
            return []
        self._synchronize()
        self.window_ms += (time.perf_counter() - self._started) * 1000.0
        boundaries, self._boundaries = self._boundaries, []
        return [before.elapsed_time(after) for before, after in itertools.pairwise(boundaries)]


def clock_of(accelerator: Accelerator) -> Clock:
    """The clock for steps of this accelerator."""
    if accelerator.device.type != "cuda":
        return HostClock()
    import torch

    return DeviceClock(lambda: torch.cuda.Event(enable_timing=True), accelerator.synchronize)
