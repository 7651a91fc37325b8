"""Memory on the host for a copy of a rank's state, which background saves write from."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate, groupby
from operator import itemgetter

import torch
from torch import Tensor

from zerokit.runtime.homes.copies import CopyStream, Issued, using
from zerokit.runtime.pinning import pages, pin

_ALIGNMENT = 64
"""Bytes: of copies, as wide as a vector."""
_PIECE = 256 << 20
"""Bytes that are made ready for a device together: copies into them begin while others follow."""
_THREADS = 4


class HostCopy:
    """Memory for so many bytes, used again and again.

    For a device it is made ready piece by piece, in threads: the system has to find and clear its pages, and CUDA to
    register them, which takes longer than copies into them.
    """

    def __init__(self, nbytes: int, stream: CopyStream | None = None) -> None:
        """`stream` copies from the device, if the state is on one."""
        self._stream = stream
        self._ready: list[Future[Tensor]] = []
        """The pieces that CUDA has registered, as long as they live."""
        if stream is None:
            # Written to at once: pages that are not there yet would make copies into them slow.
            self.memory = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
            return
        self.memory = pages(nbytes)
        threads = ThreadPoolExecutor(_THREADS, "zerokit-pin", *using(stream.device))
        self._ready = [threads.submit(_make_ready, piece) for piece in self.memory.split(_PIECE)]
        threads.shutdown(wait=False)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @staticmethod
    def size_of(tensors: Sequence[Tensor]) -> int:
        """Bytes for copies of these tensors."""
        return sum(map(_aligned, tensors))

    def fill(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Copies of tensors; of those on `meta` memory alone. The host waits until a device has made them."""
        starts = [0, *accumulate(map(_aligned, tensors))][:-1]
        places = [self.memory[at:][: one.nbytes] for at, one in zip(starts, tensors, strict=True)]
        copies = [place.view(one.dtype).view(one.shape) for place, one in zip(places, tensors, strict=True)]
        if self._stream is None:
            for copy, one in zip(copies, tensors, strict=True):
                if not one.is_meta:
                    copy.copy_(one.detach())
            return copies
        issued: list[Issued] = []
        try:
            for number, parts in groupby(self._parts(starts, tensors), itemgetter(0)):
                self._ready[number].result()
                pairs = [(into, source) for _, into, source in parts]
                issued.append(self._stream.copy(pairs, [self._stream.mark()]))
            for ready in self._ready:  # those of tensors on `meta`, too, which others write to
                ready.result()
        finally:
            self._stream.arrive()
        return copies

    def _parts(
        self, starts: Sequence[int], tensors: Sequence[Tensor]
    ) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The number of a piece, bytes of it, and what is to be copied there: CUDA copies into one at a time."""
        for start, tensor in zip(starts, tensors, strict=True):
            if tensor.is_meta:
                continue
            source = tensor.detach().reshape(-1).view(torch.uint8)
            at = 0
            while at < source.nbytes:
                number, within = divmod(start + at, _PIECE)
                size = min(source.nbytes - at, _PIECE - within)
                yield number, self.memory[start + at :][:size], source[at : at + size]
                at += size


def _make_ready(piece: Tensor) -> Tensor:
    piece[:: mmap.PAGESIZE].zero_()  # the system gives pages when they are written to
    return pin(piece, "background saves")


def _aligned(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
