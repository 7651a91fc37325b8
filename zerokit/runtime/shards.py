"""Elements of a unit in a tensor: the one place where an element's coordinate becomes a position in memory.

unit     0              64             128            192            256
tensor                  |-------------- interval ------------|              Interval(64, 192)
at                                     |-----|                              .at(Interval(128, 150))
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerokit.layout import Cut, Interval, Unit
from zerokit.runtime.torch_internals import share_memory


class Shards:
    """Elements `interval` of `unit`, by default all, in `tensor` [interval.numel]."""

    __slots__ = ("interval", "tensor", "unit")

    def __init__(self, unit: Unit, tensor: Tensor, interval: Interval | None = None) -> None:
        self.unit, self.tensor = unit, tensor
        self.interval = unit.cut.whole if interval is None else interval

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def payload_numel(self) -> int:
        """Elements of parameters, without padding."""
        return self.unit.payload_within(self.interval)

    def at(self, interval: Interval) -> Tensor:
        """The elements of `interval` (memory coordinates), as far as they are here. Shares the tensor's memory."""
        start = self.interval.start
        return self.tensor[max(interval.start - start, 0) : max(interval.stop - start, 0)]

    def like(self, tensor: Tensor) -> Shards:
        """The same elements in another tensor."""
        return Shards(self.unit, tensor, self.interval)

    def covers(self, interval: Interval) -> bool:
        """Whether all of an interval is here."""
        return self.interval.start <= interval.start and interval.stop <= self.interval.stop

    def pieces(self, cut: Cut) -> list[Tensor]:
        """The pieces of a cut, in order."""
        return [self.at(cut.piece(index)) for index in range(len(cut))]

    def rows(self, cut: Cut) -> Tensor:
        """The pieces of an equal cut, [pieces, elements of each]. Raises `ValueError` for a cut into others."""
        return self.at(cut.whole).view(len(cut), cut.piece_numel)

    def views(self) -> list[Tensor]:
        """The parameters of a whole unit, each in its shape."""
        return [self.at(whole.memory).view(whole.parameter.shape) for whole in self.unit.slices]

    def copy(self, other: Shards) -> None:
        """Take over what `other` has of these elements, in this tensor's dtype."""
        self.at(other.interval).copy_(other.at(self.interval))


def same_place(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of equal shapes and dtypes are views of the same elements."""
    return share_memory(one, other) and one.storage_offset() == other.storage_offset()
