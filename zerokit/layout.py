"""The owners of elements: the one module that cuts the line of trainable state.

A model's parameters, in order, form a line of elements. Neighbouring parameters form *units*, which are
communicated together; each unit has a `Cut` into contiguous pieces, one a rank, the *shards*, equal or in proportion to
ranks' shares:

    unit    | wq (70)      |pad| wk (64)      | bias (3) |  pad          |     alignment 64
    memory  0              70  128            192        195            256    128 elements a rank, N = 2
    rank 0  |############################|
    rank 1                                |############################|
    cut     0                            128                          256

Positions inside a unit are *memory coordinates*: every parameter starts at a multiple of `ALIGNMENT`
elements, parameters of one optimizer group lie together, and every shard's length is a multiple of
`ALIGNMENT`. Aligned starts and lengths leave fused kernels no vector tail; a tail rounds differently,
so that results would depend on the cut. Padding exists in memory only: whatever leaves the process is
described by `Slice`s, which know nothing of it.

Invariants, for every unit and world size: the slices of all ranks tile every parameter exactly, in rank
order; padding is under `ALIGNMENT` elements a parameter plus `ALIGNMENT` a rank.

Standard library only. All other modules take their offsets from here, intervals and cuts of `cuts` included.
"""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby, islice

from zerokit.cuts import ALIGNMENT, Cut, Interval, align, reduced

__all__ = [
    "ALIGNMENT",
    "LAYOUT_BYTES",
    "Cut",
    "Interval",
    "Layout",
    "Parameter",
    "Segment",
    "Slice",
    "Unit",
    "align",
    "build_layout",
    "default_bucket_bytes",
    "is_pooled",
]

LAYOUT_BYTES = 4
"""Bytes an element that `bucket_mb` is counted in, whatever the precision: it must not move a boundary."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the model, tied ones once: `aliases` are its other names."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    group: int = 0
    trainable: bool = True
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


_PARAMETER_FIELDS = tuple(each.name for each in fields(Parameter))


@dataclass(frozen=True, slots=True)
class Segment:
    """Parameters that the model uses together: those of one module, or neighbours among the rest.

    `scope` is the module's name; `None` stands for the rest, which the root module uses.
    """

    scope: str | None
    parameters: tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of one parameter: elements `interval` of the flattened parameter, at `offset` of its unit."""

    parameter: Parameter
    interval: Interval
    offset: int

    @property
    def memory(self) -> Interval:
        """The same elements in the unit's memory coordinates."""
        return Interval(self.offset, self.offset + self.interval.numel)


@dataclass(frozen=True)
class Unit:
    """Parameters that are communicated together, and their cut into shards, in memory coordinates.

    `scopes` names the modules whose parameters these are; it is empty for a stretch of the rest.
    """

    index: int
    scopes: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    cut: Cut

    @classmethod
    def equal(
        cls, index: int, scopes: tuple[str, ...], parameters: tuple[Parameter, ...], world: int
    ) -> Unit:
        """A unit in `world` equal shards."""
        return cls.of_shares(index, scopes, parameters, (1,) * world)

    @classmethod
    def of_shares(
        cls, index: int, scopes: tuple[str, ...], parameters: tuple[Parameter, ...], shares: Sequence[int]
    ) -> Unit:
        """A unit in shards that are in proportion to `shares`, one for each rank."""
        numel = sum(align(parameter.numel) for parameter in parameters)
        return cls(index, scopes, parameters, Cut.weighted(numel, shares))

    @property
    def world(self) -> int:
        return len(self.cut)

    @property
    def trainable(self) -> bool:
        return self.parameters[0].trainable

    @property
    def name(self) -> str:
        first, last = self.parameters[0].name, self.parameters[-1].name
        return first if first == last else f"{first} .. {last}"

    @cached_property
    def slices(self) -> tuple[Slice, ...]:
        """Every parameter, whole, at its offset."""
        placed, offset = [], 0
        for parameter in self.parameters:
            placed.append(Slice(parameter, Interval(0, parameter.numel), offset))
            offset += align(parameter.numel)
        return tuple(placed)

    @cached_property
    def _filled(self) -> tuple[Slice, ...]:
        """The slices that have elements."""
        return tuple(whole for whole in self.slices if whole.interval.numel)

    @cached_property
    def _ends(self) -> list[int]:
        return [whole.memory.stop for whole in self._filled]

    @cached_property
    def payload_numel(self) -> int:
        """Elements of the parameters themselves, without padding."""
        return sum(parameter.numel for parameter in self.parameters)

    @property
    def holders(self) -> int:
        """The number of the rank after the last one that holds some of it."""
        owners = self.cut.owners(Interval(0, self._aligned_numel))
        return owners[-1] + 1 if owners else 0

    @property
    def numel(self) -> int:
        """Elements of the unit in memory, padding included."""
        return self.cut.bounds[-1]

    @cached_property
    def _aligned_numel(self) -> int:
        return sum(align(parameter.numel) for parameter in self.parameters)

    def shard(self, rank: int) -> Interval:
        """Rank `rank`'s piece, in memory coordinates."""
        return self.cut.piece(rank)

    def slices_within(self, piece: Interval) -> Iterator[Slice]:
        """The parts of parameters that lie in `piece` (memory coordinates), in order; none is empty."""
        for whole in self.wholes_within(piece):
            offset = whole.offset
            start, stop = max(piece.start, offset), min(piece.stop, offset + whole.interval.stop)
            yield Slice(whole.parameter, Interval(start - offset, stop - offset), start)

    def wholes_within(self, piece: Interval) -> Iterator[Slice]:
        """The parameters that have elements in `piece` (memory coordinates), whole, in order."""
        # Thousands of parameters at thousands of ranks: each rank looks at its own ones only.
        first = bisect_right(self._ends, piece.start)
        for whole in islice(self._filled, first, None) if piece.numel else ():
            if whole.offset >= piece.stop:
                return
            yield whole

    def owned(self, rank: int) -> Iterator[Slice]:
        """The parts of parameters that rank `rank` holds: at most one a parameter."""
        return self.slices_within(self.shard(rank))

    def payload_within(self, piece: Interval) -> int:
        return sum(part.interval.numel for part in self.slices_within(piece))

    def groups_within(self, piece: Interval) -> Iterator[tuple[int, Interval]]:
        """`(group, interval)` for the stretches of one optimizer group in `piece`, padding included.

        Parameters of a group lie together, so there is at most one stretch a group. Its ends are aligned.
        """
        for group, members in groupby(self.slices, key=lambda part: part.parameter.group):
            placed = list(members)
            end = placed[-1].offset + align(placed[-1].parameter.numel)
            stretch = Interval(placed[0].offset, end).intersection(piece)
            if stretch.numel:
                yield group, stretch

    def gaps(self) -> Iterator[Interval]:
        """The stretches of padding, in memory coordinates."""
        for part in self.slices:
            end = part.offset + part.parameter.numel
            if end != part.offset + align(part.parameter.numel):
                yield Interval(end, part.offset + align(part.parameter.numel))
        if self._aligned_numel != self.numel:
            yield Interval(self._aligned_numel, self.numel)


@dataclass(frozen=True)
class Layout:
    """The layout: all units of a model, in the order of the line, for one world size.

    `shares` are those of ranks, in the order of shards, with no common divisor; empty where all shards are equal.
    """

    world: int
    bucket_bytes: int
    units: tuple[Unit, ...]
    shares: tuple[int, ...] = ()

    @cached_property
    def _by_name(self) -> dict[str, tuple[Unit, Slice]]:
        return {whole.parameter.name: (unit, whole) for unit in self.units for whole in unit.slices}

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """Every parameter once, each at its position in the line."""
        return tuple(parameter for unit in self.units for parameter in unit.parameters)

    @cached_property
    def positions(self) -> dict[str, int]:
        """Each parameter's position in the line, by its name."""
        return {parameter.name: position for position, parameter in enumerate(self.parameters)}

    def owned(self, rank: int) -> Iterator[tuple[int, Interval]]:
        """`(position, elements)` of what rank `rank` holds, in line order."""
        for index in sorted(index for holders, index in self._holders[: self._count_holding(rank)]):
            unit = self.units[index]
            for part in unit.owned(rank):
                yield self.positions[part.parameter.name], part.interval

    def _count_holding(self, rank: int) -> int:
        """Units of which the rank may hold some: the first ones of `_holders`."""
        return bisect_right(self._holders, -rank - 1, key=lambda unit: -unit[0])

    @cached_property
    def _holders(self) -> list[tuple[int, int]]:
        """`holders` of each unit, and its index among the units; those that most ranks hold first.

        At many ranks most have nothing of small units, and need not look at them.
        """
        return sorted(((unit.holders, index) for index, unit in enumerate(self.units)), reverse=True)

    @property
    def trainable_numel(self) -> int:
        """The paper's Ψ: trainable elements, without padding."""
        return sum(unit.payload_numel for unit in self.units if unit.trainable)

    def find(self, name: str) -> tuple[Unit, Slice]:
        """The unit of the parameter called `name`, and the parameter's slice of it. Raises `KeyError`."""
        return self._by_name[name]

    def for_world(self, world: int, shares: Sequence[int] = ()) -> Layout:
        """The same units, cut for `world` ranks, in proportion to `shares` if there are some.

        Raises `ValueError` for fewer than one rank, and for shares that `reduced` refuses.
        """
        shares = reduced(world, shares)
        each = shares or (1,) * world
        units = tuple(Unit.of_shares(unit.index, unit.scopes, unit.parameters, each) for unit in self.units)
        return Layout(world, self.bucket_bytes, units, shares)

    def owners(self, position: int) -> Sequence[int]:
        """The ranks that hold some of a parameter, in order; none if it has no elements."""
        unit, whole = self._by_name[self.parameters[position].name]
        return unit.cut.owners(whole.memory)

    def cuts(self, position: int, wanted: Interval | None = None) -> Iterator[tuple[int, Interval, Interval]]:
        """`(rank, cut, part)` of the ranks that hold some of the elements `wanted` of a parameter, in rank order.

        `cut` is what the rank holds, `part` what is wanted of it; no part is empty. All is wanted by default.
        """
        unit, whole = self._by_name[self.parameters[position].name]
        bounds, offset, numel = unit.cut.bounds, whole.offset, whole.interval.stop
        for rank in unit.cut.owners(whole.memory if wanted is None else wanted.shifted(offset)):
            cut = Interval(max(bounds[rank] - offset, 0), min(bounds[rank + 1] - offset, numel))
            yield rank, cut, cut if wanted is None else cut.intersection(wanted)

    def describe(self) -> dict[str, object]:
        """The layout as plain data: the part on which ranks must agree, and from which a reader rebuilds it."""
        return {
            "world": self.world,
            **({"shares": self.shares} if self.shares else {}),
            "alignment": ALIGNMENT,
            "bucket_bytes": self.bucket_bytes,
            "units": [
                {
                    "scopes": unit.scopes,
                    "parameters": [
                        {name: getattr(parameter, name) for name in _PARAMETER_FIELDS}
                        for parameter in unit.parameters
                    ],
                }
                for unit in self.units
            ],
        }

    def digest(self) -> bytes:
        """SHA-256 of the description: equal on ranks that may communicate."""
        return hashlib.sha256(json.dumps(self.describe(), sort_keys=True).encode()).digest()


def default_bucket_bytes(segments: Iterable[Segment]) -> int:
    """A power of two of MiB, from 1 to 16: of small models at most an eighth, so that buckets in flight stay small
    beside the state that a stage shards.
    """
    whole = LAYOUT_BYTES * sum(parameter.numel for segment in segments for parameter in segment.parameters)
    mib = next((mib for mib in (16, 8, 4, 2) if mib * 2**20 <= whole // 8), 1)
    return mib * 2**20


def build_layout(
    segments: Iterable[Segment],
    *,
    world: int,
    bucket_bytes: int,
    settings: Mapping[str, Hashable] | None = None,
    shares: Sequence[int] = (),
) -> Layout:
    """Join segments to units and cut each for `world` ranks, in proportion to `shares` if there are some.

    Frozen parameters form units of their own, one dtype a unit, and so do parameters of each of the `settings`, by
    name. Neighbouring segments of the same kind (modules, or the rest) join while their elements, counted at
    `LAYOUT_BYTES`, stay within `bucket_bytes`; a segment is never split otherwise, however large. The result depends on
    neither stage nor precision, where these are the same for all.

    Raises `ValueError` for a world size below 1, shares that `reduced` refuses, or a parameter named twice.
    """
    shares = reduced(world, shares)
    each = shares or (1,) * world
    joined: list[list[Segment]] = []
    open_units: dict[Hashable, list[Segment]] = {}
    numel: dict[Hashable, int] = {}
    for segment in segments:
        for kind, members in _kinds(segment.parameters, settings or {}).items():
            unit, size = open_units.get(kind), sum(parameter.numel for parameter in members)
            numel[kind] = numel.get(kind, 0) + size
            alike = unit is not None and (unit[-1].scope is None) == (segment.scope is None)
            if unit is None or not alike or numel[kind] * LAYOUT_BYTES > bucket_bytes:
                unit, numel[kind] = [], size
                open_units[kind] = unit
                joined.append(unit)
            unit.append(Segment(segment.scope, members))
    units = tuple(_make_unit(index, pieces, each) for index, pieces in enumerate(joined))
    names = [parameter.name for unit in units for parameter in unit.parameters]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"parameters named twice: {', '.join(twice)}")
    return Layout(world, bucket_bytes, units, shares)


def _kinds(
    parameters: Sequence[Parameter], settings: Mapping[str, Hashable]
) -> dict[Hashable, tuple[Parameter, ...]]:
    """Parameters that may share a storage: all trainable ones, frozen ones by dtype; those of other settings apart."""
    kinds: dict[Hashable, list[Parameter]] = {}
    for parameter in parameters:
        kind = "" if parameter.trainable else parameter.dtype
        kinds.setdefault((kind, settings.get(parameter.name)), []).append(parameter)
    return {kind: tuple(members) for kind, members in kinds.items()}


def _make_unit(index: int, pieces: Sequence[Segment], shares: Sequence[int]) -> Unit:
    # A stable sort keeps the line's order inside a group; groups must lie together (see `groups_within`).
    parameters = sorted((p for piece in pieces for p in piece.parameters), key=lambda p: p.group)
    scopes = dict.fromkeys(piece.scope for piece in pieces if piece.scope is not None)
    return Unit.of_shares(index, tuple(scopes), tuple(parameters), shares)


def is_pooled(unit: Unit, bucket_bytes: int) -> bool:
    """Whether a trainable unit is small enough for shared buckets.

    Larger ones, which a single module made so, get memory of their own while their gradients are in flight.
    """
    return unit.payload_numel * LAYOUT_BYTES <= bucket_bytes
