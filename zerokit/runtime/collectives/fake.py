"""One rank of any mesh in one process: nothing moves, which serves predictions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerokit.runtime.collectives.base import Collectives, Done, Route, Work


class FakeRoute(Route):
    """Results are whatever the memory holds."""

    def all_gather(self, whole: Tensor, unit: int, own: Tensor | None, after: Work | None) -> Work:
        if own is not None and not self.in_place(own, whole):
            whole.view(self.size, -1)[self.rank].copy_(own)
        return Done()

    def reduce_scatter(
        self, bucket: Tensor, out: Tensor, unit: int, *, add: bool, wire: torch.dtype, after: Work | None
    ) -> Work:
        own = bucket.view(self.size, -1)[self.rank]
        if add:
            out.add_(own)
        elif out.data_ptr() != own.data_ptr():
            out.copy_(own)
        return Done()


class FakeCollectives(Collectives):
    """Other ranks agree with this one."""

    def agree(self, what: str) -> None:
        pass

    def all_gather_objects(self, value: object) -> list[object]:
        return [value] * self.world

    def broadcast_list(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)
