"""Files travel from the rank that wrote them to ranks of other nodes, which write copies of them.

Each piece is sent and received at the same time, over the group that the save has for itself, so it never waits for a
collective of the step, nor that for it. Beside the training there is a pause after each piece, as long as the piece
took, so that the copies take at most half of what the link gives.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.disk import new_file, opened, read_exactly, write_exactly
from zerokit.checkpoint.nodes.members import Nodes
from zerokit.checkpoint.together import Together
from zerokit.errors import CheckpointError

PIECE_BYTES = 4 << 20
"""Sent in one message. A longer one would not be faster, and one in each direction is in memory."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A rank's files by name: their sizes in bytes and the CRC-32 of all of each, from the memory they were written
    from."""

    files: tuple[tuple[str, int, int], ...]


@dataclass
class _Received:
    """The files that a rank gets from another, written one after the other. An error is kept until all have come:
    the sender and the ranks behind it must not wait."""

    work: Path
    sent: Sent
    error: Exception | None = None
    _closing: ExitStack = field(default_factory=ExitStack)
    _crc: int = 0
    _fd: int = -1

    def take(self, piece: _Piece, content: memoryview) -> None:
        if self.error is not None:
            return
        try:
            self._take(piece, content)
        except Exception as error:
            self.error = error
            self._closing.pop_all()  # not synced: the directory is discarded

    def _take(self, piece: _Piece, content: memoryview) -> None:
        name, size, crc = self.sent.files[piece.file]
        if piece.offset == 0:
            self._fd, self._crc = self._closing.enter_context(new_file(self.work / name, size)), 0
        write_exactly(self._fd, [content], piece.offset, self.work / name)
        self._crc = crc32(content, self._crc)
        if piece.offset + piece.size == size:
            self._closing.pop_all().close()
            if self._crc != crc:
                raise CheckpointError(
                    f"{self.work / name}: what arrived has the CRC-32 {self._crc:08x}, and {crc:08x} was written: the "
                    "memory, the disk or the network of one of the two nodes is faulty"
                )


@dataclass(frozen=True, slots=True)
class _Piece:
    file: int
    offset: int
    size: int


def _pieces(sent: Sent) -> Iterator[_Piece]:
    for number, (_, size, _) in enumerate(sent.files):
        for offset in range(0, size, PIECE_BYTES):
            yield _Piece(number, offset, min(PIECE_BYTES, size - offset))


def send_copies(
    together: Together, nodes: Nodes, work: Path, sent: Sequence[Sent], *, paced: bool
) -> list[Exception]:
    """Write this node's copies of other nodes' files into `work`, which has this node's own. Collective.

    `sent`: every rank's files. Returns what this rank could not read or write, or has received otherwise than it was
    written: no rank leaves the others waiting for the rest.
    """
    errors: list[Exception] = []
    outgoing, incoming = (torch.empty(PIECE_BYTES, dtype=torch.uint8) for _ in range(2))
    for pairs in nodes.rounds():
        to = next((receiver for sender, receiver in pairs if sender == together.rank), None)
        source = next((sender for sender, receiver in pairs if receiver == together.rank), None)
        leaving = iter(()) if to is None else _pieces(sent[together.rank])
        coming = iter(()) if source is None else _pieces(sent[source])
        received = None if source is None else _Received(work, sent[source])
        with ExitStack() as reading:
            file, fd = -1, -1
            while True:
                began = time.monotonic()
                going, due = next(leaving, None), next(coming, None)
                if going is None and due is None:
                    break
                if going is not None and not errors:
                    name = sent[together.rank].files[going.file][0]
                    try:
                        if going.file != file:
                            reading.pop_all().close()
                            file, fd = going.file, reading.enter_context(opened(work / name))
                        read_exactly(fd, [view_of(outgoing, going.size)], going.offset, work / name)
                    except CheckpointError as error:
                        errors.append(error)  # the receiver sees it by the CRC-32, if this rank is not heard
                together.swap(
                    None if going is None else outgoing[: going.size], to,
                    None if due is None else incoming[: due.size], source,
                )  # fmt: skip
                if due is not None and received is not None:
                    received.take(due, view_of(incoming, due.size))
                if paced:
                    time.sleep(time.monotonic() - began)
        if received is not None and received.error is not None:
            errors.append(received.error)
    return errors


def view_of(buffer: Tensor, size: int = PIECE_BYTES) -> memoryview:
    """The memory of the first bytes of a tensor on the host."""
    numbers: Any = buffer.numpy()
    return memoryview(numbers)[:size]
