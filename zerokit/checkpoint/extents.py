"""What lies where in a checkpoint's files: every offset follows from the layout and the list of streams.

A rank's file holds, for each stream in turn, the slices of that stream's parameters that the rank owns, in the order
of the line. So its header, its size and the offset of every element are known before anything is read or written:

    | length | header, padded to 4096 | master/a | master/b | exp_avg/a | exp_avg/b | param/frozen |
             ^ safetensors JSON        ^ one 1-D slice of each parameter, contiguous, no holes

Streams of wider elements come first, so that every slice starts at a multiple of its element size.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from zerokit.layout import Interval, Layout, Parameter

HEADER_ALIGNMENT = 4096
"""Bytes. Data starts on a page, so that direct and mapped reads need no shifting."""

ELEMENT_BYTES = {
    "float64": 8,
    "int64": 8,
    "uint64": 8,
    "float32": 4,
    "int32": 4,
    "uint32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "uint16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

SAFETENSORS_NAMES = {
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
    "float32": "F32",
    "int32": "I32",
    "uint32": "U32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int16": "I16",
    "uint16": "U16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


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
        """Those of `positions` that it holds, in the order given."""
        for position in positions:
            index = bisect_left(self.parameters, position)
            if index < len(self.parameters) and self.parameters[index] == position:
                yield position

    @property
    def order(self) -> tuple[int, bool, str, str]:
        """Streams are sorted by this: wide elements first, the master before the optimizer's kinds."""
        return (-self.element_bytes, self.kind != "master", self.kind, self.dtype)


@dataclass(frozen=True, slots=True)
class Extent:
    """Elements `interval` of a flattened parameter in one stream, at byte `offset` of a rank's file."""

    stream: int
    parameter: Parameter
    interval: Interval
    offset: int
    size: int


@dataclass(frozen=True)
class RankFile:
    """One rank's file, as it must be."""

    name: str
    header: bytes
    extents: tuple[Extent, ...]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.extents[-1].offset + self.extents[-1].size if self.extents else len(self.header)

    @cached_property
    def by_name(self) -> dict[tuple[int, str], Extent]:
        """Extents by stream and parameter; a rank holds at most one slice of each."""
        return {(extent.stream, extent.parameter.name): extent for extent in self.extents}


def file_name(rank: int, world: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def rank_file(layout: Layout, streams: Sequence[Stream], step: int, rank: int) -> RankFile:
    """The file of `rank` in a checkpoint of `layout` with `streams` (sorted by their `order`)."""
    owned = dict(layout.owned(rank))
    relative: list[tuple[str, Extent]] = []
    entries: dict[str, object] = {
        "__metadata__": {
            "format": "zerokit",
            "step": str(step),
            "rank": str(rank),
            "world": str(layout.world),
        }
    }
    position = 0
    for number, stream in enumerate(streams):
        for index in stream.among(owned):
            part = owned[index]
            size = part.interval.numel * stream.element_bytes
            name = f"{stream.kind}/{part.parameter.name}"
            relative.append((name, Extent(number, part.parameter, part.interval, position, size)))
            entries[name] = {
                "dtype": SAFETENSORS_NAMES[stream.dtype],
                "shape": [part.interval.numel],
                "data_offsets": [position, position + size],
            }
            position += size
    header = encode_header(entries)
    extents = tuple(
        Extent(e.stream, e.parameter, e.interval, len(header) + e.offset, e.size) for _, e in relative
    )
    return RankFile(file_name(rank, layout.world), header, extents)


def encode_header(entries: dict[str, object]) -> bytes:
    """A safetensors header, its length in front, padded with spaces to a multiple of `HEADER_ALIGNMENT`."""
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    padded = -(-(8 + len(text)) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT - 8
    return padded.to_bytes(8, "little") + text.ljust(padded)


def slice_count(layout: Layout, stream: Stream) -> int:
    """How many slices, and so checksums, the stream has."""
    return sum(len(layout.owners(name)) for name in names_of(layout, stream))


def names_of(layout: Layout, stream: Stream) -> list[str]:
    """The names of the stream's parameters, in the order of the line."""
    return [layout.line[position].name for position in stream.parameters]
