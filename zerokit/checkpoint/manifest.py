"""The manifest: a checkpoint's state, its sharding, and the checksum of every slice.

Where a slice lies follows from the layout (see `extents`), so the manifest lists no offsets. It is one JSON object
whose first member is the CRC-32 of all bytes that follow that member, so that the file verifies itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from zerokit.checkpoint.checksum import crc32, to_text
from zerokit.checkpoint.extents import Stream
from zerokit.layout import ALIGNMENT, Interval, Layout

NAME = "manifest.json"
COMMON_NAME = "common.safetensors"
EXTRA_NAME = "extra.json"
BUFFER_PREFIX = "buffers/"
"""Names of buffers in `common` begin so."""

FORMAT = "zerokit.checkpoint"
VERSION = (1, 1)
"""A reader refuses another major version; a higher minor one only adds members that it may ignore.

What holds the whole state is written as 1.0, so that older readers have the bytes they know."""

WEIGHTS = "weights"
"""The member "content" where there are parameters and buffers only (1.1); a whole state has none."""

WEIGHT_KINDS = ("master", "param")
"""Streams of parameters: of trained ones, and of frozen ones. All others are the optimizer's."""

_PREFIX = '{"crc32":"%08x",'
PREFIX_BYTES = len(_PREFIX % 0)
_PARAMETER = ("name", "shape", "dtype", "group", "trainable", "aliases")
MAX_WORLD = 1 << 20
MAX_STEP = 1 << 59


@dataclass(frozen=True, slots=True)
class Scalars:
    """Optimizer state of another shape than its parameter's, such as step counts.

    Tensor `optimizer/<kind>` of `common` is [parameters × shape], in the order of the line.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    parameters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class File:
    """A file of the checkpoint and the checksum of a rank file's header, or of the whole of any other."""

    name: str
    size: int
    header_size: int
    crc: int


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's description.

    `checksums` has one sequence a stream: the CRC-32 of each slice, parameters in line order, slices in rank order.
    `weights_only`: there are parameters and buffers, and no state of an optimizer.
    """

    step: int
    layout: Layout
    streams: tuple[Stream, ...]
    scalars: tuple[Scalars, ...]
    checksums: tuple[Sequence[int], ...]
    files: tuple[File, ...]
    common: File
    extra: File
    weights_only: bool = False

    @property
    def world(self) -> int:
        return self.layout.world

    def to_bytes(self) -> bytes:
        """The file's contents."""
        body = json.dumps(self._plain(), separators=(",", ":"), ensure_ascii=False)[1:].encode() + b"\n"
        return (_PREFIX % crc32(body)).encode() + body

    def _plain(self) -> dict[str, object]:
        layout = self.layout
        return {
            "format": FORMAT,
            "version": list(VERSION) if self.weights_only else [1, 0],
            **({"content": WEIGHTS} if self.weights_only else {}),
            "step": self.step,
            "world": layout.world,
            "alignment": ALIGNMENT,
            "bucket_bytes": layout.bucket_bytes,
            "parameters": [{key: getattr(p, key) for key in _PARAMETER} for p in layout.parameters],
            "units": [
                {"scopes": list(unit.scopes), "parameters": len(unit.parameters)} for unit in layout.units
            ],
            "streams": [
                {
                    "kind": stream.kind,
                    "dtype": stream.dtype,
                    "parameters": list(_ranges(stream.parameters)),
                    "crc32": to_text(crcs),
                }
                for stream, crcs in zip(self.streams, self.checksums, strict=True)
            ],
            "scalars": [
                {
                    "kind": scalar.kind,
                    "dtype": scalar.dtype,
                    "shape": list(scalar.shape),
                    "parameters": list(_ranges(scalar.parameters)),
                }
                for scalar in self.scalars
            ],
            "files": [
                {
                    "name": f.name,
                    "bytes": f.size,
                    "header_bytes": f.header_size,
                    "header_crc32": f"{f.crc:08x}",
                }
                for f in self.files
            ],
            "common": _whole_file(self.common),
            "extra": _whole_file(self.extra),
        }

    def slices(self, stream: int, position: int) -> Iterator[tuple[int, Interval, int]]:
        """`(rank, elements, crc)` of a parameter's slices in one stream, in rank order."""
        first = self._first[stream][position]
        for number, (rank, cut, _) in enumerate(self.layout.cuts(position)):
            yield rank, cut, self.checksums[stream][first + number]

    def checksum(self, stream: int, position: int, rank: int) -> int:
        """The CRC-32 of the slice that a rank has."""
        return self.checksums[stream][
            self._first[stream][position] + rank - self.layout.owners(position).start
        ]

    @cached_property
    def _first(self) -> list[dict[int, int]]:
        """By stream and position, the index of a parameter's first slice among the stream's `checksums`."""
        return [
            dict(
                zip(
                    stream.parameters,
                    accumulate((len(self.layout.owners(p)) for p in stream.parameters), initial=0),
                    strict=False,
                )
            )
            for stream in self.streams
        ]


def own_checksum(content: bytes) -> int | None:
    """The CRC-32 in a manifest's first member; None if there is no such member."""
    head, crc, tail = (
        content[:10],
        content[10 : PREFIX_BYTES - 2],
        content[PREFIX_BYTES - 2 : PREFIX_BYTES],
    )
    if head != b'{"crc32":"' or tail != b'",' or not all(digit in b"0123456789abcdef" for digit in crc):
        return None
    return int(crc, 16)


def _ranges(positions: Iterable[int]) -> Iterator[list[int]]:
    start = stop = -1
    for position in positions:
        if position != stop:
            if stop >= 0:
                yield [start, stop]
            start = position
        stop = position + 1
    if stop >= 0:
        yield [start, stop]


def _whole_file(file: File) -> dict[str, object]:
    return {"name": file.name, "bytes": file.size, "crc32": f"{file.crc:08x}"}
