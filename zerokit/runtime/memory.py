"""Memory that holds a whole unit only while it is needed, and one rank's shard of it always (stage 3).

[Note: one storage for life] Autograd saves views of weights (a transposed weight, for example). Re-pointing a
parameter to another storage would leave those behind, so a unit keeps one storage, and only the memory behind it
comes and goes: on CUDA the storage is resized; on Linux hosts its pages are handed back to the system, all but those
of the shard, which so needs neither memory of its own nor a copy at every gather (`linux`). Autograd notices changes
in place by version counters, which are set here.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zerokit.layout import Interval


class UnitMemory(Protocol):
    """A unit's elements, `whole`, and this rank's, `shard`."""

    whole: Tensor
    shard: Tensor

    def grow(self) -> None:
        """Make room for the whole unit, with any contents outside the shard."""

    def shrink(self) -> None:
        """Give back everything but the shard."""

    def store(self) -> None:
        """Take this rank's piece of the whole unit, which has been written, as the shard."""


def unit_memory(
    numel: int, own: Interval, dtype: torch.dtype, device: torch.device, *, comes_and_goes: bool
) -> UnitMemory:
    """Zeroed memory for a unit of `numel` elements, whole for now."""
    if not comes_and_goes or not numel:
        return PermanentMemory(torch.zeros(numel, dtype=dtype, device=device), own)
    if device.type == "cpu" and sys.platform == "linux":
        from zerokit.runtime.linux import MappedMemory  # needs what only Linux has

        return MappedMemory(numel, own, dtype)
    return ResizedMemory(torch.zeros(numel, dtype=dtype, device=device), own)


class PermanentMemory:
    """Stages 0 to 2: nothing comes or goes."""

    def __init__(self, whole: Tensor, own: Interval) -> None:
        self.whole = whole
        self.shard = whole[own.start : own.stop]

    def grow(self) -> None:
        pass

    def shrink(self) -> None:
        pass

    def store(self) -> None:
        pass


class ResizedMemory:
    """Any device: the storage is resized, and the shard has memory of its own."""

    def __init__(self, whole: Tensor, own: Interval) -> None:
        self.whole = whole
        self.shard = torch.zeros_like(whole[own.start : own.stop])
        self._own = own
        self._bytes = whole.untyped_storage().nbytes()

    def grow(self) -> None:
        if self.whole.untyped_storage().nbytes() < self._bytes:  # else it would be allocated anew and copied
            self.whole.untyped_storage().resize_(self._bytes)

    def shrink(self) -> None:
        self.whole.untyped_storage().resize_(0)

    def store(self) -> None:
        self.shard.copy_(self.whole[self._own.start : self._own.stop])


_set_version: Any = torch._C._autograd._unsafe_set_version_counter


def _sets_several() -> bool:
    try:
        _set_version((), ())
    except TypeError:  # torch 2.6 takes one tensor and one number
        return False
    return True


_SETS_SEVERAL = _sets_several()


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Set the counter of each tensor; as many versions as tensors."""
    if _SETS_SEVERAL:
        _set_version(tuple(tensors), tuple(versions))
    else:
        for tensor, version in zip(tensors, versions, strict=True):
            _set_version(tensor, version)
