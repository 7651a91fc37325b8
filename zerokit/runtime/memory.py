"""Memory that holds a whole unit only while it is needed, and one rank's shard of it always (stage 3).

[Note: one storage for life] Autograd saves views of weights (a transposed weight, for example). Re-pointing a
parameter to another storage would leave those behind, so a unit keeps one storage, and only the memory behind it
comes and goes: on CUDA the storage is resized; on Linux hosts its pages are handed back to the system, all but those
of the shard, which so needs neither a second place nor a copy at every gather. Returned pages read as zeros, and a
view of an emptied storage segfaults on the CPU; hence parameters also point at an empty placeholder while their unit
is freed, so that a use out of turn ends in a shape error instead.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from zerokit.layout import Interval

_M_TRIM_THRESHOLD = -1
"""glibc's malloc.h, mallopt(3)."""


class UnitMemory(Protocol):
    """A unit's elements, `whole`, and this rank's, `shard`."""

    whole: Tensor
    shard: Tensor

    def grow(self) -> None:
        """Make room for the whole unit; this rank's piece of it holds the shard's values."""

    def shrink(self) -> None:
        """Give back everything but the shard."""

    def store(self) -> None:
        """Take this rank's piece of the whole unit, which has been written, as the shard."""


def unit_memory(
    numel: int, own: Interval, dtype: torch.dtype, device: torch.device, *, sharded: bool
) -> UnitMemory:
    """Zeroed memory for a unit of `numel` elements, whole for now."""
    if not sharded or not numel:
        return _Permanent(torch.zeros(numel, dtype=dtype, device=device), own)
    if device.type == "cpu" and sys.platform == "linux":
        return _Mapped(numel, own, dtype)
    return _Resized(torch.zeros(numel, dtype=dtype, device=device), own)


class _Permanent:
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


class _Resized:
    """Any device: the storage is resized, and the shard has a place of its own."""

    def __init__(self, whole: Tensor, own: Interval) -> None:
        self.whole = whole
        self.shard = torch.zeros_like(whole[own.start : own.stop])
        self._own = own
        self._bytes = whole.untyped_storage().nbytes()

    def grow(self) -> None:
        self.whole.untyped_storage().resize_(self._bytes)
        self.whole[self._own.start : self._own.stop].copy_(self.shard)

    def shrink(self) -> None:
        self.whole.untyped_storage().resize_(0)

    def store(self) -> None:
        self.shard.copy_(self.whole[self._own.start : self._own.stop])


class _Mapped:
    """Linux hosts: a private mapping whose pages outside the shard are returned to the system."""

    def __init__(self, numel: int, own: Interval, dtype: torch.dtype) -> None:
        size = numel * dtype.itemsize
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Each gather faults the returned pages in again: 512 times fewer faults, where the system allows it.
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        self.whole = torch.frombuffer(self._map, dtype=dtype)
        self.shard = self.whole[own.start : own.stop]
        start = own.start * dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-own.stop * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        self._others = [(0, start), (stop, size - stop)]

    def grow(self) -> None:
        pass

    def shrink(self) -> None:
        for start, length in self._others:
            if length > 0:
                self._map.madvise(mmap.MADV_DONTNEED, start, length)

    def store(self) -> None:
        pass


def return_freed_memory() -> None:
    """Ask glibc to hand pages of freed memory back to the system: its heap keeps them otherwise."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def keep_freed_memory() -> None:
    """Ask glibc to keep the free top of its heap from now on, unless the environment says what to keep.

    By itself glibc keeps 64 MiB at most, so that every step would hand the rest back and fault it in again: a backward
    pass that drops each gradient at once frees much more. This also ends glibc's search for the size from which
    tensors get pages of their own: to be called when it has seen some steps.
    """
    option = _glibc("mallopt")
    tuned = "MALLOC_TRIM_THRESHOLD_" in os.environ or "trim_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if option is not None and not tuned:
        option(_M_TRIM_THRESHOLD, -1)


def _glibc(name: str) -> Callable[..., int] | None:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
