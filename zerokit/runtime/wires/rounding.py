"""Rounding at random, by keys: each is a pair of words for a hash of an element's position.

Nothing is kept of what was rounded away. Keys follow from (epoch, turn, unit, rank), where a saved step names the
epoch, so a run that goes on and one that resumes round alike.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor

Key: TypeAlias = tuple[int, int]
"""Two signed 32-bit words."""

_MIX = (0x2C1B3C6D, 0x297A2D39)
"""Odd factors of a 32-bit hash (C. Wellons, "Prospecting for hash functions", 2018)."""


class Draws:
    """The keys of one rank: of each unit another one in every turn."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self.begin(None)

    def begin(self, epoch: object, turns: Mapping[int, int] | None = None) -> None:
        """Draw from here on as every run does that begins `epoch` here, or that is in it after so many `turns`."""
        self._epoch, self._turns = epoch, Counter(turns)

    def state(self) -> tuple[object, dict[int, int]]:
        """The arguments with which `begin` continues from here."""
        return self._epoch, dict(self._turns)

    def key(self, unit: int) -> Key:
        """The key of the unit's next turn."""
        self._turns[unit] += 1
        return rounding_key(0, self._epoch, self._turns[unit], unit, self._rank)


def rounding_key(*parts: object) -> Key:
    """A key derived from the `repr` of its parts, such as (step, unit, rank)."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return (
        int.from_bytes(digest[:4], "little", signed=True),
        int.from_bytes(digest[4:], "little", signed=True),
    )


def noise(key: Key, piece: int, offset: int, like: Tensor) -> Tensor:
    """Uniform in (−½, ½), in the shape of `like` at `offset` of each `piece`: 16 bits of a hash of each position."""
    size, device = like.shape[0], like.device
    starts = torch.arange(size, dtype=torch.int32, device=device)[:, None] * (piece // 2) + offset // 2
    bits = starts + torch.arange(like[0].numel() // 2, dtype=torch.int32, device=device).add_(key[0])
    bits.mul_(_MIX[0])
    bits.bitwise_xor_(bits >> 15).add_(key[1]).mul_(_MIX[1])
    drawn: Tensor = bits.view(torch.int16).float().view(like.shape)
    return drawn.mul_(2.0**-16).add_(2.0**-17)
