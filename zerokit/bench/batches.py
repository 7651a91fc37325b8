"""One rank's batches on its device, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    import torch

    from zerokit.bench.engines.trainer import Batch
    from zerokit.bench.settings import Settings
    from zerokit.bench.workloads.build import Loaded

READY_BYTES = 512 * 2**20
"""Most that may lie ready on a device."""


class Batches:
    """Gives the micro-batches of a step; with `ahead`, those of the measured steps before the first of these begins.

    A device whose host runs ahead must find its batches there: one that is made or copied between two steps would be
    timed with them, and images take longer to make than to train on. Where those of all steps exceed `READY_BYTES`, a
    few are used in turn: step s has the batches of step s mod `cycle`. The cycle follows from the size of a batch
    alone, and so is the same for every engine and stage and for a resumed run. Copies on a stream of their own would
    only move the limit: they need every batch in pinned memory of the host.

    Args:
        loaded: makes batches.
        settings: of the bench.
        device: of this rank.
        ahead: whether the host runs ahead of the device; else every step's batches are made when they are asked for.
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
        self._cycle: int | None = None
        self.repeat_after: int | None = None
        """The cycle, once a batch has been used twice for it; None while every step has had its own."""

    def of(self, step: int) -> list[Batch]:
        """This rank's micro-batches of a step, on its device."""
        place = self._place(step)
        return self._ready[place] if place in self._ready else self._make(place)

    def prepare(self, first: int, count: int) -> int:
        """Lay the batches of `count` steps from `first` on ready, where that is wanted; the bytes that they take."""
        if self._ahead:
            places = dict.fromkeys(self._place(step) for step in range(first, first + count))
            self._ready = {place: self._make(place) for place in places}
        return sum(_size_bytes(batch) for batches in self._ready.values() for batch in batches)

    def drop(self) -> None:
        """Free what lies ready."""
        self._ready = {}

    def _place(self, step: int) -> int:
        """Of which step the batches are."""
        if not self._ahead:
            return step
        if self._cycle is None:
            of_a_step = _size_bytes(self._loaded.batch(0, dist.get_rank(), 0)) * self._settings.accumulate
            self._cycle = max(1, self._limit_bytes // max(1, of_a_step))
        if step >= self._cycle:
            self.repeat_after = self._cycle
        return step % self._cycle

    def _make(self, step: int) -> list[Batch]:
        rank = dist.get_rank()
        return [
            tuple(part.to(self._device) for part in self._loaded.batch(step, rank, micro_batch))
            for micro_batch in range(self._settings.accumulate)
        ]


def _size_bytes(batch: Batch) -> int:
    return sum(part.numel() * part.element_size() for part in batch)
