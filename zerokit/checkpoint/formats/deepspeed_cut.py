"""DeepSpeed's sharding of parameters: the arithmetic shared by its reader and writer.

At stages 1 and 2 a group is its parameters flattened one after the other, padded to a multiple of 2N elements, and
rank r holds the r-th N-th of it. At stage 3 each parameter of n elements is cut by itself: rank r holds elements
[r·p, (r+1)·p) with p = ceil(n/N), padded, and a sub-group is the concatenation of those pieces. See
deepspeed/runtime/zero (0.19) and deepspeed/utils/zero_to_fp32.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zerokit.layout import Interval

ALIGNMENT = 2
"""A group of stages 1 and 2 is padded to a multiple of this many elements for each rank."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `interval` of the flattened parameter `name`, from element `start` of a rank's piece of a group on."""

    name: str
    rank: int
    interval: Interval
    start: int


@dataclass(frozen=True, slots=True)
class Group:
    """An optimizer group at stages 1 and 2 for `world` ranks: the places of its parameters, in elements.

    `payload` elements come before the padding at the end.
    """

    world: int
    members: Mapping[str, Interval]
    payload: int

    @property
    def partition(self) -> int:
        """Elements of each rank's piece, padding included."""
        multiple = ALIGNMENT * self.world
        return -(-self.payload // multiple) * ALIGNMENT

    def unpadded(self, rank: int) -> int:
        """Elements of a rank's piece without padding."""
        return min(self.partition, max(0, self.payload - rank * self.partition))

    def pieces(self) -> Iterator[Piece]:
        """Every parameter's pieces, in the order of its elements."""
        size = self.partition
        for name, place in self.members.items():
            for rank in range(place.start // max(size, 1), self.world):
                part = place.intersection(Interval(rank * size, (rank + 1) * size))
                if not part.numel:
                    break
                yield Piece(name, rank, part.shifted(-place.start), part.start - rank * size)


@dataclass(frozen=True, slots=True)
class SubGroup:
    """A sub-group of stage 3 for `world` ranks: parameters of group `group` with their elements."""

    world: int
    group: int
    members: Mapping[str, int]

    @property
    def partition(self) -> int:
        """Elements of each rank's piece, padding included."""
        return sum(part_size(numel, self.world) for numel in self.members.values())

    def pieces(self) -> Iterator[Piece]:
        """Every parameter's pieces, in the order of its elements."""
        start = 0
        for name, numel in self.members.items():
            for rank, part in parts(numel, self.world):
                yield Piece(name, rank, part, start)
            start += part_size(numel, self.world)


def lay_out(shapes: Mapping[str, Sequence[int]], world: int, paddings: Sequence[int] | None = None) -> Group:
    """Place a group's parameters for `world` ranks; `paddings` are elements that follow each of them."""
    members: dict[str, Interval] = {}
    end = 0
    for number, (name, shape) in enumerate(shapes.items()):
        numel = math.prod(shape)
        members[name] = Interval(end, end + numel)
        end += numel + (paddings[number] if paddings else 0)
    return Group(world, members, end)


def part_size(numel: int, world: int) -> int:
    """Elements of a parameter that each rank holds at stage 3, padding included."""
    return -(-numel // world)


def parts(numel: int, world: int) -> Iterator[tuple[int, Interval]]:
    """Each rank's elements of a parameter at stage 3; ranks that have none are left out."""
    size = part_size(numel, world)
    for rank in range(world):
        part = Interval(0, numel).intersection(Interval(rank * size, (rank + 1) * size))
        if part.numel:
            yield rank, part


def sub_groups(groups: Sequence[Mapping[str, Sequence[int]]], world: int, limit: int) -> Iterator[SubGroup]:
    """Sub-groups as DeepSpeed makes them: each ends with the parameter that fills `limit` elements a rank."""
    for number, shapes in enumerate(groups):
        members: dict[str, int] = {}
        filled = 0
        for name, shape in shapes.items():
            members[name] = math.prod(shape)
            filled += part_size(members[name], world)
            if filled >= limit:
                yield SubGroup(world, number, members)
                members, filled = {}, 0
        if members:
            yield SubGroup(world, number, members)


def saved_sub_groups(
    groups: Sequence[Mapping[str, Sequence[int]]],
    world: int,
    sizes: Sequence[int],
    group_of: Mapping[int, int],
) -> list[SubGroup]:
    """The sub-groups of a checkpoint: of `sizes` elements a rank, each of the group that `group_of` says.

    Raises `ValueError` where they do not end between parameters.
    """
    found: list[SubGroup] = []
    members: dict[str, int] = {}
    filled = 0
    for name, shape in ((name, shape) for shapes in groups for name, shape in shapes.items()):
        members[name] = math.prod(shape)
        filled += part_size(members[name], world)
        number = len(found)
        if number >= len(sizes) or filled > sizes[number]:
            raise ValueError(
                f"its sub-groups have {list(sizes)} elements and do not end between parameters, at {name}: zerokit "
                "does not read states that were offloaded to NVMe"
            )
        if filled == sizes[number]:
            found.append(SubGroup(world, group_of[number], members))
            filled, members = 0, {}
    if len(found) != len(sizes) or members:
        raise ValueError(f"{len(sizes)} sub-groups, but parameters fill {len(found)}")
    return found
