"""The manifest: a checkpoint's state, its sharding, and the checksum of every slice.

Where a slice lies follows from the layout (see `safetensors`), so the manifest lists no offsets. It is one JSON object
whose first member is the CRC-32 of all bytes that follow that member, so that the file verifies itself.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import Any

from zerokit.checkpoint.checksum import crc32, from_text, to_text
from zerokit.checkpoint.safetensors import ELEMENT_BYTES, Stream, file_name, slice_count
from zerokit.checkpoint.strict import bounded, compact, member, members, parse_json, shape_of, typed
from zerokit.errors import CheckpointError
from zerokit.layout import ALIGNMENT, Interval, Layout, Parameter, Unit
from zerokit.skips import NONE_SKIPPED, Skips

NAME = "manifest.json"
COMMON_NAME = "common.safetensors"
EXTRA_NAME = "extra.json"
BUFFER_PREFIX = "buffers/"
"""Names of buffers in `common` begin so."""

FORMAT = "zerokit.checkpoint"
VERSION = (1, 3)
"""A reader refuses another major version; a higher minor one only adds members that it may ignore.

Each checkpoint is written as the first version that has what is in it, so that older readers have the bytes they know:
1.1 added weights alone, 1.2 values of `extra` by rank, 1.3 how many steps were skipped."""

WEIGHTS = "weights"
"""The member "content" where there are parameters and buffers only (1.1); a whole state has none."""

WEIGHT_KINDS = ("master", "param")
"""Streams of parameters: of trained ones, and of frozen ones. All others are the optimizer's."""

_PREFIX = '{"crc32":"%08x",'
_OWN = re.compile(rb'\{"crc32":"([0-9a-f]{8})",')
_PARAMETER = ("name", "shape", "dtype", "group", "trainable", "aliases")
MAX_WORLD = 1 << 20
MAX_STEP = 1 << 59

_MAX_POSITIONS = 1 << 22
_MAX_KINDS = 1 << 10
"""Streams, and scalars. Optimizers have a few, and a hundred thousand would make every rank's file slow to check."""


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
    `weights_only`: there are parameters and buffers, and no state of an optimizer. `extra_ranks`: how many ranks have
    values of their own in `extra`; 0 where all values are everyone's. `skips`: steps that the training had left out.
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
    extra_ranks: int = 0
    skips: Skips = NONE_SKIPPED

    @property
    def world(self) -> int:
        return self.layout.world

    def to_bytes(self) -> bytes:
        body = compact(self._plain())[1:] + b"\n"
        return (_PREFIX % crc32(body)).encode() + body

    def _plain(self) -> dict[str, object]:
        layout = self.layout
        ranks = {"ranks": self.extra_ranks} if self.extra_ranks else {}
        skips = {"skipped": asdict(self.skips)} if self.skips.total else {}
        return {
            "format": FORMAT,
            "version": [1, 3 if skips else 2 if ranks else 1 if self.weights_only else 0],
            **({"content": WEIGHTS} if self.weights_only else {}),
            "step": self.step,
            **skips,
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
            "files": [_plain_file(file) for file in self.files],
            "common": _plain_file(self.common),
            "extra": _plain_file(self.extra) | ranks,
        }

    def slices(self, stream: int, position: int) -> Iterator[tuple[int, Interval, int]]:
        """`(rank, elements, crc)` of a parameter's slices in one stream, in rank order."""
        first = self._first[stream][position]
        for number, (rank, cut, _) in enumerate(self.layout.cuts(position)):
            yield rank, cut, self.checksums[stream][first + number]

    def checksum(self, stream: int, position: int, rank: int) -> int:
        return self.checksums[stream][
            self._first[stream][position] + rank - self.layout.owners(position).start
        ]

    @cached_property
    def numbers(self) -> dict[tuple[str, int], int]:
        """The number of the stream that each kind and position is in."""
        return {
            (stream.kind, position): number
            for number, stream in enumerate(self.streams)
            for position in stream.parameters
        }

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
    match = _OWN.match(content)
    return int(match[1], 16) if match else None


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


def _plain_file(file: File) -> dict[str, object]:
    crc = f"{file.crc:08x}"
    checked = {"header_bytes": file.header_size, "header_crc32": crc} if file.header_size else {"crc32": crc}
    return {"name": file.name, "bytes": file.size} | checked


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Parse a manifest. Raises `CheckpointError`, naming `where`, if it is damaged or of an unknown version."""
    stated = own_checksum(content)
    if stated is None:
        raise CheckpointError(f"{where}: not a zerokit manifest (it begins with {content[:24]!r})")
    if crc32(content[len(_PREFIX % 0) :]) != stated:
        raise CheckpointError(f"{where}: damaged, its contents do not match its checksum {stated:08x}")
    try:
        return _manifest(parse_json(content))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid: {error}") from None


def _manifest(plain: Any) -> Manifest:
    top = typed(plain, dict, "the manifest")
    if top.get("format") != FORMAT:
        raise ValueError(f"format is {str(top.get('format'))[:60]!r}, expected {FORMAT!r}")
    version = members(top, "version", int)
    if len(version) != 2 or version[0] != VERSION[0]:
        raise ValueError(
            f"version is {'.'.join(map(str, version[:3]))}, this zerokit reads {VERSION[0]}.x: use a newer one"
        )
    alignment = member(top, "alignment", int)
    if alignment != ALIGNMENT:
        raise ValueError(f"alignment is {alignment}, expected {ALIGNMENT}")
    world = bounded(top, "world", 1, MAX_WORLD)
    layout = _layout(top, world)
    budget = _Budget(sum(len(unit.parameters) for unit in layout.units))
    streams, checksums = [], []
    for entry in _few(top, "streams"):
        stream = Stream(member(entry, "kind", str), _dtype(entry), budget.positions(entry))
        streams.append(stream)
        checksums.append(_checksums(entry, "crc32", slice_count(layout, stream)))
    _check_streams(layout, streams)
    scalars = tuple(
        Scalars(member(entry, "kind", str), _dtype(entry), shape_of(entry), budget.positions(entry))
        for entry in _few(top, "scalars")
    )
    if len({scalar.kind for scalar in scalars}) != len(scalars):
        raise ValueError("scalars of one kind are listed twice")
    for scalar, stream in product(scalars, streams):
        if scalar.kind == stream.kind and (both := set(stream.parameters).intersection(scalar.parameters)):
            raise ValueError(
                f"{scalar.kind[:200]!r} of parameter {min(both)} is in a stream and in scalars: one of the two is wrong"
            )
    weights_only = "content" in top
    if weights_only:
        _check_weights_only(top, streams, scalars)
    skipped = member(top, "skipped", dict) if "skipped" in top else asdict(NONE_SKIPPED)
    total = bounded(skipped, "total", 0, MAX_STEP)
    return Manifest(
        bounded(top, "step", 0, MAX_STEP),
        layout,
        tuple(streams),
        scalars,
        tuple(checksums),
        _files(top, world),
        _file(member(top, "common", dict), COMMON_NAME),
        _file(extra := member(top, "extra", dict), EXTRA_NAME),
        weights_only,
        bounded(extra, "ranks", 1, MAX_WORLD) if "ranks" in extra else 0,
        Skips(total, bounded(skipped, "in_a_row", 0, total)),
    )


def _files(top: dict[str, Any], world: int) -> tuple[File, ...]:
    entries = members(top, "files", dict)
    if len(entries) != world:
        raise ValueError(f"{len(entries)} files are listed, expected one for each of {world} ranks")
    return tuple(_file(entry, file_name(rank, world), of_rank=True) for rank, entry in enumerate(entries))


def _layout(top: dict[str, Any], world: int) -> Layout:
    parameters = []
    names: set[str] = set()
    for entry in members(top, "parameters", dict):
        parameter = Parameter(
            name=member(entry, "name", str),
            shape=shape_of(entry),
            dtype=_dtype(entry),
            group=bounded(entry, "group", 0),
            trainable=member(entry, "trainable", bool),
            aliases=tuple(members(entry, "aliases", str)),
        )
        for name in (parameter.name, *parameter.aliases):
            if name in names:
                raise ValueError(f"two parameters are called {name[:200]!r}")
            names.add(name)
        parameters.append(parameter)
    units: list[Unit] = []
    start = 0
    for entry in members(top, "units", dict):
        stop = start + bounded(entry, "parameters", 1)
        held = tuple(parameters[start:stop])
        if stop > len(parameters):
            raise ValueError(f"units hold {stop} parameters or more, but {len(parameters)} are listed")
        if len({p.trainable for p in held}) > 1 or [p.group for p in held] != sorted(p.group for p in held):
            raise ValueError(
                f"unit {len(units)} mixes frozen and trainable parameters, or groups out of order"
            )
        units.append(Unit.equal(len(units), tuple(members(entry, "scopes", str)), held, world))
        start = stop
    if start != len(parameters):
        raise ValueError(f"units hold {start} parameters, but {len(parameters)} are listed")
    return Layout(world, bounded(top, "bucket_bytes", 0), tuple(units))


def _check_streams(layout: Layout, streams: list[Stream]) -> None:
    if any(a.order >= b.order for a, b in pairwise(streams)):
        raise ValueError(
            "streams are not in order: wide elements first, then master, then by name, each once"
        )
    trainable = [parameter.trainable for parameter in layout.parameters]
    seen: set[tuple[str, int]] = set()
    for stream in streams:
        if not stream.kind or "/" in stream.kind:
            raise ValueError(f"a stream cannot be called {stream.kind[:200]!r}")
        for position in stream.parameters:
            if trainable[position] == (stream.kind == "param"):
                raise ValueError(
                    f"stream {stream.kind[:200]!r} holds parameter {position}, which is "
                    f"{'trainable' if trainable[position] else 'frozen'}"
                )
            if (stream.kind, position) in seen:
                raise ValueError(f"parameter {position} is in two streams of kind {stream.kind[:200]!r}")
            seen.add((stream.kind, position))
    for position, trains in enumerate(trainable):
        if ("master" if trains else "param", position) not in seen:
            raise ValueError(f"parameter {position} is in no {'master' if trains else 'param'} stream")


def _few(top: dict[str, Any], key: str) -> list[dict[str, Any]]:
    entries = members(top, key, dict)
    if len(entries) > _MAX_KINDS:
        raise ValueError(f"{len(entries)} {key} are listed, {_MAX_KINDS} are allowed")
    return entries


def _check_weights_only(top: dict[str, Any], streams: list[Stream], scalars: tuple[Scalars, ...]) -> None:
    content = member(top, "content", str)
    if content != WEIGHTS:
        raise ValueError(f"content is {content[:60]!r}, this zerokit knows {WEIGHTS!r}: use a newer one")
    kinds = [stream.kind for stream in streams if stream.kind not in WEIGHT_KINDS]
    kinds += [scalar.kind for scalar in scalars]
    if kinds:
        raise ValueError(f"content is {WEIGHTS!r}, but there is optimizer state: {kinds[0][:200]!r}")


def _dtype(entry: dict[str, Any]) -> str:
    dtype = member(entry, "dtype", str)
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"dtype {dtype[:60]!r} is unknown")
    return dtype


class _Budget:
    """Positions of parameters, written as [start, stop) ranges. A few bytes may stand for millions of them."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._left = _MAX_POSITIONS

    def positions(self, entry: dict[str, Any]) -> tuple[int, ...]:
        positions: list[int] = []
        end = 0
        for stretch in members(entry, "parameters", list):
            if len(stretch) != 2 or not all(type(bound) is int for bound in stretch):
                raise ValueError(f"{str(stretch)[:60]} is not a [start, stop] of parameters")
            start, stop = stretch
            if not end <= start < stop <= self._count:
                raise ValueError(
                    f"{stretch} does not lie in the {self._count} parameters, in ascending order"
                )
            self._left -= stop - start
            if self._left < 0:
                raise ValueError(f"streams and scalars hold more than {_MAX_POSITIONS} parameters together")
            positions.extend(range(start, stop))
            end = stop
        return tuple(positions)


def _checksums(entry: dict[str, Any], key: str, count: int) -> array[int]:
    text = member(entry, key, str)
    if len(text) != 8 * count:
        raise ValueError(f"{key!r} has {len(text) / 8:g} checksums of eight digits, expected {count}")
    return from_text(text)


def _file(entry: dict[str, Any], name: str, *, of_rank: bool = False) -> File:
    stated = member(entry, "name", str)
    if stated != name:
        raise ValueError(f"a file is called {stated[:60]!r}, expected {name!r}")
    (crc,) = _checksums(entry, "header_crc32" if of_rank else "crc32", 1)
    header = bounded(entry, "header_bytes", 8) if of_rank else 0
    return File(name, bounded(entry, "bytes", header), header, crc)
