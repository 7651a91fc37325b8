"""Time within and of a step: clocks, the phases of a step, and the exposed communication in it.

    clock.begin(), one step, clock.end(), again and again, then clock.read(): the milliseconds of each of these steps

A clock is the host's, or made of CUDA events that the host does not wait for. Phases are timed in extra steps after the
measured ones: each part is waited for, which a measured step does not do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from zerokit.bench.machine.accelerator import Accelerator, gather
from zerokit.bench.record.measured import Phases

if TYPE_CHECKING:
    from zerokit.bench.engines.trainer import Batch, Trainer


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
        return [before.elapsed_time(after) for before, after in pairwise(boundaries)]


def clock_of(accelerator: Accelerator) -> Clock:
    """The clock for steps of this accelerator."""
    if accelerator.is_cuda:
        return DeviceClock(lambda: torch.cuda.Event(enable_timing=True), accelerator.synchronize)
    return Clock()


STEPS = 5
TRACED_STEPS = 3

Span = tuple[float, float]
"""Start and end, in any unit."""

Batches = Callable[[int], "list[Batch]"]
"""Gives the micro-batches of a step, on the device."""


class Parts(NamedTuple):
    """The phases of one step on one rank, in milliseconds; `waited` is None if the engine does not count it."""

    forward: float
    backward: float
    optimizer: float
    waited: float | None


def measure_phases(trainer: Trainer, batches: Batches, accelerator: Accelerator, *, steps: int) -> Phases:
    """Run up to `STEPS` extra steps by phases, and on NCCL `TRACED_STEPS` more under the profiler. Collective."""
    steps = min(STEPS, steps)
    mine = [_step_in_parts(trainer, batches(step), accelerator) for step in range(steps)]
    traced = _trace(trainer, batches, accelerator) if accelerator.backend == "nccl" else None
    gathered = gather((mine, traced))
    return combine([parts for parts, _ in gathered], [trace for _, trace in gathered if trace is not None])


def combine(by_rank: Sequence[Sequence[Parts]], traced: Sequence[tuple[float, float]]) -> Phases:
    """The medians over steps, each step as its slowest rank saw it.

    `traced` has, of every rank with a trace, the milliseconds that a step took under the profiler and those exposed.
    """
    slowest = [max(ranks, key=lambda parts: sum(parts[:3])) for ranks in zip(*by_rank, strict=True)]
    waited = [parts.waited for parts in slowest if parts.waited is not None]
    exposed_ms = median(waited) if len(waited) == len(slowest) else None
    if traced:
        exposed_ms = max(traced)[1]
    return Phases(
        steps=len(slowest),
        forward_ms=median(parts.forward for parts in slowest),
        backward_ms=median(parts.backward for parts in slowest),
        optimizer_ms=median(parts.optimizer for parts in slowest),
        exposed_communication_ms=exposed_ms,
        source="trace" if traced else "clock",
        optimizer_share=median(parts.optimizer / sum(parts[:3]) for parts in slowest),
    )


def _step_in_parts(trainer: Trainer, batches: Sequence[Batch], accelerator: Accelerator) -> Parts:
    """`Trainer.step`, with the device waited for after each part."""
    # On CUDA the host is past a collective before it has begun: only a trace knows.
    before = None if accelerator.is_cuda else trainer.waited_s
    marks: list[tuple[str, float]] = []
    trainer.step(batches, lambda part: marks.append((part, _now(accelerator))))
    marks.append(("end", _now(accelerator)))
    took = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
    for (part, begun), (_, ended) in pairwise(marks):
        took[part] += (ended - begun) * 1000.0
    after = None if before is None else trainer.waited_s
    waited_ms = None if before is None or after is None else (after - before) * 1000.0
    return Parts(**took, waited=waited_ms)


def _now(accelerator: Accelerator) -> float:
    accelerator.synchronize()
    return time.perf_counter()


def _trace(trainer: Trainer, batches: Batches, accelerator: Accelerator) -> tuple[float, float]:
    """Milliseconds a step takes under the profiler, and how many of these only NCCL's kernels run."""
    trainer.step(batches(0))
    accelerator.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        started = _now(accelerator)
        for step in range(TRACED_STEPS):
            trainer.step(batches(step))
        elapsed_ms = (_now(accelerator) - started) * 1000.0
    exposed_us = exposed(*on_device(profiler.events() or ()))
    return elapsed_ms / TRACED_STEPS, exposed_us / 1000.0 / TRACED_STEPS


def on_device(events: Iterable[Any]) -> tuple[list[Span], list[Span]]:
    """The spans of NCCL's kernels, and of other kernels and copies, in the profiler's microseconds.

    The profiler also draws annotations ("nccl:all_reduce", "Optimizer.step") on the device's line, from the first to
    the last kernel below them: these are no work.
    """
    communication: list[Span] = []
    computation: list[Span] = []
    for event in events:
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation:
            kind = communication if "nccl" in event.name.lower() else computation
            kind.append((event.time_range.start, event.time_range.end))
    return communication, computation


def exposed(communication: Iterable[Span], computation: Iterable[Span]) -> float:
    """The time in which communication runs without computation; spans may overlap in any way."""
    hidden = merge(computation)
    either = merge([*communication, *hidden])
    return sum(end - start for start, end in either) - sum(end - start for start, end in hidden)


def merge(spans: Iterable[Span]) -> list[Span]:
    """The union of the spans, as disjoint spans in order."""
    merged: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
