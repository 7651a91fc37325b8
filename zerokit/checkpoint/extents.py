"""The places of data in a checkpoint's files: every offset follows from the layout and the list of streams.

A rank's file holds, for each stream in turn, the slices of that stream's parameters that the rank owns, in the order
of the line. So its header, its size and the offset of every element are known before anything is read or written:

    | length | header, padded to 4096 | master/a | master/b | exp_avg/a | exp_avg/b | param/frozen |
             ^ safetensors JSON        ^ one 1-D slice of each parameter, contiguous, no holes

Streams of wider elements come first, so that every slice starts at a multiple of its element size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zerokit.checkpoint.safetensors import ELEMENT_BYTES, lay_out
from zerokit.layout import Interval, Layout


@dataclass(frozen=True)
class Stream:
    """One kind of state over some of the line's parameters: `parameters` are their positions in the line, ascending.

    A kind may have several streams of different dtypes; no parameter is in two of them.
    """

    kind: str
    dtype: str
    parameters: tuple[int, ...]

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    def among(self, positions: Iterable[int]) -> Iterator[int]:
        """The members of `positions` that the stream has, in the given order."""
        for position in positions:
            index = bisect_left(self.parameters, position)
            if index < len(self.parameters) and self.parameters[index] == position:
                yield position

    @property
    def order(self) -> tuple[int, bool, str, str]:
        """The sort key of streams: wide elements first, the master before the optimizer's kinds."""
        return (-self.element_bytes, self.kind != "master", self.kind, self.dtype)


class Extent(NamedTuple):
    """Elements `interval` of the parameter at `position` of the line, in one stream, at byte `offset` of a file."""

    stream: int
    position: int
    interval: Interval
    offset: int
    size: int


@dataclass(frozen=True)
class RankFile:
    """The expected file of one rank: its `size` and its extents, in bytes."""

    name: str
    header: bytes
    extents: tuple[Extent, ...]
    size: int


def file_name(rank: int, world: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def rank_file(layout: Layout, streams: Sequence[Stream], step: int, rank: int) -> RankFile:
    """The file of `rank` in a checkpoint of `layout` with `streams` (sorted by their `order`)."""
    owned = dict(layout.owned(rank))
    held = [
        (number, position, owned[position])
        for number, stream in enumerate(streams)
        for position in stream.among(owned)
    ]
    line = layout.parameters
    header, offsets = lay_out(
        (
            (f"{streams[number].kind}/{line[position].name}", streams[number].dtype, (interval.numel,))
            for number, position, interval in held
        ),
        {"format": "zerokit", "step": str(step), "rank": str(rank), "world": str(layout.world)},
    )
    extents = tuple(
        Extent(*one, offset, offsets[index + 1] - offset)
        for index, (one, offset) in enumerate(zip(held, offsets, strict=False))
    )
    return RankFile(file_name(rank, layout.world), header, extents, offsets[-1])


def slice_count(layout: Layout, stream: Stream) -> int:
    """The number of slices, and therefore of checksums, in the stream."""
    return sum(len(layout.owners(position)) for position in stream.parameters)
