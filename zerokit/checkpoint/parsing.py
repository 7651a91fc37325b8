"""Parses a manifest and checks every member."""

from __future__ import annotations

from array import array
from itertools import pairwise, product
from typing import Any

from zerokit.checkpoint.checksum import crc32, from_text
from zerokit.checkpoint.extents import Stream, file_name, slice_count
from zerokit.checkpoint.manifest import (
    COMMON_NAME,
    EXTRA_NAME,
    FORMAT,
    MAX_STEP,
    MAX_WORLD,
    PREFIX_BYTES,
    VERSION,
    WEIGHT_KINDS,
    WEIGHTS,
    File,
    Manifest,
    Scalars,
    own_checksum,
)
from zerokit.checkpoint.safetensors import ELEMENT_BYTES
from zerokit.checkpoint.strict import bounded, member, members, parse_json, shape_of, typed
from zerokit.errors import CheckpointError
from zerokit.layout import ALIGNMENT, Layout, Parameter, Unit

_MAX_POSITIONS = 1 << 22
_MAX_KINDS = 1 << 10
"""Streams, and scalars. Optimizers have a few, and a hundred thousand would make every rank's file slow to check."""


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Parse a manifest. Raises `CheckpointError`, naming `where`, if it is damaged or of an unknown version."""
    stated = own_checksum(content)
    if stated is None:
        raise CheckpointError(f"{where}: not a zerokit manifest (it begins with {content[:24]!r})")
    if crc32(content[PREFIX_BYTES:]) != stated:
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
        checksums.append(_checksums(entry, slice_count(layout, stream)))
    _check_streams(layout, streams)
    scalars = tuple(
        Scalars(member(entry, "kind", str), _dtype(entry), shape_of(entry), budget.positions(entry))
        for entry in _few(top, "scalars")
    )
    _check_scalars(streams, scalars)
    weights_only = "content" in top
    if weights_only:
        _check_weights_only(top, streams, scalars)
    return Manifest(
        bounded(top, "step", 0, MAX_STEP),
        layout,
        tuple(streams),
        scalars,
        tuple(checksums),
        _files(top, world),
        _file(member(top, "common", dict), COMMON_NAME),
        _file(member(top, "extra", dict), EXTRA_NAME),
        weights_only,
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
        units.append(Unit(len(units), tuple(members(entry, "scopes", str)), held, world))
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


def _check_scalars(streams: list[Stream], scalars: tuple[Scalars, ...]) -> None:
    if len({scalar.kind for scalar in scalars}) != len(scalars):
        raise ValueError("scalars of one kind are listed twice")
    for scalar, stream in product(scalars, streams):
        if scalar.kind == stream.kind and (both := set(stream.parameters).intersection(scalar.parameters)):
            raise ValueError(
                f"{scalar.kind[:200]!r} of parameter {min(both)} is in a stream and in scalars: one of the two is wrong"
            )


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


def _checksums(entry: dict[str, Any], count: int) -> array[int]:
    text = member(entry, "crc32", str)
    if len(text) != 8 * count:
        raise ValueError(
            f"stream {str(entry.get('kind'))[:200]!r} has {len(text) / 8:g} checksums, expected one for each of "
            f"{count} slices"
        )
    return from_text(text)


def _crc(entry: dict[str, Any], key: str) -> int:
    text = member(entry, key, str)
    if len(text) != 8:
        raise ValueError(f"{text[:60]!r} is not a CRC-32 of eight hexadecimal digits")
    return from_text(text)[0]


def _file(entry: dict[str, Any], name: str, *, of_rank: bool = False) -> File:
    stated = member(entry, "name", str)
    if stated != name:
        raise ValueError(f"a file is called {stated[:60]!r}, expected {name!r}")
    if of_rank:
        header = bounded(entry, "header_bytes", 8)
        return File(name, bounded(entry, "bytes", 8), header, _crc(entry, "header_crc32"))
    return File(name, bounded(entry, "bytes", 0), 0, _crc(entry, "crc32"))
