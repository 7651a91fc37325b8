"""The timed loop of one rank: warm-up until steps are steady, then the steps that are measured.

On a CPU every step is timed, read and reported by itself. On CUDA the measured steps follow each other without a wait
(`DeviceClock`): their batches lie on the device, losses stay there until the last step, or one that is saved, is over.

The job's samples are numbered through, and a step takes the next ones, whatever the number of ranks:

    position          +b                +2b               +3b               position + samples_per_step
    | rank 0, micro 0 | rank 1, micro 0 | rank 0, micro 1 | rank 1, micro 1 | the next step …

So a run that goes on at another world size from a position, counted in samples, repeats none and leaves none out.
With `--pace` a step has the same samples, and `dealing` says whose they are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.bench.engines.trainer import Batch, Trainer
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.measure.clock import Clock, clock_of
from zerokit.bench.record.by_rank import PACE_EVERY
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.statistics import STEADY_WINDOW, steady
from zerokit.bench.record.status import Progress, write_progress
from zerokit.bench.worker.checkpoints import Keeper
from zerokit.bench.worker.dealing import Dealer
from zerokit.bench.worker.measured import Measured
from zerokit.bench.workloads.build import Loaded

# With an open end of warm-up, a progress bar expects the shortest there is.
_SHORTEST_WARMUP = 2 * STEADY_WINDOW + 1
# Where the host runs ahead, a line of progress costs the steps some 50 µs if the host is what they wait for.
_PROGRESS_SECONDS = 0.5
_WATCHED = 5
"""Steps at the end of warm-up."""


class Loop:
    """Trains `trainer` on `loaded`'s batches, on this rank.

    `make_clock` makes the clock of warm-up, and that of the measured steps; by default the accelerator's.
    """

    def __init__(
        self,
        trainer: Trainer,
        loaded: Loaded,
        settings: Settings,
        accelerator: Accelerator,
        make_clock: Callable[[], Clock] | None = None,
    ) -> None:
        self._trainer = trainer
        self._loaded, self._settings = loaded, settings
        self._accelerator = accelerator
        self._make_clock = make_clock or (lambda: clock_of(accelerator))
        self._clock = self._make_clock()
        self._batches = Batches(loaded, settings, accelerator.device, ahead=self._clock.runs_ahead)
        self._dealer: Dealer | None = None
        self._computing = trainer.compute_clock()
        self._watching = self._computing is not None
        self._unread: list[tuple[list[Tensor], Tensor | None, list[float]]] = []
        self._reported = -math.inf
        self.measured = Measured()

    def run(self, file: Path | None, keeper: Keeper, begin: Callable[[], None]) -> Measured:
        """Train all steps, from `keeper`'s checkpoint if there is one; `begin` is called before the measured steps, and
        `file` receives the progress.

        An elastic run ends at step `settings.steps`: its measured steps are those that warm-up leaves, at least
        one, or none where all were trained before.

        A step is timed from before the first forward to after the zeroing of gradients. Batches are prepared before,
        losses are read and checkpoints saved after the clock has stopped.
        """
        measured = self.measured
        begin_at = keeper.resume()
        measured.trained, measured.samples = begin_at.step, begin_at.samples
        if self._settings.pace and self._trainer.zero is not None:
            device = self._accelerator.device
            self._dealer = Dealer(self._loaded, self._settings, device, self._trainer.zero, measured.samples)
        agreed: list[float] = []
        while not self._is_warm(agreed):
            self._step()
            elapsed = self._read()
            keeper.after_step(measured, last=False)
            if self._settings.warmup is None:
                agreed += self._accelerator.maximum([elapsed])
            measured.warmup += 1
            shortest = 2 * PACE_EVERY if self._settings.pace else _SHORTEST_WARMUP
            self._report(file, self._settings.warmup or max(shortest, measured.warmup))
        steps = self._settings.steps
        if self._settings.elastic:
            steps = max(0, steps - measured.trained)
        if self._dealer is None:
            measured.batch_bytes = self._batches.prepare(measured.samples, steps)
        elif self._clock.runs_ahead:
            measured.batch_bytes = self._dealer.prepare(steps, READY_BYTES)
        if self._clock.runs_ahead:  # marks around every wait would slow the measured steps
            self._note_idle(measured.step_ms)
        elif self._computing is not None:
            self._computing.read()
        self._clock = self._make_clock()
        # All ranks begin the measured steps together. Not `barrier`: NCCL's asks for a device of its own.
        self._accelerator.maximum([0.0])
        begin()
        for number in range(steps):
            self._step()
            last = number == steps - 1
            if last or not self._clock.runs_ahead or keeper.due(measured.trained, last=False):
                self._read()
                keeper.after_step(measured, last=last)
                self._report(file, measured.warmup)
            elif time.monotonic() - self._reported >= _PROGRESS_SECONDS:
                self._reported = time.monotonic()
                self._report(file, measured.warmup)
        self._note_idle(measured.step_ms[measured.warmup :])
        measured.window_ms = self._clock.window_ms
        measured.batches_repeat_after = self._batches.repeat_after
        self._batches.drop()
        return measured

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step, counted from the start of the data, on its device."""
        if self._dealer is not None:
            return self._dealer.alike(step)
        return self._batches.of(step * self._settings.samples_per_step)

    def next_batches(self) -> list[Batch]:
        """The micro-batches of another step."""
        if self._dealer is not None:
            return self._dealer.alike(self.measured.trained)
        return self._batches.of(self.measured.samples)

    @property
    def dealer(self) -> Dealer | None:
        """Who deals the samples of a step by pace."""
        return self._dealer

    def _is_warm(self, agreed: list[float]) -> bool:
        """Ranks must agree: they use the same times, or none."""
        if self._settings.elastic and self.measured.trained >= self._settings.steps - 1:
            return True
        if self._settings.warmup is None:
            short = self._settings.pace and self.measured.warmup < 2 * PACE_EVERY
            return not short and steady(agreed)
        return self.measured.warmup >= self._settings.warmup

    def _step(self) -> None:
        if self._dealer is None:
            batches, counts = self.next_batches(), None
        else:
            dealt = self._dealer.next()
            batches, counts = [one.batch for one in dealt], [one.count for one in dealt]
        computing = self._computing if self._watching else None
        self._clock.begin()
        if computing is not None:
            computing.begin()
        losses, norm = self._trainer.step(batches)
        if computing is not None:
            computing.end()
        self._clock.end()
        self._unread.append((losses, norm, counts or [1.0] * len(losses)))
        self.measured.trained += 1
        self.measured.samples += self._settings.samples_per_step

    def _read(self) -> float:
        """Note what the steps since the last reading took and showed; milliseconds of the last one."""
        measured = self.measured
        measured.step_ms += self._clock.read()
        for losses, norm, counts in self._unread:
            weighted = sum(float(loss) * count for loss, count in zip(losses, counts, strict=True))
            measured.loss.append(weighted / sum(counts) if any(counts) else 0.0)
            measured.count.append(1.0 if self._dealer is None else sum(counts))
            if norm is not None:
                measured.gradient_norm.append(float(norm))
        self._unread.clear()
        return measured.step_ms[-1]

    def _note_idle(self, step_ms: Sequence[float]) -> None:
        """Note how long the rank computed and waited in the last steps, which took `step_ms`, and watch no more."""
        if self._computing is None or not self._watching:
            return
        self._watching = False
        computed = self._computing.read()[-len(step_ms) :]
        if self._clock.runs_ahead:
            computed = computed[-_WATCHED:]
        if computed:
            took = fmean(step_ms[-len(computed) :])
            self.measured.computed_ms = min(took, 1000.0 * fmean(computed))
            self.measured.waited_ms = took - self.measured.computed_ms

    def _report(self, file: Path | None, warmup: int) -> None:
        """How many steps these processes have made, of how many; of those not read yet, neither time nor loss."""
        measured, unread = self.measured, len(self._unread)
        done = len(measured.step_ms) + unread
        total = warmup + self._settings.steps
        if self._settings.elastic:
            total = self._settings.steps - (measured.trained - done)
        loss, step_ms = (None, None) if unread else (measured.loss[-1], measured.step_ms[-1])
        write_progress(file, Progress(done, total, warmup, loss, step_ms))


READY_BYTES = 512 * 2**20
"""Most that may lie ready on a device."""


@dataclass
class Batches:
    """Provides the micro-batches of a step; with `ahead`, those of all measured steps are made before the first.

    A device whose host runs ahead must find its batches there: one that is made or copied between two steps would be
    timed with them, and images take longer to make than to train on. Where those of all steps exceed `READY_BYTES`, a
    few are used in turn: the data begin anew after `cycle` steps. The cycle follows from the size of a batch alone, and
    so is the same for every engine and stage and for a resumed run. Copies on a stream of their own would only move the
    limit: they need every batch in pinned memory of the host. An elastic run has every sample once: its steps beyond
    the limit wait for their batches.

    `ahead` says whether the host runs ahead of the device; else a step's batches are made when `of` is called.
    """

    loaded: Loaded
    settings: Settings
    device: torch.device
    _: KW_ONLY
    ahead: bool
    limit_bytes: int = READY_BYTES
    repeat_after: int | None = field(default=None, init=False)
    """The cycle, once a batch has been used twice for it; None while every step has had its own."""
    _ready: dict[int, list[Batch]] = field(default_factory=dict, init=False)

    def of(self, position: int) -> list[Batch]:
        """This rank's micro-batches, on its device, for the step that starts at sample `position` of the job."""
        first = self._first_sample(position)
        return self._ready[first] if first in self._ready else self._make(first)

    def prepare(self, position: int, count: int) -> int:
        """Prepare the batches of `count` steps from `position` if the host runs ahead; returns their bytes."""
        if self.ahead:
            if self.settings.elastic:
                count = min(count, self._cycle)
            starts = (position + step * self.settings.samples_per_step for step in range(count))
            self._ready = {
                first: self._make(first) for first in dict.fromkeys(map(self._first_sample, starts))
            }
        return sum(_size_bytes(batch) for batches in self._ready.values() for batch in batches)

    def drop(self) -> None:
        """Free the prepared batches."""
        self._ready = {}

    def _first_sample(self, position: int) -> int:
        """With which sample the batches of the step at `position` begin."""
        if not self.ahead or self.settings.elastic:
            return position
        samples = self._cycle * self.settings.samples_per_step
        if position >= samples:
            self.repeat_after = self._cycle
        return position % samples

    @cached_property
    def _cycle(self) -> int:
        """How many steps' batches may lie ready; at least one's."""
        of_a_step = _size_bytes(self.loaded.batch(0)) * self.settings.accumulate
        return max(1, self.limit_bytes // max(1, of_a_step))

    def _make(self, position: int) -> list[Batch]:
        rank, world = dist.get_rank(), dist.get_world_size()
        firsts = [
            position + (micro_batch * world + rank) * self.settings.batch_size
            for micro_batch in range(self.settings.accumulate)
        ]
        return [tuple(part.to(self.device) for part in self.loaded.batch(first)) for first in firsts]


def _size_bytes(batch: Batch) -> int:
    return sum(part.numel() * part.element_size() for part in batch)
