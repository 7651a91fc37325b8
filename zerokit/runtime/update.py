"""One step of the torch optimizer over the flat tensors, and what it changed where ranks keep parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerokit.runtime.flats import divide_flats, level_momentum
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.storage import FlatUnit


class FlatUpdate:
    """Runs `inner` over all flats with the gradients that were reduced into the shards."""

    def __init__(self, storages: Sequence[FlatUnit], gradients: Gradients, inner: Optimizer) -> None:
        self._storages = [storage for storage in storages if storage.unit.trainable]
        self._gradients, self._inner = gradients, inner
        self._divided = False
        """Whether a flat has ever been divided: its parts may have begun at different steps."""

    def run(self) -> None:
        for storage in self._storages:
            self._show_gradients(storage)
        if self._divided:
            level_momentum(self._inner)
        self._inner.step()
        for storage in self._storages:
            for flat in storage.flats:
                flat.tensor.grad = None
            storage.guard_flats()
        write_back(self._storages)

    def _show_gradients(self, storage: FlatUnit) -> None:
        stopped = self._gradients.skipped(storage)
        if stopped:
            divide_flats(storage, self._inner, stopped.__contains__)
            self._divided = True
        storage.unguard_flats()
        for flat in storage.flats:
            if stopped and stopped.issuperset(storage.positions_in(flat)):
                continue  # as in torch, what has no gradient keeps its value and its states
            gradient = self._gradients.of(storage, flat)
            master = flat.tensor
            master.grad = gradient if gradient.dtype == master.dtype else gradient.to(master.dtype)


def write_back(storages: Sequence[FlatUnit]) -> None:
    """Copy updated masters into what this rank keeps of the parameters, by one operation; graphs made before end."""
    kept: list[Tensor] = []
    masters: list[Tensor] = []
    for storage in storages:
        if storage.separate:
            for flat in storage.flats:
                kept.append(storage.slice_of(flat.interval))
                masters.append(flat.tensor.detach())
    if kept:
        torch._foreach_copy_(kept, masters)
    for storage in storages:
        if storage.unit.trainable:
            storage.note_update()
