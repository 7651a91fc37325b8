"""Fragments: the parts of a model that islands synchronise in turn, and how each is cut over the islands.

    line        | unit 0 | unit 1 |  unit 2  | unit 3 |
    fragments   |--- fragment 0 --|--- fragment 1 ----|      2 fragments of neighbouring units, of similar size
    region      | shard of unit 0 | shard of unit 1 |pad|    of fragment 0, on rank s of each island
    pieces      |  island 0's     |  island 1's       |      rank (m, s) owns piece m: its anchor, its outer states

A rank's region joins its shards (of `layout`, cut for the ranks of one island) end to end, so that all islands' ranks
of one number have the same region. Invariant: the pieces of all ranks tile all trainable parameters exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from zerokit.errors import UsageError
from zerokit.layout import Cut, Interval, Layout, Unit
from zerokit.sizes import BlockFormat
from zerokit.training.differences import Differences


@dataclass(frozen=True, slots=True)
class Fragment:
    """Units that are synchronised together, after step `offset` of each round (1 to the length of a round)."""

    index: int
    units: tuple[Unit, ...]
    offset: int

    @property
    def payload_numel(self) -> int:
        """Elements of its parameters, without padding."""
        return sum(unit.payload_numel for unit in self.units)


def divide(layout: Layout, count: int, every: int) -> tuple[Fragment, ...]:
    """The trainable units in `count` fragments of neighbours, cut where that leaves them most alike in size.

    Each is synchronised once in `every` steps. Their turns lie apart as their sizes are: a link that takes each within
    its turn carries the same all the time. Raises `UsageError` for fewer units than fragments.
    """
    units = [unit for unit in layout.units if unit.trainable]
    if not 1 <= count <= len(units):
        raise UsageError(
            f"fragments={count}: the model has {len(units)} units with trainable parameters, and a fragment is at "
            f"least one: pass at most {len(units)}, or a smaller bucket_mb= or other units= to ZeroOptimizer"
        )
    ends, before = [0], 0
    for unit in units:
        before += unit.payload_numel
        ends.append(before)
    total = max(before, 1)
    cuts = [0]
    for number in range(1, count):
        choices = range(cuts[-1] + 1, len(units) - (count - number) + 1)
        cuts.append(min(choices, key=lambda cut: abs(ends[cut] * count - number * total)))
    cuts.append(len(units))
    return tuple(
        Fragment(
            number, tuple(units[start:stop]), max(1, -(-every * ends[stop] // total)) if before else every
        )
        for number, (start, stop) in enumerate(pairwise(cuts))
    )


class Part:
    """What rank `rank` of an island has of a fragment: a region in equal pieces, one for each of the `islands`.

    Attributes:
        own: this rank's piece of the region, that of number `island`.
        anchor: [piece_numel] the weights that all islands last agreed on, of this rank's piece. None where nothing is
            kept.
        differences: on a narrow wire of this `form`, what this rank knows and owes.
    """

    def __init__(
        self,
        fragment: Fragment,
        rank: int,
        islands: int,
        island: int,
        form: BlockFormat | None = None,
        *,
        kept: bool = False,
    ) -> None:
        self.fragment, self.rank, self.island = fragment, rank, island
        cut = Cut.equal(sum(unit.shard(rank).numel for unit in fragment.units), islands)
        own = cut.piece(island)
        self.numel, self.piece_numel = cut.whole.numel, own.numel
        self.own = slice(own.start, own.stop)
        self.anchor = nn.Parameter(torch.zeros(self.piece_numel, dtype=torch.float32)) if kept else None
        self.differences = None if form is None else Differences(form, islands, self.piece_numel)

    def shards(self) -> Iterator[tuple[Unit, slice]]:
        """Each unit, and where its shard lies in the region."""
        start = 0
        for unit in self.fragment.units:
            stop = start + unit.shard(self.rank).numel
            yield unit, slice(start, stop)
            start = stop

    def payload(self, part: slice) -> int:
        """Elements of parameters in a part of the region."""
        total = 0
        for unit, place in self.shards():
            both = Interval(place.start, place.stop).intersection(Interval(part.start, part.stop))
            if both.numel:
                total += unit.payload_within(both.shifted(unit.shard(self.rank).start - place.start))
        return total

    def split(self, values: Tensor) -> dict[int, Tensor]:
        """The shards, by unit, that `values` [numel of the region] consists of. Shares its memory."""
        return {unit.index: values[place] for unit, place in self.shards()}

    def join(self, shards: Mapping[int, Tensor]) -> Tensor:
        """The region [numel] that consists of these shards, by unit."""
        region = torch.zeros(self.numel, dtype=torch.float32)
        for index, place in self.split(region).items():
            place.copy_(shards[index])
        return region

    @torch.no_grad()
    def set_anchor(self, region: Tensor) -> None:
        """Take this rank's piece of `region` for the anchor."""
        if self.anchor is not None:
            self.anchor.copy_(region[self.own])
