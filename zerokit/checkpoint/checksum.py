"""CRC-32 (the zlib polynomial) of pieces, and of what they form together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from zlib_ng import zlib_ng

crc32 = zlib_ng.crc32


@dataclass(frozen=True, slots=True)
class Piece:
    """The CRC-32 of `size` bytes."""

    crc: int
    size: int


def combine(pieces: Iterable[Piece]) -> Piece:
    """The CRC-32 of the pieces one after the other."""
    crc, size = 0, 0
    for piece in pieces:
        crc = zlib_ng.crc32_combine(crc, piece.crc, piece.size)
        size += piece.size
    return Piece(crc, size)
