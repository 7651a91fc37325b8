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
    interval: Interval
    start: int


@dataclass(frozen=True, slots=True)
class Cut:
    """A group (stages 1 and 2) or a sub-group (stage 3) of optimizer group `group`, cut for ranks.

    Each rank has `partition` elements, of which `unpadded` (by rank) come before the padding at the end, and `pieces`
    (by rank) of parameters in them.
    """

    group: int
    members: tuple[str, ...]
    partition: int
    unpadded: tuple[int, ...]
    pieces: tuple[list[Piece], ...]


def group_of(
    number: int, shapes: Mapping[str, Sequence[int]], world: int, paddings: Sequence[int] | None = None
) -> Cut:
    """A group of stages 1 and 2; `paddings` are elements that follow each of its parameters."""
    places: dict[str, Interval] = {}
    end = 0
    for index, (name, shape) in enumerate(shapes.items()):
        places[name] = Interval(end, end + math.prod(shape))
        end = places[name].stop + (paddings[index] if paddings else 0)
    size = -(-end // (ALIGNMENT * world)) * ALIGNMENT
    pieces: tuple[list[Piece], ...] = tuple([] for _ in range(world))
    for name, place in places.items():
        for rank in range(place.start // max(size, 1), world):
            part = place.intersection(Interval(rank * size, (rank + 1) * size))
            if not part.numel:
                break
            pieces[rank].append(Piece(name, part.shifted(-place.start), part.start - rank * size))
    unpadded = tuple(min(size, max(0, end - rank * size)) for rank in range(world))
    return Cut(number, tuple(places), size, unpadded, pieces)


def _sub_group(group: int, numels: Mapping[str, int], world: int) -> Cut:
    pieces: tuple[list[Piece], ...] = tuple([] for _ in range(world))
    size = 0
    for name, numel in numels.items():
        for rank, part in parts(numel, world):
            pieces[rank].append(Piece(name, part, size))
        size += part_size(numel, world)
    return Cut(group, tuple(numels), size, (size,) * world, pieces)


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


def sub_groups(groups: Sequence[Mapping[str, Sequence[int]]], world: int, limit: int) -> Iterator[Cut]:
    """Sub-groups as DeepSpeed makes them: each ends with the parameter that fills `limit` elements a rank."""
    for number, shapes in enumerate(groups):
        members: dict[str, int] = {}
        filled = 0
        for name, shape in shapes.items():
            members[name] = math.prod(shape)
            filled += part_size(members[name], world)
            if filled >= limit:
                yield _sub_group(number, members, world)
                members, filled = {}, 0
        if members:
            yield _sub_group(number, members, world)


def saved_sub_groups(
    groups: Sequence[Mapping[str, Sequence[int]]],
    world: int,
    sizes: Sequence[int],
    groups_of: Mapping[int, int],
) -> list[Cut]:
    """The sub-groups of a checkpoint: of `sizes` elements a rank, each of the group that `groups_of` says.

    Raises `ValueError` where they do not end between parameters.
    """
    found: list[Cut] = []
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
            found.append(_sub_group(groups_of[number], members, world))
            filled, members = 0, {}
    if len(found) != len(sizes) or members:
        raise ValueError(f"{len(sizes)} sub-groups, but parameters fill {len(found)}")
    return found
