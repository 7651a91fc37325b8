"""The owners of tensors that are updated whole, and what moves to them and back. Standard library only.

Muon, Adafactor, SOAP and LAMB cannot update a piece of a matrix. Shards stay as they are; each such tensor, a parameter
or a block of its rows, has one *owner* among the pieces of the cut of optimizer states. In a step the pieces of its
gradient go to the owner, which updates it whole, and the updated pieces go back.

    cut of a unit   |---- piece 0 ----|---- piece 1 ----|---- piece 2 ----|
    tensors         |----- A -----|-------- B -----|--------- C ----------|
    owners                0                2                   1

Tensors are dealt out by cost, the dearest first, each to whoever has least (LPT, Graham 1969: at most 4/3 of the best).
Which rank is which of these owners is open then. Of all N rotations the one is taken that leaves most elements where
they are. On average over the rotations an owner has 1/N of each of its tensors already, so the best one moves at most
Ψ(N-1)/N elements each way.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from zerokit.errors import UsageError
from zerokit.layout import Cut, Interval, Layout, Unit, align
from zerokit.placement import AnyPlacement, Axis

Shape = tuple[int, ...]
Cost = Callable[[Shape], float]
"""The cost of the update of one tensor, by its shape; only ratios count."""


def default_cost(shape: Shape) -> float:
    """4m²n + 2m³ for a matrix with m ≤ n, as a Newton-Schulz iteration needs them; elements for any other tensor."""
    if len(shape) != 2:
        return math.prod(shape)
    m, n = sorted(shape)
    return 4 * m * m * n + 2 * m**3


@dataclass(frozen=True, slots=True)
class Whole:
    """A tensor that is updated whole: elements `interval` of its unit, in memory coordinates, in `shape`.

    `position` is its parameter's in the unit; `start` is where its owner has it among all that it owns of the unit.
    """

    unit: int
    position: int
    group: int
    interval: Interval
    shape: Shape
    owner: int = 0
    start: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """Elements `interval` of a tensor, in memory coordinates, that piece `piece` holds and its owner needs."""

    tensor: Whole
    piece: int
    interval: Interval


class Owners:
    """All tensors of a model that are updated whole, by unit and in line order, with their owners."""

    def __init__(
        self,
        layout: Layout,
        placement: AnyPlacement,
        groups: Collection[int] = (),
        row_blocks: Mapping[str, Sequence[int]] | None = None,
        cost: Cost = default_cost,
    ) -> None:
        """Those of the parameters in these optimizer `groups`; see `whole_tensors`. Raises `UsageError` for costs."""
        self._units, self._shares, self.placement = layout.units, layout.shares, placement
        self.groups = frozenset(groups)
        tensors = list(whole_tensors(layout, groups, row_blocks or {}))
        self.costs = {shape: _checked(cost(shape), shape) for shape in {each.shape for each in tensors}}
        """By shape; ranks that have others would have other owners."""
        self._by_unit: dict[int, tuple[Whole, ...]] = {}
        self._crossings: dict[int, dict[Axis, int]] = {}
        alike: dict[int, list[Whole]] = {}  # by the number of pieces: units of other stages may have others
        for tensor in tensors:
            alike.setdefault(len(self.cut(layout.units[tensor.unit])), []).append(tensor)
        for pieces, members in alike.items():
            for tensor in self._place(members, pieces):
                self._by_unit[tensor.unit] = (*self._by_unit.get(tensor.unit, ()), tensor)

    def cut(self, unit: Unit) -> Cut:
        """The cut of a unit's optimizer states, whose pieces have owners' numbers."""
        return self.placement.of_unit(unit.index).owners(unit)

    def _place(self, tensors: Sequence[Whole], pieces: int) -> Iterator[Whole]:
        each = len(self._shares) // pieces
        shares = [
            sum(self._shares[each * piece : each * (piece + 1)]) for piece in range(pieces if each else 0)
        ]
        owners = deal([self.costs[tensor.shape] for tensor in tensors], shares or [1] * pieces)
        here = [0] * pieces
        for tensor, owner in zip(tensors, owners, strict=True):
            cut = self.cut(self._units[tensor.unit])
            for piece in cut.owners(tensor.interval):
                here[(piece - owner) % pieces] += cut.piece(piece).intersection(tensor.interval).numel
        # With shares each owner is a certain piece already.
        rotation = 0 if len(set(shares)) > 1 else max(range(pieces), key=here.__getitem__)
        ends: dict[tuple[int, int], int] = {}
        for tensor, owner in zip(tensors, owners, strict=True):
            owner = (owner + rotation) % pieces
            start = ends.get((tensor.unit, owner), 0)
            # Aligned, so that a kernel's result does not depend on what else its owner has.
            ends[tensor.unit, owner] = start + align(tensor.interval.numel)
            yield replace(tensor, owner=owner, start=start)

    def __bool__(self) -> bool:
        return bool(self._by_unit)

    def __str__(self) -> str:
        """Text that is equal where the same own the same."""
        own = [
            (t.unit, t.interval.start, t.shape, t.owner)
            for tensors in self._by_unit.values()
            for t in tensors
        ]
        return f"{len(own)} tensors, {zlib.crc32(repr(own).encode()):08x}"

    @property
    def units(self) -> Collection[int]:
        """The units with such tensors, in line order."""
        return sorted(self._by_unit)

    def of_unit(self, index: int) -> tuple[Whole, ...]:
        """Those of a unit."""
        return self._by_unit.get(index, ())

    def rows(self, tensor: Whole) -> tuple[int, int]:
        """The rows of its parameter that a tensor is: the first, and the one after the last. A number has one row."""
        count = tensor.shape[0] if tensor.shape else 1
        offset = self._units[tensor.unit].slices[tensor.position].offset
        start = (tensor.interval.start - offset) // (tensor.interval.numel // count)
        return start, start + count

    def owned(self, index: int, owner: int) -> tuple[Whole, ...]:
        """Those of a unit that `owner` owns."""
        return tuple(tensor for tensor in self.of_unit(index) if tensor.owner == owner)

    def owned_numel(self, index: int, owner: int) -> int:
        """Elements of what `owner` owns of a unit, one tensor behind the other, padding included."""
        return max((t.start + align(t.interval.numel) for t in self.owned(index, owner)), default=0)

    def moves(self, index: int) -> Iterator[Move]:
        """What moves between the pieces of a unit, to owners and, the other way round, back."""
        cut = self.cut(self._units[index])
        for tensor in self.of_unit(index):
            for piece in cut.owners(tensor.interval):
                if piece != tensor.owner:
                    yield Move(tensor, piece, cut.piece(piece).intersection(tensor.interval))

    def crossings(self, index: int) -> dict[Axis, int]:
        """Elements that cross each axis to the owners of a unit's tensors, and so many again back, over all ranks."""
        if index not in self._crossings:
            placement, mesh = self.placement.of_unit(index), self.placement.mesh
            copies = mesh.world // len(self.cut(self._units[index]))
            crossing = self._crossings[index] = {}
            for move in self.moves(index):
                ends = [placement.rank_of(end, 0) // mesh.inner for end in (move.piece, move.tensor.owner)]
                axis = Axis.INNER if ends[0] == ends[1] else Axis.OUTER
                crossing[axis] = crossing.get(axis, 0) + copies * move.interval.numel
        return self._crossings[index]

    @cached_property
    def balance(self) -> float:
        """The most that a rank computes, divided by the mean over ranks, by cost; 1.0 is even."""
        loads = self.loads
        return max(loads) * len(loads) / sum(loads) if any(loads) else 1.0

    @cached_property
    def loads(self) -> list[float]:
        """The cost of what each rank updates, by its position in the mesh."""
        return self.sums(lambda tensor: self.costs[tensor.shape])

    def sums(self, value_of: Callable[[Whole], float]) -> list[float]:
        """The sum of a value over the tensors that each rank updates, by its position in the mesh."""
        world = self.placement.mesh.world
        sums = [0.0] * world
        for index, tensors in self._by_unit.items():
            each = world // len(self.cut(self._units[index]))  # ranks that hold the same
            for tensor in tensors:
                value = value_of(tensor)
                for position in range(tensor.owner * each, (tensor.owner + 1) * each):
                    sums[position] += value
        return sums


def _checked(cost: object, shape: Shape) -> float:
    if not isinstance(cost, int | float) or not 0 < cost < math.inf:
        raise UsageError(f"update_cost gives {cost!r} for shape {list(shape)}: expected a number above 0")
    return cost


def deal(costs: Sequence[float], shares: Sequence[int]) -> list[int]:
    """An owner for each of these costs: the dearest first, each to the owner that has least so far for its share."""
    loads = [(0.0, owner) for owner, share in enumerate(shares) if share]
    dealt = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: (-costs[number], number)):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + costs[number] / shares[owner], owner))
        dealt[number] = owner
    return dealt


def whole_tensors(
    layout: Layout, groups: Collection[int], row_blocks: Mapping[str, Sequence[int]]
) -> Iterator[Whole]:
    """The tensors of these groups that have elements, in line order.

    `row_blocks` gives, for parameters by name, the numbers of rows of the blocks that are tensors of their own.
    """
    for unit in layout.units:
        for position, part in enumerate(unit.slices):
            parameter, offset = part.parameter, part.offset
            if not parameter.trainable or parameter.group not in groups or not parameter.numel:
                continue
            row = parameter.numel // parameter.shape[0] if parameter.shape else 1
            rows = row_blocks.get(parameter.name, parameter.shape[:1] or (1,))
            for count in rows:
                interval = Interval(offset, offset + count * row)
                offset = interval.stop
                shape = (count, *parameter.shape[1:]) if parameter.shape else ()
                yield Whole(unit.index, position, parameter.group, interval, shape)


def rows_of(name: str, shape: Shape, given: object) -> tuple[int, ...]:
    """The rows of each block of a parameter: so many equal blocks, or as `given`. Raises `UsageError`."""
    rows = shape[0] if shape else 0
    if type(given) is int and given > 0 and rows and not rows % given:
        return (rows // given,) * given
    listed = isinstance(given, tuple | list) and all(type(one) is int and one > 0 for one in given)
    if isinstance(given, tuple | list) and listed and given and sum(given) == rows:
        return tuple(given)
    raise UsageError(
        f"row_blocks: {name} is {list(shape)}, which {given!r} does not divide: expected a number of equal blocks, or "
        "the rows of each, whose sum is the first dimension"
    )
