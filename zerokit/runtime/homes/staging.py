"""Two pieces of pinned memory through which the thread of a file moves bytes to a GPU and back.

The thread works on one request after the other, and waits for the device itself. While one piece is read or written,
the other is copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from torch import Tensor

from zerokit.runtime.homes.copies import CopyStream, Issued
from zerokit.runtime.pinning import content_of, pages, pin

_PIECE = 16 << 20

Run = tuple[int, int, int]
"""Byte of the file, byte of a buffer, and size."""


class ReadAndWritten(Protocol):
    """A file."""

    def read(self, memory: memoryview, offset: int) -> None: ...
    def write(self, memory: memoryview, offset: int) -> None: ...


class Staging:
    """The pieces, and the `stream` that copies from and into them. Between requests nothing is on its way."""

    def __init__(self, stream: CopyStream, piece_bytes: int = _PIECE) -> None:
        self.stream, self._size = stream, piece_bytes
        self._pieces = [pin(pages(piece_bytes), "states on a disk") for _ in range(2)]

    def read(self, file: ReadAndWritten, runs: Iterable[Run], memory: Tensor, after: Issued) -> None:
        """Bring bytes of a file to `memory` on the device, once what is `after` has ended there."""
        copies: list[Issued] = []
        try:
            for number, (offset, at, size) in enumerate(self._cut(runs)):
                if len(copies) == 2:
                    copies.pop(0).arrive()
                piece = self._pieces[number % 2][:size]
                file.read(content_of(piece), offset)
                copies.append(self.stream.copy([(memory[at : at + size], piece)], [after]))
        finally:
            _end(copies)

    def write(self, file: ReadAndWritten, runs: Iterable[Run], memory: Tensor, after: Issued) -> None:
        """Write bytes of `memory` to a file, once what is `after` has ended on the device."""
        copies: list[Issued] = []
        left: list[tuple[Tensor, int]] = []

        def write_first() -> None:
            copies[0].arrive()
            piece, offset = left.pop(0)
            file.write(content_of(piece), offset)
            del copies[0]

        try:
            for number, (offset, at, size) in enumerate(self._cut(runs)):
                piece = self._pieces[number % 2][:size]
                copies.append(self.stream.copy([(piece, memory[at : at + size])], [after]))
                left.append((piece, offset))
                if len(left) == 2:
                    write_first()
            if left:
                write_first()
        finally:
            _end(copies)

    def _cut(self, runs: Iterable[Run]) -> Iterator[Run]:
        for offset, at, size in runs:
            for done in range(0, size, self._size):
                yield offset + done, at + done, min(self._size, size - done)


def _end(copies: Iterable[Issued]) -> None:
    for one in copies:
        one.arrive()
