"""CRC-32 (the zlib polynomial) of pieces and of their concatenation."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from zlib_ng import zlib_ng

from zerokit.layout import Interval

crc32 = zlib_ng.crc32

_DIGITS = frozenset("0123456789abcdef")


class Piece(NamedTuple):
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


def damaged(crc: int, expected: int) -> str:
    """What bytes with this CRC-32 are, in an error."""
    return f"damaged (CRC-32 {crc:08x}, expected {expected:08x})"


class Part(NamedTuple):
    """Elements of a parameter (its position in the line) in one stream, from element `start` on."""

    stream: int
    position: int
    start: int


Key = Part | str
"""What a checksum is of: a part of a parameter, or what is copied whole, a file or a tensor, by its name."""


class Pieces:
    """The checksums of parts that were read. Each part is three numbers, because a large checkpoint has many."""

    def __init__(self) -> None:
        self.whole: dict[str, Piece] = {}
        """Checksums of what was copied whole."""
        self._parts: dict[tuple[int, int], array[int]] = {}
        """By stream and position: start, CRC-32 and size of each part, as they came."""

    def add(self, key: Key, crc: int, size: int) -> None:
        """Add bytes that were read; a direct continuation under the same key is joined."""
        if isinstance(key, str):
            before = self.whole.get(key, Piece(0, 0))
            self.whole[key] = combine((before, Piece(crc, size)))
            return
        stream, position, start = key
        parts = self._parts.get((stream, position))
        if parts is None:
            parts = self._parts[stream, position] = array("Q")
        if parts and parts[-3] == start:
            parts[-2] = zlib_ng.crc32_combine(parts[-2], crc, size)
            parts[-1] += size
        else:
            parts.extend((start, crc, size))

    @staticmethod
    def joined(by_rank: Sequence[Pieces]) -> Pieces:
        """The parts that all ranks have read together."""
        if len(by_rank) == 1:
            return by_rank[0]
        pieces = Pieces()
        for each in by_rank:
            pieces.update(each)
        return pieces

    def update(self, other: Pieces) -> None:
        self.whole |= other.whole
        for key, parts in other._parts.items():
            self._parts.setdefault(key, array("Q")).extend(parts)

    def parameters(self) -> list[tuple[int, int]]:
        return sorted(self._parts)

    def parts(self, stream: int, position: int) -> list[tuple[int, Piece]]:
        """`(start, piece)` of one parameter's parts, ascending.

        A part that was read several times is there once. Two readings that differ cannot both be right: the checksum is
        then one that no reading gave.
        """
        parts: list[tuple[int, Piece]] = []
        before = None
        read_here = self._parts.get((stream, position), array("Q"))
        for read in sorted(zip(read_here[::3], read_here[1::3], read_here[2::3], strict=True)):
            start, crc, size = read
            if before is not None and before[0] == start:
                if read != before:
                    parts[-1] = (start, Piece(~crc & 0xFFFFFFFF, size))
            else:
                parts.append((start, Piece(crc, size)))
            before = read
        return parts


def along(parts: Sequence[tuple[int, Piece]], cuts: Iterable[Interval]) -> Iterator[tuple[Interval, Piece]]:
    """The checksum of each of `cuts`, ascending, from its parts; cuts without parts are left out."""
    index = 0
    for cut in cuts:
        first = index
        while index < len(parts) and parts[index][0] < cut.stop:
            index += 1
        if index - first == 1:
            yield cut, parts[first][1]
        elif index > first:
            yield cut, combine(piece for _, piece in parts[first:index])


def to_text(crcs: Iterable[int]) -> str:
    """The checksums as text: eight lower-case hexadecimal digits for each."""
    numbers = array("I", crcs)
    numbers.byteswap()  # the first digit is the highest
    return numbers.tobytes().hex()


def from_text(text: str) -> array[int]:
    """Parse the output of `to_text`, of eight digits each. Raises `ValueError` for invalid digits."""
    if not set(text) <= _DIGITS:
        parts = (text[start : start + 8] for start in range(0, len(text), 8))
        wrong = next(part for part in parts if not set(part) <= _DIGITS)
        raise ValueError(f"{wrong!r} is not a CRC-32 of eight hexadecimal digits")
    numbers = array("I", bytes.fromhex(text))
    numbers.byteswap()
    return numbers
