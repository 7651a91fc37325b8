"""Eight-bit floats with a scale for each block of 64: the form in which moments are kept.

    codes   c0 c1 … c63 | c64 … c127 | c128 …   one byte an element: E4M3 or E5M2
    scales       s0     |     s1     | s2       float32, one a block; the last block may be shorter

An element is its code times its block's scale, which makes the largest finite element of a block the format's largest
number. A scale has so few bits that the product is exact, so what was decoded is encoded again as the very same codes
and scales. Scales are fine steps and no powers of two: where all squares of a block shrink by a thousandth, their scale
shrinks, although no code would change.

inf and nan become nan, and the rest of their block is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zerokit.sizes import FP8_BLOCK

BLOCK = FP8_BLOCK
"""Elements with one scale: every slice of a parameter begins at a multiple of it."""

_DROPPED = 4
"""The last bits of a scale that are zero: a code has as many at most, so that a product is exact."""

_LARGEST = {
    dtype: math.ldexp(
        math.floor(math.ldexp(torch.finfo(torch.float32).max / torch.finfo(dtype).max, at)), -at
    )
    for dtype, at in ((torch.float8_e4m3fn, -100), (torch.float8_e5m2, -93))
}
"""The largest scales, with as few bits."""

_CHUNK = {"cpu": 1 << 16}
"""Elements at a time: on hosts so few that they stay in a core's cache from one operation to the next."""
_DEVICE_CHUNK = 1 << 24


class Codes(NamedTuple):
    """Encoded elements: `codes` in the format's dtype [n], `scales` in float32 [⌈n / 64⌉]."""

    codes: Tensor
    scales: Tensor

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def at(self, start: int, stop: int) -> Codes:
        """Those of elements that begin with a block, and end with one or with all that it has."""
        return Codes(self.codes[start:stop], self.scales[start // BLOCK : -(-stop // BLOCK)])


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """A format of codes.

    Args:
        dtype: `torch.float8_e4m3fn` or `torch.float8_e5m2`.
        keeps_small: positive numbers too small for a code become the smallest one, and not zero. Over the square root
            of a square that became zero, a first moment would be an update without bounds.
    """

    dtype: torch.dtype
    keeps_small: bool = False

    def empty(self, numel: int, device: torch.device) -> Codes:
        """Room for so many elements."""
        scales = torch.empty(-(-numel // BLOCK), dtype=torch.float32, device=device)
        return Codes(torch.empty(numel, dtype=self.dtype, device=device), scales)

    def encode(self, values: Tensor, out: Codes) -> None:
        """Encode `values` [n], in float32."""
        form, wide = torch.finfo(self.dtype), torch.finfo(torch.float32)
        least = form.smallest_normal * form.eps
        for blocks, codes, scales in _chunks(values, out):
            size = blocks.abs()
            scale = size.nan_to_num_(0.0, 0.0).amax(-1).mul_(1.0 / form.max)
            # To nearest: an error in the last bits of that product does not matter to what was decoded.
            bits = scale.view(torch.int32).add_(1 << (_DROPPED - 1)).bitwise_and_(-(1 << _DROPPED))
            # The smallest code's product has all its bits, and the largest one's is finite.
            scale = bits.view(torch.float32).clamp_(wide.tiny / least, _LARGEST[self.dtype])
            scales.copy_(scale)
            ratio = torch.div(blocks, scale.unsqueeze(-1), out=size)
            ratio.masked_fill_(ratio.isinf(), math.nan)  # which a cast may take for the largest number
            if self.keeps_small:
                ratio = torch.where(blocks > 0, ratio.clamp_min(least), ratio)
            codes.copy_(ratio)


def decode(codes: Codes, out: Tensor) -> None:
    """Write the elements to `out` [n], in float32, which may be the codes' values already."""
    for blocks, each, scales in _chunks(out, codes):
        blocks.copy_(each).mul_(scales.unsqueeze(-1))


def _chunks(values: Tensor, codes: Codes) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Whole blocks [blocks, 64] of elements and codes with their scales [blocks], then what is left in one block."""
    numel = values.numel()
    whole = numel - numel % BLOCK
    step = _CHUNK.get(values.device.type, _DEVICE_CHUNK)
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        yield (
            values[start:stop].unflatten(0, (-1, BLOCK)),
            codes.codes[start:stop].unflatten(0, (-1, BLOCK)),
            codes.scales[start // BLOCK : stop // BLOCK],
        )
    if whole < numel:
        yield values[None, whole:], codes.codes[None, whole:], codes.scales[whole // BLOCK :]
