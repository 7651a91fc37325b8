"""The samples of a step dealt to ranks by their pace, in micro-batches of different sizes.

A step has the samples that it has without `--pace`: the next ones of the job, from its position on. Here they are slots
of one step, and `zerokit.Batches` deals the slots.

    position    +1        +2        +3        +4        +5        +6        +7        position + samples_per_step
    | rank 1    | rank 0  | rank 0  | rank 0  | rank 1  | rank 0  | rank 0  | rank 0  | the next step …
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from zerokit.bench.engines.trainer import Batch
from zerokit.bench.record.by_rank import PACE_EVERY
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import Loaded
from zerokit.runtime import ZeroOptimizer
from zerokit.training.batches import Batches
from zerokit.training.pace import Pace


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch on the device, the slots of the step that its samples come from, and what its loss is a mean of."""

    batch: Batch
    slots: Sequence[int]
    count: float


class Dealer:
    """Deals this rank's micro-batches, step after step from sample `position` of the job on.

    All ranks make the same calls. Each has `accumulate` micro-batches a step.
    """

    def __init__(
        self,
        loaded: Loaded,
        settings: Settings,
        device: torch.device,
        optimizer: ZeroOptimizer,
        position: int,
    ) -> None:
        self._loaded, self._device, self._begin = loaded, device, position
        self._samples, self._accumulate = settings.samples_per_step, settings.accumulate
        self.pace = Pace(optimizer, every=PACE_EVERY)
        slots = Batches(
            np.ones(self._samples),
            samples=self._samples,
            micro_batches=self._accumulate,
            seed=settings.seed,
            pace=self.pace,
        )
        self._dealt = iter(slots)
        self._made = 0
        """Micro-batches, over all steps."""
        self._ready: deque[MicroBatch] = deque()
        self._steps = slots.steps(self._micro_batches())
        self._last: list[MicroBatch] = []

    def next(self) -> list[MicroBatch]:
        """The micro-batches of the next step, which begins now."""
        self._last = list(next(self._steps))
        self.pace.begin()  # once more: making them is no part of the step
        return self._last

    def prepare(self, steps: int, most_bytes: int) -> int:
        """Make the batches of so many steps beforehand, as many as `most_bytes` hold; returns their bytes."""
        of_a_step = max(1, sum(map(_size_bytes, self._last)))
        for _ in range(min(steps, most_bytes // of_a_step) * self._accumulate):
            self._ready.append(self._make())
        return sum(map(_size_bytes, self._ready))

    def alike(self, step: int) -> list[Batch]:
        """The micro-batches of a step, counted from the start of the data, dealt as in the last one."""
        return [self._take(step * self._samples, one.slots) for one in self._last]

    @property
    def samples(self) -> int:
        """How many samples this rank had in the last step."""
        return sum(len(one.slots) for one in self._last)

    def _micro_batches(self) -> Iterator[MicroBatch]:
        while True:
            yield self._ready.popleft() if self._ready else self._make()

    def _make(self) -> MicroBatch:
        slots, step = next(self._dealt), self._made // self._accumulate
        self._made += 1
        batch = self._take(self._begin + step * self._samples, slots)
        return MicroBatch(batch, slots, float(self._loaded.count(batch)))

    def _take(self, position: int, slots: Sequence[int]) -> Batch:
        batch = self._loaded.take([position + slot for slot in slots])
        return tuple(part.to(self._device) for part in batch)


def _size_bytes(one: MicroBatch) -> int:
    return sum(part.nbytes for part in one.batch)
