"""Memory of a unit: the whole unit while it is needed, and one rank's shard always (stage 3).

[Note: one storage for life] Autograd saves views of weights, which re-pointing a parameter to another storage would
leave behind. So a unit keeps one storage, and only the memory behind it comes and goes: on CUDA the storage is
resized; on Linux hosts its pages go, all but those of the shard, which so needs no copy (`linux`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerokit.layout import Interval


class UnitMemory:
    """A unit's elements, `whole`, and this rank's, `shard`. At stages 0 to 2 both are permanent."""

    def __init__(self, whole: Tensor, own: Interval) -> None:
        self.whole = whole
        self.shard = whole[own.start : own.stop]

    def grow(self) -> None:
        """Make room for the whole unit, with any contents outside the shard."""

    def shrink(self) -> None:
        """Free everything except the shard."""

    def store(self) -> None:
        """Copy this rank's piece of the written unit to the shard."""


class ResizedMemory(UnitMemory):
    """Memory on any device: the storage is resized, and the shard has its own memory."""

    def __init__(self, whole: Tensor, own: Interval) -> None:
        super().__init__(whole, own)
        self.shard = torch.zeros_like(self.shard)
        self._own, self._bytes = own, whole.untyped_storage().nbytes()

    def grow(self) -> None:
        if self.whole.untyped_storage().nbytes() < self._bytes:  # else it would be allocated anew and copied
            self.whole.untyped_storage().resize_(self._bytes)

    def shrink(self) -> None:
        self.whole.untyped_storage().resize_(0)

    def store(self) -> None:
        self.shard.copy_(self.whole[self._own.start : self._own.stop])


def unit_memory(
    numel: int, own: Interval, dtype: torch.dtype, device: torch.device, *, comes_and_goes: bool
) -> UnitMemory:
    """Zeroed memory for a unit of `numel` elements, whole for now."""
    if comes_and_goes and numel and device.type == "cpu" and sys.platform == "linux":
        from zerokit.runtime.linux import MappedMemory  # needs what only Linux has

        return MappedMemory(numel, own, dtype)
    kind = ResizedMemory if comes_and_goes and numel else UnitMemory
    return kind(torch.zeros(numel, dtype=dtype, device=device), own)


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Set the version counter of each tensor; as many versions as tensors."""
    set_version: Any = torch._C._autograd._unsafe_set_version_counter
    try:
        set_version(tuple(tensors), tuple(versions))
    except TypeError:  # torch 2.6 takes one tensor and one number
        for tensor, version in zip(tensors, versions, strict=True):
            set_version(tensor, version)
