"""int8 and int4 wires: blocks of small integers with one scale each.

A piece of n elements travels as ⌈n/B⌉ blocks, the last of which may be shorter:

    int8, B = 256   | 256 integers, a byte each         | scale, bf16 |    258 bytes, 1.008 an element
    int4, B = 128   |  64 bytes, two integers in each   | scale, bf16 |     66 bytes, 0.516 an element

An element x becomes the integer nearest to x / scale. By a key, a number from (−½, ½) is added to x / scale before, a
hash of the key and the element's position in the unit, so that the integer is right on average.

Integer times scale has at most 16 bits, so terms are exact in fp32. A block with inf or nan arrives as inf or nan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from zerokit.layout import Unit
from zerokit.runtime.collectives.route import Wire
from zerokit.runtime.wires.rounding import Key, noise
from zerokit.sizes import BlockFormat

_CHUNK = {"cpu": 1 << 18}
"""Elements at a time: on hosts so few that they stay in a core's cache from one operation to the next."""
_DEVICE_CHUNK = 1 << 22  # on a device: temporary memory of some 64 MiB
_SMALLEST_SCALE = 2.0**-120  # zeros stay zeros, and one over it is finite


class QuantisedWire(Wire):
    """The wire of one term of a sum, in blocks of `form`.

    Args:
        form: bits an element, and elements a block.
        draw: gives the key by which the next term is rounded at random. None: to nearest.
    """

    every_hop = False

    def __init__(self, form: BlockFormat, draw: Callable[[], Key] | None = None) -> None:
        super().__init__(torch.uint8)
        self.form, self.block, self._draw = form, form.block, draw
        self._most = 2 ** (form.bits - 1) - 1

    def packed_numel(self, numel: int) -> int:
        return self.form.nbytes(numel)

    def nbytes(self, unit: Unit) -> int:
        return self.form.unit_nbytes(unit)

    def pack(self, pieces: Tensor, share: float = 1.0, out: Tensor | None = None) -> Tensor:
        size, numel = pieces.shape
        packed = out
        if packed is None:
            packed = torch.empty(size, self.packed_numel(numel), dtype=torch.uint8, device=pieces.device)
        key = None if self._draw is None else self._draw()
        for blocks, records, offset in self._chunks(pieces, packed):
            x = blocks if share == 1.0 else blocks * share
            scale = self._scales(x)
            steps = scale.unsqueeze(-1)
            y = x * steps.reciprocal()
            if key is not None:
                y.add_(noise(key, numel, offset, y))
            self._store(y.round_(), steps, records)
        return packed

    def unpack(self, packed: Tensor, out: Tensor, *, add: bool) -> None:
        for blocks, records, _ in self._chunks(out[None], packed[None]):
            scale = records[..., -2:].view(torch.bfloat16).float()
            numbers = self._load(records[..., :-2])
            if add:
                blocks.addcmul_(numbers, scale)
            else:
                torch.mul(numbers, scale, out=blocks)

    def _chunks(self, values: Tensor, packed: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Whole blocks [size, blocks, B] with their records, then what is left, each with its offset in a piece."""
        size, piece = values.shape
        whole = piece // self.block
        step = max(_CHUNK.get(values.device.type, _DEVICE_CHUNK) // (size * self.block), 1)
        record = self.packed_numel(self.block)
        for first in range(0, whole, step):
            last = min(first + step, whole)
            yield (
                values[:, first * self.block : last * self.block].unflatten(1, (-1, self.block)),
                packed[:, first * record : last * record].unflatten(1, (-1, record)),
                first * self.block,
            )
        if whole * self.block < piece:
            yield (
                values[:, None, whole * self.block :],
                packed[:, None, whole * record :],
                whole * self.block,
            )

    def _scales(self, x: Tensor) -> Tensor:
        """What one unit of the integers stands for, in each block: rounded up to bf16, in fp32."""
        # A little more than the largest needs, so that no rounding takes it over the last integer.
        scale = torch.maximum(x.amax(-1), x.amin(-1).neg_()).mul_(1.0 / (self._most - 0.01))
        bits = scale.clamp_min_(_SMALLEST_SCALE).view(torch.int32)
        return bits.add_(0xFFFF).bitwise_and_(-0x10000).view(torch.float32)

    def _store(self, y: Tensor, steps: Tensor, records: Tensor) -> None:
        records[..., -2:].view(torch.bfloat16).copy_(steps)
        if self.form.bits == 8:
            records[..., :-2].view(torch.int8).copy_(y)
            return
        half = y.shape[-1] // 2
        both = y[..., :half].add(y[..., half:], alpha=16.0).add_(8.0 * 17.0)
        records[..., :-2].copy_(both)

    def _load(self, stored: Tensor) -> Tensor:
        if self.form.bits == 8:
            return stored.view(torch.int8).float()
        numbers = torch.empty(
            *stored.shape[:-1], 2 * stored.shape[-1], dtype=torch.float32, device=stored.device
        )
        numbers[..., : stored.shape[-1]].copy_(stored & 15)
        numbers[..., stored.shape[-1] :].copy_(stored >> 4)
        return numbers.sub_(8.0)
