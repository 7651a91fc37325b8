"""Clocks for steps: the host's clock, or CUDA events that the host does not wait for.

clock.begin(), one step, clock.end(), again and again, then clock.read(): the milliseconds of each of these steps
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import torch

from zerokit.bench.machine.accelerator import Accelerator


class Clock:
    """Times steps by the host, from `begin` to `end`: on a CPU a step is complete when its call returns.

    `runs_ahead` says whether the host may launch a step before the last one is over; `window_ms` is the wall clock of
    the steps read so far, where that is another measurement than their own times.
    """

    runs_ahead = False

    def __init__(self) -> None:
        self._started = 0.0
        self._steps: list[float] = []
        self.window_ms: float | None = None

    def begin(self) -> None:
        """Mark the start of a step."""
        self._started = time.perf_counter()

    def end(self) -> None:
        """Mark the end of a step: all its work has been launched."""
        self._steps.append((time.perf_counter() - self._started) * 1000.0)

    def read(self) -> list[float]:
        """Wait for all steps, and return the milliseconds of each since the last reading."""
        steps, self._steps = self._steps, []
        return steps


class DeviceClock(Clock):
    """Times steps with CUDA events: one before the first step, one after each.

    The device is waited for before the first step, so that none of what came before is in it, and once by `read`.
    Between these the host's wall clock runs as well (`window_ms`): it and the sum of the steps must agree, but for the
    time that the host takes to launch the first kernel and to learn of the end of the last.

    Args:
        make_event: makes one that has not been recorded, as `torch.cuda.Event(enable_timing=True)`.
        synchronize: waits until the device has done everything.
    """

    runs_ahead = True

    def __init__(self, make_event: Callable[[], Any], synchronize: Callable[[], None]) -> None:
        super().__init__()
        self._make_event = make_event
        self._synchronize = synchronize
        self._boundaries: list[Any] = []
        self.window_ms: float = 0.0

    def begin(self) -> None:
        if not self._boundaries:
            self._synchronize()
            super().begin()
            self.end()

    def end(self) -> None:
        self._boundaries.append(self._make_event())
        self._boundaries[-1].record()

    def read(self) -> list[float]:
        if not self._boundaries:
            return []
        self._synchronize()
        self.window_ms += (time.perf_counter() - self._started) * 1000.0
        boundaries, self._boundaries = self._boundaries, []
        return [before.elapsed_time(after) for before, after in itertools.pairwise(boundaries)]


def clock_of(accelerator: Accelerator) -> Clock:
    """The clock for steps of this accelerator."""
    if accelerator.is_cuda:
        return DeviceClock(lambda: torch.cuda.Event(enable_timing=True), accelerator.synchronize)
    return Clock()
