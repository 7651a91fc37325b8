"""Intervals of elements, and cuts: where a stretch of elements is divided into neighbouring intervals.

    bounds  0          128         256         384      Cut.equal(numel=300, pieces=3)
    pieces  |-- 0 -----|--- 1 -----|--- 2 -----|
    owners                  |---------|                 of Interval(150, 270): pieces 1 and 2

Standard library only.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

ALIGNMENT = 64
"""Elements. 64 fp32 elements are four cache lines and no fewer than any CPU's or GPU's vector width."""


def align(numel: int, alignment: int = ALIGNMENT) -> int:
    """The smallest multiple of `alignment` that is at least `numel`."""
    return -(-numel // alignment) * alignment


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """An interval of elements, `start` to `stop` (exclusive)."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def intersection(self, other: Interval) -> Interval:
        """The intersection; an empty interval if they do not overlap."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.stop, other.stop)))

    def shifted(self, by: int) -> Interval:
        return Interval(self.start + by, self.stop + by)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a stretch of elements is divided among ranks: ascending `bounds`, one more than there are pieces."""

    bounds: Sequence[int]

    @classmethod
    def equal(cls, numel: int, pieces: int, alignment: int = ALIGNMENT) -> Cut:
        """Equal pieces, each a multiple of `alignment`, for at least `numel` elements from 0 on."""
        size = align(-(-numel // pieces), alignment)
        # A range is as small for thousands of ranks as for two.
        return cls(range(0, size * pieces + 1, size) if size else (0,) * (pieces + 1))

    @classmethod
    def weighted(cls, numel: int, shares: Sequence[int], alignment: int = ALIGNMENT) -> Cut:
        """Pieces in proportion to `shares`, for at least `numel` elements from 0 on.

        Bounds are rounded up to multiples of `alignment`, so a piece is as large as its share to within one alignment,
        and one of share 0 is empty. Equal shares give equal pieces.
        """
        if len(set(shares)) == 1:
            return cls.equal(numel, len(shares), alignment)
        total = sum(shares)
        return cls((0, *(align(-(-numel * end // total), alignment) for end in accumulate(shares))))

    def __len__(self) -> int:
        """The number of pieces."""
        return len(self.bounds) - 1

    @property
    def is_equal(self) -> bool:
        """Whether all pieces have the same number of elements."""
        bounds, size = self.bounds, self.bounds[1] - self.bounds[0]
        return isinstance(bounds, range) or all(b - a == size for a, b in pairwise(bounds))

    @property
    def whole(self) -> Interval:
        """What is divided."""
        return Interval(self.bounds[0], self.bounds[-1])

    @property
    def piece_numel(self) -> int:
        """Elements of each piece, for what works on equal ones only. Raises `ValueError` for a cut into others."""
        if not self.is_equal:
            raise ValueError(
                f"expected a cut into equal pieces, not one at {', '.join(map(str, self.bounds))}"
            )
        return self.bounds[1] - self.bounds[0]

    def piece(self, index: int) -> Interval:
        return Interval(self.bounds[index], self.bounds[index + 1])

    def owners(self, interval: Interval) -> Sequence[int]:
        """The pieces that hold some of an interval, in order; none if it is empty."""
        if not interval.numel:
            return range(0)
        near = range(bisect_right(self.bounds, interval.start) - 1, bisect_left(self.bounds, interval.stop))
        if isinstance(self.bounds, range):
            return near
        return tuple(piece for piece in near if self.bounds[piece] < self.bounds[piece + 1])

    def joined(self, count: int) -> Cut:
        """The coarser cut that joins each `count` neighbours, which divides the number of pieces."""
        return Cut(self.bounds[::count])

    def part(self, first: int, count: int) -> Cut:
        """The cut of `count` neighbouring pieces alone, from piece `first` on."""
        return Cut(self.bounds[first : first + count + 1])


MAX_SHARE = 1 << 20


def reduced(world: int, shares: Sequence[int]) -> tuple[int, ...]:
    """The same shares without a common divisor; none where all are equal.

    Raises `ValueError` for a world size below 1, and for shares that are not one of 0 to `MAX_SHARE` for each rank, or
    all 0.
    """
    if world < 1:
        raise ValueError(f"a layout needs a world size of at least 1, not {world}")
    if not shares:
        return ()
    if len(shares) != world:
        raise ValueError(f"{len(shares)} shares are given, expected one for each of {world} ranks")
    if not all(type(share) is int and 0 <= share <= MAX_SHARE for share in shares) or not any(shares):
        raise ValueError(
            f"shares {', '.join(map(str, shares))[:60]}: expected integers from 0 to {MAX_SHARE}, not all of them 0"
        )
    divisor = math.gcd(*shares)
    return () if len(set(shares)) == 1 else tuple(share // divisor for share in shares)
