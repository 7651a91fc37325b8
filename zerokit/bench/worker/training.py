"""The timed loop of one rank: warm-up until steps are steady, then the steps that are measured.

On a CPU every step is timed, read and reported by itself. On CUDA the measured steps follow each other without a wait
(`DeviceClock`): their batches lie on the device, losses stay there until the last step, or one that is saved, is over.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from zerokit.bench.engines.trainer import Batch, Trainer
from zerokit.bench.machine.accelerator import Accelerator
from zerokit.bench.measure.clock import Clock, clock_of
from zerokit.bench.record.progress import Progress, ProgressWriter
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.statistics import STEADY_WINDOW, steady
from zerokit.bench.worker.batches import Batches
from zerokit.bench.worker.checkpoints import Keeper
from zerokit.bench.workloads.build import Loaded

# With an open end of warm-up, a progress bar expects the shortest there is.
_SHORTEST_WARMUP = 2 * STEADY_WINDOW + 1
# Where the host runs ahead, a line of progress costs the steps some 50 µs if the host is what they wait for.
_PROGRESS_SECONDS = 0.5


@dataclass(slots=True)
class Measured:
    """One rank's figures of each step, warm-up first; `trained` and `samples` include those of a resumed run.

    `window_ms` is `Clock.window_ms` of the measured steps, `batch_bytes` what lay ready for these on the device, and
    `batches_repeat_after` the number of steps after which batches came again.
    """

    warmup: int = 0
    trained: int = 0
    samples: int = 0
    step_ms: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)
    window_ms: float | None = None
    batch_bytes: int = 0
    batches_repeat_after: int | None = None


class Loop:
    """Trains `trainer` on `loaded`'s batches, on this rank.

    Args:
        trainer: the engine.
        loaded: the workload.
        settings: of the bench.
        accelerator: of this rank.
        make_clock: makes the clock of warm-up, and that of the measured steps; by default the accelerator's.
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
        self._settings = settings
        self._accelerator = accelerator
        self._make_clock = make_clock or (lambda: clock_of(accelerator))
        self._clock = self._make_clock()
        self._batches = Batches(loaded, settings, accelerator.device, ahead=self._clock.runs_ahead)
        self._unread: list[tuple[list[Tensor], Tensor | None]] = []
        self._reported = -math.inf
        self.measured = Measured()

    def run(self, writer: ProgressWriter, keeper: Keeper, begin: Callable[[], None]) -> Measured:
        """Train all steps, from `keeper`'s checkpoint if there is one; `begin` is called before the measured steps.

        An elastic run ends at step `settings.steps`: its measured steps are those that warm-up leaves, at least
        one, or none where all were trained before.

        A step is timed from before the first forward to after the zeroing of gradients. Batches are prepared before,
        losses are read and checkpoints saved after the clock has stopped.
        """
        measured = self.measured
        begin_at = keeper.resume()
        measured.trained, measured.samples = begin_at.step, begin_at.samples
        agreed: list[float] = []
        while not self._is_warm(agreed):
            self._step()
            elapsed = self._read()
            keeper.after_step(measured, last=False)
            if self._settings.warmup is None:
                agreed += self._accelerator.maximum([elapsed])
            measured.warmup += 1
            self._report(writer, self._settings.warmup or max(_SHORTEST_WARMUP, measured.warmup))
        steps = self._settings.steps
        if self._settings.elastic:
            steps = max(0, steps - measured.trained)
        measured.batch_bytes = self._batches.prepare(measured.samples, steps)
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
                self._report(writer, measured.warmup)
            elif time.monotonic() - self._reported >= _PROGRESS_SECONDS:
                self._reported = time.monotonic()
                self._report(writer, measured.warmup)
        measured.window_ms = self._clock.window_ms
        measured.batches_repeat_after = self._batches.repeat_after
        self._batches.drop()
        return measured

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step, counted from the start of the data, on its device."""
        return self._batches.of(step * self._settings.samples_per_step)

    def next_batches(self) -> list[Batch]:
        """The micro-batches of the next step."""
        return self._batches.of(self.measured.samples)

    def _is_warm(self, agreed: list[float]) -> bool:
        """Ranks must agree: they use the same times, or none."""
        if self._settings.elastic and self.measured.trained >= self._settings.steps - 1:
            return True
        if self._settings.warmup is None:
            return steady(agreed)
        return self.measured.warmup >= self._settings.warmup

    def _step(self) -> None:
        batches = self.next_batches()
        self._clock.begin()
        seen = self._trainer.step(batches)
        self._clock.end()
        self._unread.append(seen)
        self.measured.trained += 1
        self.measured.samples += self._settings.samples_per_step

    def _read(self) -> float:
        """Note what the steps since the last reading took and showed; milliseconds of the last one."""
        measured = self.measured
        measured.step_ms += self._clock.read()
        for losses, norm in self._unread:
            measured.loss.append(sum(float(loss) for loss in losses) / len(losses))
            if norm is not None:
                measured.gradient_norm.append(float(norm))
        self._unread.clear()
        return measured.step_ms[-1]

    def _report(self, writer: ProgressWriter, warmup: int) -> None:
        """How many steps these processes have made, of how many; of those not read yet, neither time nor loss."""
        measured, unread = self.measured, len(self._unread)
        done = len(measured.step_ms) + unread
        total = warmup + self._settings.steps
        if self._settings.elastic:
            total = self._settings.steps - (measured.trained - done)
        loss, step_ms = (None, None) if unread else (measured.loss[-1], measured.step_ms[-1])
        writer.write(Progress(done, total, warmup, loss, step_ms))
