"""Parts of a manifest: the line and its units, positions as ranges, dtypes, checksums as one text, uncut states."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from zerokit.checkpoint.checksum import from_text
from zerokit.checkpoint.safetensors import ELEMENT_BYTES, LENGTH_BYTES
from zerokit.checkpoint.strict import bounded, member, members, shape_of
from zerokit.cuts import reduced
from zerokit.layout import Layout, Parameter, Unit

_MAX_POSITIONS = 1 << 22

UNCUT_FILE = re.compile(r"states-\d{5,}-\d{5,}\.safetensors")


@dataclass(frozen=True, slots=True)
class Uncut:
    """The file with states of other shapes than their tensor's, of one tensor that is updated whole.

    The tensor is rows `start` to `stop` of the parameter at `position`: all of it, unless its blocks of rows are
    tensors of their own. `size` and `crc` are those of the whole file.
    """

    position: int
    start: int
    stop: int
    kinds: tuple[str, ...]
    size: int = LENGTH_BYTES
    crc: int = 0

    @property
    def rows(self) -> tuple[int, int]:
        return self.start, self.stop

    @property
    def name(self) -> str:
        return f"states-{self.position:05d}-{self.start:05d}.safetensors"

    def plain(self) -> dict[str, object]:
        """As the manifest has it."""
        file = {"name": self.name, "bytes": self.size, "crc32": f"{self.crc:08x}"}
        return {"parameter": self.position, "rows": list(self.rows), "kinds": list(self.kinds)} | file


def uncut_of(
    top: dict[str, Any], layout: Layout, others: Iterable[tuple[str, Iterable[int]]]
) -> tuple[Uncut, ...]:
    """The files with uncut states. `others` has all other kinds of state, with the positions of their parameters."""
    line, found = layout.parameters, []
    for entry in members(top, "uncut", dict):
        position = bounded(entry, "parameter", 0, len(line) - 1)
        parameter = line[position]
        rows, kinds = members(entry, "rows", int), members(entry, "kinds", str)
        most = parameter.shape[0] if parameter.shape else 1
        if len(rows) != 2 or not 0 <= rows[0] < rows[1] <= most or not parameter.trainable:
            raise ValueError(
                f"uncut states of rows {str(rows)[:60]} of parameter {position}, which has no such rows"
            )
        if not kinds or kinds != sorted(set(kinds)):
            raise ValueError(f"uncut states of parameter {position} are not in order: {str(kinds)[:60]}")
        (crc,) = checksums_of(entry, "crc32", 1)
        start, stop = rows
        found.append(Uncut(position, start, stop, tuple(kinds), bounded(entry, "bytes", 8), crc))
        if (stated := member(entry, "name", str)) != found[-1].name:
            raise ValueError(f"a file is called {stated[:60]!r}, expected {found[-1].name!r}")
    for one, other in pairwise(found):
        if (one.position, one.stop) > (other.position, other.start):
            raise ValueError(
                f"uncut states of parameter {other.position} are not in order, or of the same rows"
            )
    named = {(kind, one.position) for one in found for kind in one.kinds}
    for kind, positions in others:
        if both := [position for position in positions if (kind, position) in named]:
            raise ValueError(f"{kind[:200]!r} of parameter {both[0]} is uncut, and there is another one")
    return tuple(found)


def ranges(positions: Iterable[int]) -> Iterator[list[int]]:
    """Ascending positions as [start, stop) ranges."""
    start = stop = -1
    for position in positions:
        if position != stop:
            if stop >= 0:
                yield [start, stop]
            start = position
        stop = position + 1
    if stop >= 0:
        yield [start, stop]


def dtype_of(entry: dict[str, Any]) -> str:
    """An entry's dtype. These functions raise `ValueError`."""
    dtype = member(entry, "dtype", str)
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"dtype {dtype[:60]!r} is unknown")
    return dtype


def layout_of(top: dict[str, Any], world: int, *, shares: bool = False) -> Layout:
    """The line, in its units, cut for `world` ranks: by the member "shares", if `shares`."""
    own = reduced(world, members(top, "shares", int)) if shares else ()
    if shares and list(own) != top["shares"]:
        raise ValueError(
            "'shares' are equal, or have a common divisor: expected the least integers of other shares"
        )
    parameters = []
    names: set[str] = set()
    for entry in members(top, "parameters", dict):
        parameter = Parameter(
            name=member(entry, "name", str),
            shape=shape_of(entry),
            dtype=dtype_of(entry),
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
        scopes = tuple(members(entry, "scopes", str))
        units.append(Unit.of_shares(len(units), scopes, held, own or (1,) * world))
        start = stop
    if start != len(parameters):
        raise ValueError(f"units hold {start} parameters, but {len(parameters)} are listed")
    return Layout(world, bounded(top, "bucket_bytes", 0), tuple(units), own)


class Budget:
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


def checksums_of(entry: dict[str, Any], key: str, count: int) -> array[int]:
    """The `count` checksums that an entry's member `key` holds."""
    text = member(entry, key, str)
    if len(text) != 8 * count:
        raise ValueError(f"{key!r} has {len(text) / 8:g} checksums of eight digits, expected {count}")
    return from_text(text)
