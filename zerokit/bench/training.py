"""The timed loop of one rank: warm-up until steps are steady, then the steps that are measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.bench.checkpoints import Keeper
from zerokit.bench.engines.trainer import Batch, Trainer
from zerokit.bench.measure.machine import Place
from zerokit.bench.measure.statistics import STEADY_WINDOW, steady
from zerokit.bench.progress import Progress, ProgressWriter
from zerokit.bench.settings import Settings
from zerokit.bench.workloads.build import Loaded

# With an open end of warm-up, a progress bar expects the shortest there is.
_SHORTEST_WARMUP = 2 * STEADY_WINDOW + 1


@dataclass(slots=True)
class Measured:
    """What one rank saw of each step, warm-up first; `trained` counts steps of a resumed run as well."""

    warmup: int = 0
    trained: int = 0
    step_ms: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    gradient_norm: list[float] = field(default_factory=list)


class Loop:
    """Trains `trainer` on `loaded`'s batches, on this rank."""

    def __init__(self, trainer: Trainer, loaded: Loaded, settings: Settings, place: Place) -> None:
        self._trainer = trainer
        self._loaded = loaded
        self._settings = settings
        self._place = place
        self.measured = Measured()

    def run(self, writer: ProgressWriter, keeper: Keeper, begin: Callable[[], None]) -> Measured:
        """All steps, going on from a checkpoint where `keeper` finds one; `begin` is called before the measured ones.

        The clock runs from before the first forward to after the zeroing of gradients; on CUDA it waits for the device.
        Batches are prepared before it starts, losses are read after it has stopped.
        """
        measured = self.measured
        measured.trained = keeper.resume()
        agreed: list[float] = []
        while not self._warm(agreed):
            elapsed = self._step(keeper, last=False)
            if self._settings.warmup is None:
                agreed.append(self._slowest(elapsed))
            measured.warmup += 1
            planned = self._settings.warmup or max(_SHORTEST_WARMUP, measured.warmup)
            self._tell(writer, planned)
        # All ranks begin the measured steps together. Not `barrier`: NCCL's asks for a device of its own.
        dist.all_reduce(torch.zeros(1, device=self._place.device))
        begin()
        for number in range(self._settings.steps):
            self._step(keeper, last=number == self._settings.steps - 1)
            self._tell(writer, measured.warmup)
        return measured

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step, on its device."""
        rank = dist.get_rank()
        return [
            tuple(part.to(self._place.device) for part in self._loaded.batch(step, rank, micro_batch))
            for micro_batch in range(self._settings.accumulate)
        ]

    def _warm(self, agreed: list[float]) -> bool:
        """Ranks must agree: they look at the same times, or at none."""
        if self._settings.warmup is None:
            return steady(agreed)
        return self.measured.warmup >= self._settings.warmup

    def _slowest(self, elapsed: float) -> float:
        longest = torch.tensor([elapsed], dtype=torch.float64, device=self._place.device)
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return float(longest)

    def _step(self, keeper: Keeper, *, last: bool) -> float:
        measured = self.measured
        batches = self.batches(measured.trained)
        self._place.synchronize()
        started = time.perf_counter()
        losses, norm = self._trainer.step(batches)
        self._place.synchronize()
        elapsed = (time.perf_counter() - started) * 1000.0
        measured.trained += 1
        measured.step_ms.append(elapsed)
        measured.loss.append(_mean(losses))
        if norm is not None:
            measured.gradient_norm.append(float(norm))
        keeper.after_step(measured.trained, last=last)
        return elapsed

    def _tell(self, writer: ProgressWriter, warmup: int) -> None:
        measured = self.measured
        total = warmup + self._settings.steps
        writer.write(Progress(len(measured.step_ms), total, warmup, measured.loss[-1], measured.step_ms[-1]))


def _mean(losses: list[Tensor]) -> float:
    return sum(float(loss) for loss in losses) / len(losses)
