"""What a rank reads of a checkpoint, and whether the ranks together have read the right bytes.

A slice of the source is read in *pieces*: the common refinement of the old cuts and the new ones. Pieces' checksums
combine to the slice's, whichever ranks read them, so every byte is verified without being read twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zerokit.checkpoint.checksum import Piece, combine
from zerokit.checkpoint.extents import ELEMENT_BYTES, file_name
from zerokit.checkpoint.manifest import Manifest
from zerokit.layout import Interval


@dataclass(frozen=True, slots=True, order=True)
class PieceKey:
    """Elements from `start` of a parameter (its position in the line) in one stream, out of one rank's file."""

    stream: int
    position: int
    source: int
    start: int


Key = PieceKey | str
"""The key of a piece: a part of a slice, or the name of what is copied whole, a file or a tensor of `common`."""


@dataclass(frozen=True, slots=True)
class Want:
    """Elements `interval` of the parameter `name` (at `position` in the source's line) in one stream."""

    stream: int
    position: int
    name: str
    interval: Interval


def refine(
    cuts: Sequence[tuple[int, Interval]], wanted: Interval
) -> Iterator[tuple[int, Interval, Interval]]:
    """`(rank, cut, part)` for the parts of `wanted` that lie in each rank's cut of the same parameter."""
    # A large parameter at a thousand ranks has a thousand cuts, and every new slice meets a few of them.
    position = bisect_right(cuts, wanted.start, key=lambda held: held[1].stop)
    while wanted.numel and position < len(cuts) and cuts[position][1].start < wanted.stop:
        rank, cut = cuts[position]
        yield rank, cut, cut.intersection(wanted)
        position += 1


def damaged(manifest: Manifest, by_rank: Sequence[Mapping[PieceKey, Piece]]) -> list[str]:
    """What is wrong with the slices that the ranks have read (their pieces `by_rank`); empty if all is well.

    A slice that no rank read is not checked; one that was read in part only is an error of the caller's.
    """
    pieces: dict[tuple[int, int, int], dict[int, set[Piece]]] = {}
    for held in by_rank:
        for key, piece in held.items():
            by_start = pieces.setdefault((key.stream, key.position, key.source), {})
            by_start.setdefault(key.start, set()).add(piece)
    line = list(manifest.layout.parameters)
    cuts = {index: dict(manifest.layout.cuts(line[index].name)) for index in {key[1] for key in pieces}}
    expected = {
        (number, name, rank): crc
        for number in range(len(manifest.streams))
        for name, slices in manifest.slice_checksums(number)
        for rank, crc in slices
    }
    lines = []
    for (number, position, rank), by_start in sorted(pieces.items()):
        stream, name = manifest.streams[number], line[position].name
        cut = cuts[position][rank]
        whole = combine(next(iter(by_start[start])) for start in sorted(by_start))
        if whole.size != cut.numel * ELEMENT_BYTES[stream.dtype]:
            raise ValueError(f"{stream.kind}/{name} of rank {rank} was read in part only: {whole.size} bytes")
        unequal = any(len(seen) > 1 for seen in by_start.values())
        if unequal or whole.crc != expected[number, name, rank]:
            lines.append(
                f"{file_name(rank, manifest.world)}: {stream.kind}/{name}, elements {cut.start} to {cut.stop}: damaged "
                f"(CRC-32 {whole.crc:08x}, expected {expected[number, name, rank]:08x})"
            )
    return lines
