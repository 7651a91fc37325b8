"""Memory of a unit: the whole unit while it is needed, and one rank's shard always (stage 3); the heap around it.

[Note: one storage for life] Autograd saves views of weights, which re-pointing a parameter to another storage would
leave behind. So a unit keeps one storage, and only the memory behind it comes and goes: on CUDA the storage is
resized; on Linux hosts its pages go, all but those of the shard, which so needs no copy. They go to the next unit or
back to the system, and one small piece of memory replaces them, mapped over and over, whose bytes are all ones: nan in
every floating-point dtype. A view that the user kept reads nan there; returned pages alone would read as zeros, and an
emptied storage would end the process. On CUDA that is what happens: a kept view of a freed unit is a null pointer, and
the kernel that reads it fails with an illegal memory access, after which the process cannot use the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from zerokit.layout import Interval, Unit
from zerokit.runtime.shards import Shards

_MAP_FIXED = 0x10  # Linux's mman.h, on every processor that it serves
_HUGE_PAGE = 2 << 20
_NAN_BYTES = _HUGE_PAGE  # the size of the piece that stands for all freed memory
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
_FAILED = ctypes.c_size_t(-1).value  # what mmap and mremap return then
_IDLE_BYTES = 8 << 20
"""The most that is kept of freed pages: two units of stretches that are too short for huge pages."""


class UnitMemory:
    """A unit's elements, `whole`, and those that this rank keeps. At stages 0 to 2 both are permanent."""

    reads_nan = False
    """Whether freed elements read as nan, so that parameters may stay views of them."""

    def __init__(self, whole: Shards, kept: Interval) -> None:
        self.whole, self.kept = whole, Shards(whole.unit, whole.at(kept), kept)

    def grow(self) -> None:
        """Make room for the whole unit, with any contents outside what is kept."""

    def shrink(self) -> None:
        """Free everything except what is kept."""

    def store(self) -> None:
        """Copy what is kept from the written unit."""


class ResizedMemory(UnitMemory):
    """Memory on any device: the storage is resized, and what is kept has its own memory."""

    def __init__(self, whole: Shards, kept: Interval) -> None:
        super().__init__(whole, kept)
        self.kept = self.kept.like(torch.zeros_like(self.kept.tensor))
        self._storage = whole.tensor.untyped_storage()
        self._bytes = self._storage.nbytes()

    def grow(self) -> None:
        if self._storage.nbytes() < self._bytes:  # else it would be allocated anew and copied
            self._storage.resize_(self._bytes)

    def shrink(self) -> None:
        self._storage.resize_(0)

    def store(self) -> None:
        self.kept.copy(self.whole)


class MappedMemory(UnitMemory):
    """A private mapping whose pages outside what is kept are returned to the system. Linux only.

    Stretches of huge pages (512 times fewer faults, where the system allows them) are mapped anew whenever the unit
    comes and goes. Shorter ones are private views of the file of nan for life; the pages written there become nan again
    and wait for the next use of this unit or of another one (`IdlePages`).
    """

    reads_nan = True

    def __init__(self, unit: Unit, kept: Interval, dtype: torch.dtype) -> None:
        size = unit.numel * dtype.itemsize
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._advise_huge(0, size)
        super().__init__(Shards(unit, torch.frombuffer(self._map, dtype=dtype)), kept)
        first, last = kept.start * dtype.itemsize, kept.stop * dtype.itemsize
        start = first // mmap.PAGESIZE * mmap.PAGESIZE
        stop, end = (-(-byte // mmap.PAGESIZE) * mmap.PAGESIZE for byte in (last, size))
        others = [(a, b - a) for a, b in ((0, start), (stop, end)) if b > a]
        # What lies beside the kept elements in their pages, which stay.
        beside = (start, first), (last, min(stop, size))
        self._beside = [(a, b - a) for a, b in beside if b > a]
        self._huge = [(at, length) for at, length in others if length >= _HUGE_PAGE]
        self._short = [(at, length) for at, length in others if length < _HUGE_PAGE]
        self._address = self.whole.tensor.data_ptr()
        self._grown = True
        for at, length in self._short:
            _map_at(self._address + at, length, _nan_file())
            weakref.finalize(self._map, _idle_pages.forget, self._address + at, length)
        self.whole.tensor.zero_()

    def grow(self) -> None:
        if not self._grown:
            self._grown = True
            for at, length in self._short:
                _idle_pages.take(self._address + at, length)
            for at, length in self._huge:
                _map_at(self._address + at, length, -1)
                self._advise_huge(at, length)

    def shrink(self) -> None:
        if self._grown:
            self._grown = False
            for at, length in self._beside:
                ctypes.memset(self._address + at, 0xFF, length)
            for at, length in self._short:
                _idle_pages.give(self._address + at, length)
            for at, length in self._huge:
                # Before something else is mapped over huge pages, which would divide them first.
                self._map.madvise(mmap.MADV_DONTNEED, at, length)
                for offset in range(at, at + length, _NAN_BYTES):
                    _map_at(self._address + offset, min(_NAN_BYTES, at + length - offset), _nan_file())

    def _advise_huge(self, at: int, length: int) -> None:
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_HUGEPAGE, at, length)


class IdlePages:
    """A few MiB of pages that freed stretches keep, full of nan, until they or others of their length need some.

    A stretch that comes back before that finds its own, and the system is not asked. New pages take thrice as long.
    """

    def __init__(self) -> None:
        self._stretches: defaultdict[int, dict[int, None]] = defaultdict(dict)
        """The addresses of free stretches that have pages, by their length; those freed first come first."""
        self._bytes = 0
        self._lock = threading.Lock()

    def give(self, address: int, length: int) -> None:
        """Leave the pages of a view of the file of nan where they are."""
        ctypes.memset(address, 0xFF, length)
        with self._lock:
            self._stretches[length][address] = None
            self._bytes += length
            while self._bytes > _IDLE_BYTES:
                others = (each for each, free in self._stretches.items() if free and each != length)
                dropped = next(others, length)
                oldest = next(iter(self._stretches[dropped]))
                self._remove(oldest, dropped)
                _function("madvise")(oldest, dropped, mmap.MADV_DONTNEED)

    def take(self, address: int, length: int) -> None:
        """Move pages there, if there are as many anywhere, full of nan as those that the file gives."""
        with self._lock:
            free = self._stretches[length]
            if not free:
                return
            source = address if address in free else next(iter(free))
            self._remove(source, length)
        if source == address:
            return
        how = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        if _function("mremap")(source, length, length, how, address) != address:
            # Linux before 5.13 cannot; what was there may be unmapped by now.
            _map_at(address, length, _nan_file())
            _function("madvise")(source, length, mmap.MADV_DONTNEED)

    def forget(self, address: int, length: int) -> None:
        """Never take pages from there again: the memory is about to be unmapped."""
        with self._lock:
            if address in self._stretches[length]:
                self._remove(address, length)

    def _remove(self, address: int, length: int) -> None:
        del self._stretches[length][address]
        self._bytes -= length


_idle_pages = IdlePages()


@functools.cache
def _nan_file() -> int:
    """A file in memory that reads as nan in every floating-point dtype, open for the life of the process."""
    descriptor = os.memfd_create("zerokit-nan", os.MFD_CLOEXEC)
    os.write(descriptor, b"\xff" * _NAN_BYTES)
    return descriptor


def _map_at(address: int, length: int, descriptor: int) -> None:
    """Put fresh memory (descriptor -1), or a private view of a file, where other memory of this process was."""
    flags = mmap.MAP_PRIVATE | _MAP_FIXED | (mmap.MAP_ANONYMOUS if descriptor < 0 else 0)
    mapped_at = _function("mmap")(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    if mapped_at != address:
        raise MemoryError(f"the system refuses to map {length} bytes: {os.strerror(ctypes.get_errno())}")


_ARGUMENTS = {
    "mmap": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long],
    "mremap": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p],
    "madvise": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int],
    "malloc_trim": [ctypes.c_size_t],
    "sbrk": [ctypes.c_long],
    "mallopt": [ctypes.c_int, ctypes.c_int],
}


@functools.cache
def _function(name: str) -> Callable[..., int]:
    """A function of the C library; one that does nothing where another library than glibc has none."""
    function: Any = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        return lambda *arguments: 0
    function.restype, function.argtypes = ctypes.c_size_t, _ARGUMENTS[name]
    return cast(Callable[..., int], function)


def unit_memory(
    unit: Unit, kept: Interval, dtype: torch.dtype, device: torch.device, *, comes_and_goes: bool
) -> UnitMemory:
    """Zeroed memory for a unit, whole for now."""
    if comes_and_goes and unit.numel and device.type == "cpu" and sys.platform == "linux":
        return MappedMemory(unit, kept, dtype)
    kind = ResizedMemory if comes_and_goes and unit.numel else UnitMemory
    return kind(Shards(unit, torch.zeros(unit.numel, dtype=dtype, device=device)), kept)


_M_TRIM_THRESHOLD = -1  # glibc's malloc.h, mallopt(3)
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
            _function("malloc_trim")(0)
            _advise_huge_pages()

    def note_forward(self) -> None:
        """Trim the heap after a forward pass, because backward starts with the largest tensors."""
        self._passes += 1
        if not self._settles or self._passes <= _SETTLING_PASSES:
            self.return_freed_memory()
        if self._settles and self._passes == _SETTLING_PASSES and self._serves:
            keep_freed_memory()


def _advise_huge_pages() -> None:
    """Let the heap grow again in huge pages: after a trim, single ones took a fifth of a small model's step.

    Of 757 ms of processor time a step of 34 million parameters at stage 3, 615 were left, for 1 % more memory
    (2026-11-27).
    """
    start, end = _heap_start(), _function("sbrk")(0)
    if start and start < end != _FAILED:
        _function("madvise")(start, (end - start) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)


@functools.cache
def _heap_start() -> int:
    """The address at which the C library's heap begins; 0 where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith("[heap]"):
                return int(line.split("-")[0], 16)
    return 0


def keep_freed_memory() -> None:
    """Make glibc keep the free top of its heap, unless the environment sets a limit, once it has seen some steps.

    By itself it keeps 64 MiB at most, and every step would fault the rest in again. This also ends glibc's search for
    the size from which tensors get pages of their own.
    """
    tuned = "MALLOC_TRIM_THRESHOLD_" in os.environ or "trim_threshold" in os.environ.get("GLIBC_TUNABLES", "")
    if not tuned:
        _function("mallopt")(_M_TRIM_THRESHOLD, -1)
