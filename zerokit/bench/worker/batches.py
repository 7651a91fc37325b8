"""One rank's batches on its device, by step.

The job's samples are numbered through, and a step takes the next ones, whatever the number of ranks:

    position          +b                +2b               +3b               position + samples_per_step
    | rank 0, micro 0 | rank 1, micro 0 | rank 0, micro 1 | rank 1, micro 1 | the next step …

So a run that goes on at another world size from a position, counted in samples, repeats none and leaves none out.
"""

from __future__ import annotations

from functools import cached_property

import torch
import torch.distributed as dist

from zerokit.bench.engines.trainer import Batch
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import Loaded

READY_BYTES = 512 * 2**20
"""Most that may lie ready on a device."""


class Batches:
    """Provides the micro-batches of a step; with `ahead`, those of all measured steps are made before the first.

    A device whose host runs ahead must find its batches there: one that is made or copied between two steps would be
    timed with them, and images take longer to make than to train on. Where those of all steps exceed `READY_BYTES`, a
    few are used in turn: the data begin anew after `cycle` steps. The cycle follows from the size of a batch alone, and
    so is the same for every engine and stage and for a resumed run. Copies on a stream of their own would only move the
    limit: they need every batch in pinned memory of the host. An elastic run has every sample once: its steps beyond
    the limit wait for their batches.

    Args:
        loaded: makes batches.
        settings: of the bench.
        device: of this rank.
        ahead: whether the host runs ahead of the device; else a step's batches are made when `of` is called.
        limit_bytes: `READY_BYTES`, but for tests.
    """

    def __init__(
        self,
        loaded: Loaded,
        settings: Settings,
        device: torch.device,
        *,
        ahead: bool,
        limit_bytes: int = READY_BYTES,
    ) -> None:
        self._loaded = loaded
        self._settings = settings
        self._device = device
        self._ahead = ahead
        self._limit_bytes = limit_bytes
        self._ready: dict[int, list[Batch]] = {}
        self.repeat_after: int | None = None
        """The cycle, once a batch has been used twice for it; None while every step has had its own."""

    def of(self, position: int) -> list[Batch]:
        """This rank's micro-batches, on its device, for the step that starts at sample `position` of the job."""
        first = self._first_sample(position)
        return self._ready[first] if first in self._ready else self._make(first)

    def prepare(self, position: int, count: int) -> int:
        """Prepare the batches of `count` steps from `position` if the host runs ahead; returns their bytes."""
        if self._ahead:
            if self._settings.elastic:
                count = min(count, self._cycle)
            starts = (position + step * self._settings.samples_per_step for step in range(count))
            self._ready = {
                first: self._make(first) for first in dict.fromkeys(map(self._first_sample, starts))
            }
        return sum(_size_bytes(batch) for batches in self._ready.values() for batch in batches)

    def drop(self) -> None:
        """Free the prepared batches."""
        self._ready = {}

    def _first_sample(self, position: int) -> int:
        """With which sample the batches of the step at `position` begin."""
        if not self._ahead or self._settings.elastic:
            return position
        samples = self._cycle * self._settings.samples_per_step
        if position >= samples:
            self.repeat_after = self._cycle
        return position % samples

    @cached_property
    def _cycle(self) -> int:
        """How many steps' batches may lie ready; at least one's."""
        of_a_step = _size_bytes(self._loaded.batch(0)) * self._settings.accumulate
        return max(1, self._limit_bytes // max(1, of_a_step))

    def _make(self, position: int) -> list[Batch]:
        rank, world = dist.get_rank(), dist.get_world_size()
        firsts = [
            position + (micro_batch * world + rank) * self._settings.batch_size
            for micro_batch in range(self._settings.accumulate)
        ]
        return [tuple(part.to(self._device) for part in self._loaded.batch(first)) for first in firsts]


def _size_bytes(batch: Batch) -> int:
    return sum(part.numel() * part.element_size() for part in batch)
