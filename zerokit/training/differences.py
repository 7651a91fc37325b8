"""Weights between islands on an int8 or int4 wire: as differences from what all islands know.

After each synchronisation all islands know the same weights of a region, which are the exact ones up to the rounding
of the wire. An island sends how its weights have moved since then. The mean movement is applied to the exact anchor,
which its owner alone has, and the owner sends how the new anchor differs from what all know. All add the same rounded
numbers, so that they keep knowing the same. What rounding takes away of an island's movement is added to its next one;
what it takes away of the owner's difference is part of the next difference.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zerokit.runtime.wires import QuantisedWire
from zerokit.sizes import BlockFormat

KNOWN, LOST = "known", "lost"
"""The names of their streams in a checkpoint."""


class Differences:
    """What one rank keeps of a region of `islands` pieces, 8 bytes an element.

    Attributes:
        known: [islands × piece] the weights that all islands have agreed on; equal on all of them.
        lost: [islands × piece] what rounding took away of this island's movements.
    """

    def __init__(self, form: BlockFormat, islands: int, piece: int) -> None:
        self.form, self.block = form, form.block
        self.known = torch.zeros(islands, piece, dtype=torch.float32)
        self.lost = torch.zeros_like(self.known)

    def pack_movement(self, weights: Tensor, start: int, stop: int) -> Tensor:
        """How `weights` [islands, stop − start] differ from what is known of that stretch of each piece."""
        wire, lost = QuantisedWire(self.form), self.lost[:, start:stop]
        moved = lost + (weights - self.known[:, start:stop])
        packed = wire.pack(moved)
        for term, piece, sent in zip(packed, moved, torch.empty_like(moved), strict=True):
            wire.unpack(term, sent, add=False)
            piece.sub_(sent)
        lost.copy_(moved.nan_to_num_(0.0, 0.0, 0.0))  # a block that overflowed leaves nothing behind
        return packed

    def mean_movement(self, packed: Tensor, numel: int) -> Tensor:
        """The mean [numel] of what each island has sent."""
        wire, total = QuantisedWire(self.form), torch.zeros(numel, dtype=torch.float32)
        for term in packed:
            wire.unpack(term, total, add=True)
        return total.div_(len(packed))

    def pack_result(self, own: Tensor, island: int, start: int, stop: int) -> Tensor:
        """How the new weights [stop − start] of this island's piece differ from what is known."""
        return QuantisedWire(self.form).pack((own - self.known[island, start:stop])[None])

    def learn(self, packed: Tensor, start: int, stop: int) -> Tensor:
        """Take over what the owner of each piece has sent; what all know now, [islands, stop − start]."""
        wire = QuantisedWire(self.form)
        for term, piece in zip(packed, self.known, strict=True):
            wire.unpack(term, piece[start:stop], add=True)
        return self.known[:, start:stop]
