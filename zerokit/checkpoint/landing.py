"""Pinned memory in which bytes of files arrive on their way to a device: one piece is filled while one is copied."""

from __future__ import annotations

from torch import Tensor

from zerokit.checkpoint.requests import VECTOR_BYTES
from zerokit.runtime.homes.copies import CopyStream, Issued
from zerokit.runtime.pinning import pages, pin


class Landing:
    """Lends memory that is filled and then sent to the device by `stream`."""

    def __init__(self, stream: CopyStream) -> None:
        self.stream, self._size = stream, VECTOR_BYTES
        self._pieces = [pin(pages(VECTOR_BYTES), "loads") for _ in range(2)]
        self._lending, self._lent = 0, 0
        """Which piece is lent from, and how many of its bytes are."""
        self._sent: list[Issued | None] = [None, None]
        """The last copy from each piece."""

    def lend(self, size: int) -> Tensor | None:
        """So many bytes, to be filled and given to `send`; None if there are not so many in a piece.

        What is lent before something is sent fits into a piece altogether.
        """
        if size > self._size:
            return None
        if self._lent + size > self._size:
            self._lending, self._lent = 1 - self._lending, 0
            if (sent := self._sent[self._lending]) is not None:
                sent.arrive()
        start, self._lent = self._lent, self._lent + size
        return self._pieces[self._lending][start : start + size]

    def send(self, lent: Tensor, into: Tensor) -> None:
        """Copy lent memory to bytes on the device, where this thread's later work finds them."""
        copying = self.stream.copy([(into, lent)], [self.stream.mark()])
        copying.wait()
        first = self._pieces[0]
        of_first = first.data_ptr() <= lent.data_ptr() < first.data_ptr() + first.nbytes
        self._sent[0 if of_first else 1] = copying
