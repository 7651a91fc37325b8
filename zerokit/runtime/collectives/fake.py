"""One rank of any world size in one process: nothing moves, which serves predictions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerokit.runtime.collectives.base import Collectives, Done, Work


class FakeCollectives(Collectives):
    """One rank of any world size in one process: results are whatever the memory holds."""

    def _all_gather(self, whole: Tensor, unit: int) -> Work:
        return Done()

    def _reduce_scatter(self, bucket: Tensor, out: Tensor, unit: int, add: bool, wire: torch.dtype) -> Work:
        own = bucket.view(self.world, -1)[self.rank]
        if add:
            out.add_(own)
        elif out.data_ptr() != own.data_ptr():
            out.copy_(own)
        return Done()

    def agree(self, what: str) -> None:
        pass

    def all_gather_objects(self, value: object) -> list[object]:
        return [value] * self.world

    def broadcast_list(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)
