"""Memory that holds a whole unit only while it is needed, and one rank's shard of it always (stage 3).

[Note: one storage for life] Autograd saves views of weights (a transposed weight, for example). Re-pointing a
parameter to another storage would leave those behind, so a unit keeps one storage, and only the memory behind it
comes and goes: on CUDA the storage is resized; on Linux hosts its pages are handed back to the system, all but those
of the shard, which so needs neither a second place nor a copy at every gather. In their place stands one small piece
of memory, over and over, whose bytes are all ones: nan in every floating-point dtype. A view that somebody kept reads
nan there, where returned pages alone would read as zeros, and an emptied storage would end the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
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
_MAP_FIXED = 0x10
"""Linux's mman.h, on every processor that it serves."""
_HUGE_PAGE = 2 << 20
_NAN_BYTES = _HUGE_PAGE
"""Of the piece that stands for all freed memory."""


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
    """Linux hosts: a private mapping whose pages outside the shard are returned to the system.

    Stretches of huge pages (512 times fewer faults, where the system allows them) are mapped anew whenever the unit
    comes and goes. Shorter ones are private views of the file of nan for life: what was written there goes with its
    pages, and costs one call.
    """

    def __init__(self, numel: int, own: Interval, dtype: torch.dtype) -> None:
        size = numel * dtype.itemsize
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._advise_huge(0, size)
        self.whole = torch.frombuffer(self._map, dtype=dtype)
        self.shard = self.whole[own.start : own.stop]
        start = own.start * dtype.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
        stop = -(-own.stop * dtype.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
        end = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        others = [(a, b - a) for a, b in ((0, start), (stop, end)) if b > a]
        self._huge = [(at, length) for at, length in others if length >= _HUGE_PAGE]
        self._short = [(at, length) for at, length in others if length < _HUGE_PAGE]
        self._address = self.whole.data_ptr()
        self._grown = True
        for at, length in self._short:
            _map_at(self._address + at, length, _nan_file())
        self.whole.zero_()

    def grow(self) -> None:
        if not self._grown:
            self._grown = True
            for at, length in self._huge:
                _map_at(self._address + at, length, -1)
                self._advise_huge(at, length)

    def shrink(self) -> None:
        if self._grown:
            self._grown = False
            for at, length in (*self._short, *self._huge):
                # Huge pages too: to map something else over them would divide them first.
                self._map.madvise(mmap.MADV_DONTNEED, at, length)
            for at, length in self._huge:
                for offset in range(at, at + length, _NAN_BYTES):
                    _map_at(self._address + offset, min(_NAN_BYTES, at + length - offset), _nan_file())

    def store(self) -> None:
        pass

    def _advise_huge(self, at: int, length: int) -> None:
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE, at, length)


@functools.cache
def _nan_file() -> int:
    """A file in memory that reads as nan in every floating-point dtype, open for the life of the process."""
    descriptor = os.memfd_create("zerokit-nan", os.MFD_CLOEXEC)
    os.write(descriptor, b"\xff" * _NAN_BYTES)
    return descriptor


def _map_at(address: int, length: int, descriptor: int) -> None:
    """Put fresh memory (descriptor -1), or a private view of a file, where other memory of this process was."""
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | (mmap.MAP_ANONYMOUS if descriptor < 0 else 0)
    found = _mmap()(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if found != address:
        raise MemoryError(f"the system refuses to map {length} bytes: {os.strerror(ctypes.get_errno())}")


@functools.cache
def _mmap() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_size_t
    number = ctypes.c_int
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    return function


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
