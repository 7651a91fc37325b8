"""Memory that the ranks of a node share: each rank copies what it offers into its window, where the others see it.

It needs no rights over other processes. A window is a file without a name (memfd), which its rank passed to the
others and all have mapped; it vanishes with the last of them. Pages exist only for what is offered: those that were
taken are used again for offers of the same size, and go back to the system when nothing more is on its way.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

_GROWTH_BYTES = 64 << 20
"""A window's file grows by multiples of this: holes cost nothing, and others map it anew each time."""
_KEPT_BYTES = 64 << 20
"""Pages kept for the next offers, at most: fresh ones must be cleared by the system first."""


class Windows:
    """Access through windows; `descriptors` are the files by rank, closed with this object."""

    route = "shared memory"

    def __init__(self, rank: int, descriptors: Mapping[int, int]) -> None:
        self._windows = {peer: _Window(descriptor) for peer, descriptor in descriptors.items()}
        self._own = self._windows[rank]
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        """Offsets that no rank reads, by size. Only those in `_kept` may hold pages."""
        self._kept: dict[int, int] = {}
        self._kept_bytes = 0

    def lend(self, pieces: Tensor, rows: Sequence[int]) -> int:
        size = _pages(pieces.numel() * pieces.element_size())
        if self._free[size]:
            offset = self._free[size].pop()
            self._kept_bytes -= self._kept.pop(offset, 0)
        else:
            offset, self._end = self._end, self._end + size
            self._own.grow(self._end)
        target = self._own.tensor(offset, pieces.dtype, pieces.numel()).view_as(pieces)
        for row in rows:
            target[row].copy_(pieces[row])
        return offset

    def take_back(self, number: int, size_bytes: int) -> None:
        size = _pages(size_bytes)
        self._free[size].append(number)
        if self._kept_bytes + size <= _KEPT_BYTES:
            self._kept[number] = size
            self._kept_bytes += size
        else:
            self._own.empty(number, size)

    def read(self, peer: int, number: int, into: Tensor) -> None:
        into.copy_(self.look_at(peer, number, into))

    def look_at(self, peer: int, number: int, scratch: Tensor) -> Tensor:
        return self._windows[peer].tensor(number, scratch.dtype, scratch.numel())

    def trim(self) -> None:
        for offset, size in self._kept.items():
            self._own.empty(offset, size)
        self._kept.clear()
        self._kept_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What this rank's window takes of the machine's memory."""
        return self._own.held_bytes


class _Window:
    """One file, mapped as far as it is needed."""

    def __init__(self, descriptor: int) -> None:
        weakref.finalize(self, os.close, descriptor)
        self._descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._mapped = 0

    def grow(self, size: int) -> None:
        """Let the file have at least `size` bytes."""
        if size > os.fstat(self._descriptor).st_size:
            os.truncate(self._descriptor, -(-size // _GROWTH_BYTES) * _GROWTH_BYTES)

    def tensor(self, offset: int, dtype: torch.dtype, numel: int) -> Tensor:
        """The memory at `offset`, without a copy."""
        if self._map is None or offset + numel * dtype.itemsize > self._mapped:
            self._mapped = os.fstat(self._descriptor).st_size
            self._map = mmap.mmap(self._descriptor, self._mapped)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=offset)

    def empty(self, offset: int, size: int) -> None:
        """Give pages back to the system; where it does not take them they are merely kept."""
        assert self._map is not None
        with contextlib.suppress(OSError):
            self._map.madvise(mmap.MADV_REMOVE, offset, size)

    @property
    def held_bytes(self) -> int:
        return os.fstat(self._descriptor).st_blocks * 512


def new_window() -> int:
    """The file of an empty window; raises `OSError`."""
    return os.memfd_create("zerokit-window", os.MFD_CLOEXEC)


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
