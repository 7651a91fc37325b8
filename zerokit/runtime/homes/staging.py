"""Two pieces of pinned memory through which a thread moves bytes to a GPU and back, for files.

While one piece is read or written, the other is copied. The host waits for the device itself.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
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
    """The pieces, and the `stream` that copies from and into them; one thread uses them for one purpose at a time."""

    def __init__(
        self, stream: CopyStream, piece_bytes: int = _PIECE, purpose: str = "states on a disk"
    ) -> None:
        self.stream, self._size = stream, piece_bytes
        self._pieces = [pin(pages(piece_bytes), purpose) for _ in range(2)]

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
        cut = list(self._cut(runs))
        batches = ([memory[at : at + size]] for _, at, size in cut)
        with closing(self.bring(batches, after)) as arriving:
            for (offset, _, _), (content,) in zip(cut, arriving, strict=True):
                file.write(content, offset)

    def bring(
        self, batches: Iterable[Sequence[Tensor]], after: Issued | None = None
    ) -> Generator[list[memoryview], None, None]:
        """Copy tensors of bytes on the device to the host: each batch is there until the next one is asked for.

        A batch fits into a piece. It is copied behind what is `after`, by default all that this thread has issued.
        """
        coming: list[tuple[Issued, Sequence[Tensor]]] = []

        def first() -> list[memoryview]:
            coming[0][0].arrive()
            _, arrived = coming.pop(0)
            return [content_of(one) for one in arrived]

        try:
            for number, batch in enumerate(batches):
                sizes = [one.nbytes for one in batch]
                into = self._pieces[number % 2][: sum(sizes)].split(sizes)
                pairs = list(zip(into, batch, strict=True))
                coming.append((self.stream.copy(pairs, [after or self.stream.mark()]), into))
                if len(coming) == 2:
                    yield first()
            if coming:
                yield first()
        finally:
            _end(issued for issued, _ in coming)

    def _cut(self, runs: Iterable[Run]) -> Iterator[Run]:
        for offset, at, size in runs:
            for done in range(0, size, self._size):
                yield offset + done, at + done, min(self._size, size - done)


def _end(copies: Iterable[Issued]) -> None:
    for one in copies:
        one.arrive()
