"""Memory on Linux hosts: pages that come and go, and the return of freed heap pages to the system."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Callable

import torch

from zerokit.layout import Interval
from zerokit.runtime.memory import UnitMemory


class MappedMemory(UnitMemory):
    """A private mapping whose pages outside the shard are returned to the system, and read as zeros then. Linux only.

    Huge pages, where the system allows them, mean 512 times fewer faults whenever the unit comes.
    """

    def __init__(self, numel: int, own: Interval, dtype: torch.dtype) -> None:
        size = numel * dtype.itemsize
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE)
        super().__init__(torch.frombuffer(self._map, dtype=dtype), own)
        start = own.start * dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-own.stop * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        self._others = [(at, end - at) for at, end in ((0, start), (stop, size)) if end > at]

    def shrink(self) -> None:
        for at, length in self._others:
            self._map.madvise(mmap.MADV_DONTNEED, at, length)


_M_TRIM_THRESHOLD = -1
"""glibc's malloc.h, mallopt(3)."""
_SETTLING_PASSES = 3
"""The heap settles in the first passes; where parameters stay whole, later ones would only pay for fresh pages."""


class Heap:
    """The heap that a model's tensors lie in, if `device` is a host.

    It `settles` where the same tensors come and go in every pass, which they do not where units are gathered and freed.
    """

    def __init__(self, device: torch.device, *, settles: bool) -> None:
        self._serves = device.type == "cpu" and sys.platform == "linux"
        self._settles = settles
        self._passes = 0

    def return_freed_memory(self) -> None:
        """Return pages of freed memory to the system, which the heap would keep."""
        if self._serves:
            _call("malloc_trim", 0)

    def note_forward(self) -> None:
        """Trim the heap after a forward pass, because backward starts with the largest tensors."""
        self._passes += 1
        if not self._settles or self._passes <= _SETTLING_PASSES:
            self.return_freed_memory()
        if self._settles and self._passes == _SETTLING_PASSES and self._serves:
            keep_freed_memory()


def keep_freed_memory() -> None:
    """Make glibc keep the free top of its heap, unless the environment sets a limit, once it has seen some steps.

    By itself it keeps 64 MiB at most, and every step would fault the rest in again. This also ends glibc's search for
    the size from which tensors get pages of their own.
    """
    tuned = "MALLOC_TRIM_THRESHOLD_" in os.environ or "trim_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if not tuned:
        _call("mallopt", _M_TRIM_THRESHOLD, -1)


def _call(name: str, *arguments: int) -> None:
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), name, None)
    if function is not None:  # another C library than glibc
        function(*arguments)
