"""Files of safetensors: dtypes, headers, and where tensors lie in them; the ranks' files of a checkpoint.

    | 8 bytes: length L | L bytes: JSON, may end in spaces | data |

The JSON object maps each name to {"dtype", "shape", "data_offsets": [start, stop)} relative to the data, and
"__metadata__" to strings. The tensors tile the data exactly. See github.com/huggingface/safetensors. A header is read
strictly, so that nothing after it can lie outside the file or overlap.

A rank's file holds, for each stream in turn, the slices of that stream's parameters that the rank owns, in the order
of the line. So its header, its size and the offset of every element are known before anything is read or written:

    | length | header, padded to 4096 | master/a | master/b | exp_avg/a | exp_avg/b | param/frozen |
             ^ safetensors JSON        ^ one 1-D slice of each parameter, contiguous, no holes

Streams of wider elements come first, so that every slice starts at a multiple of its element size.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zerokit.checkpoint.checksum import Pieces, along
from zerokit.checkpoint.disk import opened, read_exactly, size_of
from zerokit.checkpoint.small_floats import PACKED
from zerokit.checkpoint.strict import compact, member, members, parse_json, shape_of, typed, within
from zerokit.errors import CheckpointError
from zerokit.layout import Interval, Layout

_DTYPES = {
    "F64": ("float64", 8),
    "I64": ("int64", 8),
    "U64": ("uint64", 8),
    "F32": ("float32", 4),
    "I32": ("int32", 4),
    "U32": ("uint32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
    "I16": ("int16", 2),
    "U16": ("uint16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
    "F6_E2M3": ("float6_e2m3fn_x4", 3),
    "F6_E3M2": ("float6_e3m2fn_x4", 3),
    "F4": ("float4_e2m1fn_x2", 1),
}
ELEMENT_BYTES = dict(_DTYPES.values())
_NAMES = {dtype: name for name, (dtype, _) in _DTYPES.items()}

HEADER_ALIGNMENT = 4096
"""Bytes. Data starts on a page, so that direct and mapped reads need no shifting."""

LENGTH_BYTES = 8
MAX_BYTES = 100_000_000
"""The largest JSON header: the limit of the stock reader."""

METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the file: `size` bytes from byte `offset` of the file on."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a safetensors file holds; `tensors` in the order of their data, `size` is that of length and JSON."""

    size: int
    tensors: dict[str, Tensor]
    metadata: dict[str, str]


def header_size(first: bytes, file_size: int, where: str) -> int:
    """Bytes of the whole header, by the first eight bytes of a file of `file_size` bytes.

    Raises `CheckpointError`, naming `where`, if no file of that size can have such a header.
    """
    if len(first) < LENGTH_BYTES:
        raise CheckpointError(f"{where}: truncated: {len(first)} bytes, no safetensors file")
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    if length > MAX_BYTES:
        raise CheckpointError(
            f"{where}: not a safetensors file: its header would take {length} bytes, {MAX_BYTES} are allowed"
        )
    if LENGTH_BYTES + length > file_size:
        raise CheckpointError(
            f"{where}: truncated: its header takes {LENGTH_BYTES + length} bytes, the file has {file_size}"
        )
    return LENGTH_BYTES + length


def parse_header(content: bytes, file_size: int, where: str) -> Header:
    """Read the header that a file of `file_size` bytes begins with; `content` may go on after it.

    Raises `CheckpointError`, naming `where`, for anything but dense tensors of known dtypes that tile the file.
    """
    size = header_size(content[:LENGTH_BYTES], file_size, where)
    try:
        if len(content) < size:
            raise ValueError(f"{len(content)} bytes of a header of {size}")
        text = content[LENGTH_BYTES:size]
        if not text.startswith(b"{"):
            raise ValueError(f"begins with {text[:8]!r}, expected a JSON object")
        if not text.rstrip(b" ").endswith(b"}"):
            raise ValueError("does not end with spaces")
        entries: dict[str, Any] = parse_json(text)
        metadata = {
            key: typed(value, str, f"{METADATA} {key!r}")
            for key, value in typed(entries.pop(METADATA, {}), dict, METADATA).items()
        }
        tensors = sorted(
            (_tensor(name, typed(entry, dict, repr(name)), size) for name, entry in entries.items()),
            key=lambda tensor: (tensor.offset, tensor.size),
        )
        _check_tiling(tensors, size, file_size)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: its safetensors header is not valid: {error}") from None
    return Header(size, {tensor.name: tensor for tensor in tensors}, metadata)


def _tensor(name: str, entry: dict[str, Any], base: int) -> Tensor:
    with within(f"tensor {name[:200]!r}"):
        if unknown := entry.keys() - {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"has the unknown member {min(unknown)[:60]!r}")
        if member(entry, "dtype", str) not in _DTYPES:
            raise ValueError(f"dtype {entry['dtype'][:60]!r} is unknown")
        dtype, width = _DTYPES[entry["dtype"]]
        shape = _elements(shape_of(entry), entry["dtype"], PACKED.get(dtype, 1))
        offsets = members(entry, "data_offsets", int)
        if len(offsets) != 2 or not 0 <= offsets[0] <= offsets[1]:
            raise ValueError(f"data_offsets {str(offsets)[:60]} are not [start, stop]")
        size = math.prod(shape) * width
        if offsets[1] - offsets[0] != size:
            raise ValueError(f"{offsets[1] - offsets[0]} bytes for {dtype} of shape {shape}, expected {size}")
    return Tensor(name, dtype, shape, base + offsets[0], size)


def _elements(shape: tuple[int, ...], dtype: str, numbers: int) -> tuple[int, ...]:
    """The shape in elements of several `numbers` each, which a file counts one by one."""
    if numbers == 1:
        return shape
    if not shape or shape[-1] % numbers:
        raise ValueError(f"{dtype} of shape {shape}: the last dimension is no multiple of {numbers}")
    return (*shape[:-1], shape[-1] // numbers)


def _check_tiling(tensors: list[Tensor], base: int, file_size: int) -> None:
    end, before = base, "the header"
    for tensor in tensors:
        if tensor.offset != end:
            kind = "a hole" if tensor.offset > end else "an overlap"
            raise ValueError(
                f"{kind} between {before} and tensor {tensor.name[:200]!r}: byte {tensor.offset}, expected {end}"
            )
        end, before = tensor.offset + tensor.size, f"tensor {tensor.name[:200]!r}"
    if end != file_size:
        raise ValueError(f"tensors end at byte {end}, the file has {file_size}")


def read_header(path: Path) -> Header:
    """The header of the file at `path`. Raises `CheckpointError`."""
    with opened(path) as fd:
        size = size_of(fd, path)
        first = bytearray(min(LENGTH_BYTES, size))
        read_exactly(fd, [first], 0, path)
        content = bytearray(header_size(bytes(first), size, str(path)))
        read_exactly(fd, [content], 0, path)
    return parse_header(bytes(content), size, str(path))


def lay_out(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str]
) -> tuple[bytes, list[int]]:
    """The header of a file with these tensors, `(name, dtype, shape)`, one after the other; it ends with spaces.

    Returns it with the byte of the file that each tensor begins at, and the file's size as the last.
    """
    entries: dict[str, object] = {METADATA: metadata}
    ends = [0]
    for name, dtype, shape in tensors:
        if dtype in PACKED and not shape:
            raise CheckpointError(f"{name}: {dtype} packs numbers into bytes, and no shape says how many")
        start = ends[-1]
        ends.append(start + math.prod(shape) * ELEMENT_BYTES[dtype])
        counted = (*shape[:-1], shape[-1] * PACKED[dtype]) if dtype in PACKED else shape
        entries[name] = {"dtype": _NAMES[dtype], "shape": counted, "data_offsets": [start, ends[-1]]}
    text = compact(entries)
    size = -(-(LENGTH_BYTES + len(text)) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT
    header = (size - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "little") + text.ljust(size - LENGTH_BYTES)
    return header, [size + end for end in ends]


@dataclass(frozen=True)
class Stream:
    """One kind of state over some of the line's parameters: `parameters` are their positions in the line, ascending.

    A kind may have several streams of different dtypes; no parameter is in two of them.

    `block`: how many elements of a parameter one element of the stream stands for, counted from the parameter's first:
    64 in streams of scales, else 1.
    """

    kind: str
    dtype: str
    parameters: tuple[int, ...]
    block: int = 1

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    def elements(self, interval: Interval) -> Interval:
        """The stream's elements that stand for these of a parameter, which begin with a block."""
        return Interval(interval.start // self.block, -(-interval.stop // self.block))

    def behind(self, interval: Interval, numel: int) -> Interval:
        """What these elements of the stream stand for, of a parameter with `numel` elements."""
        return Interval(interval.start * self.block, min(interval.stop * self.block, numel))

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
    """Elements `interval` of a stream, of the parameter at `position` of the line, at byte `offset` of a file."""

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


RANK_FILE = re.compile(r"rank-(\d{5,})-of-\d{5,}\.safetensors")
"""Names of `file_name`, with the rank."""


def file_name(rank: int, world: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}-of-{world:05d}.safetensors"


def rank_file(layout: Layout, streams: Sequence[Stream], step: int, rank: int) -> RankFile:
    """The file of `rank` in a checkpoint of `layout` with `streams` (sorted by their `order`)."""
    owned = dict(layout.owned(rank))
    held = [
        (number, position, stream.elements(owned[position]))
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


def slice_checksums(layout: Layout, streams: Sequence[Stream], pieces: Pieces) -> tuple[array[int], ...]:
    """By stream the CRC-32 of each slice, parameters in line order, slices in rank order, from those of its pieces."""
    checksums = []
    for number, stream in enumerate(streams):
        crcs = array("I")
        for position in stream.parameters:
            cuts = [stream.elements(cut) for _, cut, _ in layout.cuts(position)]
            for cut, piece in along(pieces.parts(number, position), cuts):
                assert piece.size == cut.numel * stream.element_bytes
                crcs.append(piece.crc)
        checksums.append(crcs)
    return tuple(checksums)


def slice_count(layout: Layout, stream: Stream, *, whole: bool = False) -> int:
    """The number of slices, and therefore of checksums, in the stream: with `whole`, of parameters with elements."""
    slices = (len(layout.owners(position)) for position in stream.parameters)
    return sum(min(count, 1) for count in slices) if whole else sum(slices)
