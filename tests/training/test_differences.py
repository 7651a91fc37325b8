"""What a narrow wire between islands rounds away of a movement: it comes with the next one."""

from __future__ import annotations

import pytest
import torch

from zerokit.sizes import BLOCK_FORMATS
from zerokit.training.differences import Differences


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_what_is_lost_is_sent_later(name: str) -> None:
    """Small movements beside large ones arrive in the sum, though rounding alone would never send them."""
    generator = torch.Generator().manual_seed(0)
    one = Differences(BLOCK_FORMATS[name], 2, 512)
    one.known.copy_(torch.randn(one.known.shape, generator=generator))
    sent, moved = torch.zeros(2, 448), torch.zeros(2, 448)
    for _ in range(100):
        movement = torch.randn(moved.shape, generator=generator) * 1e-3 + 1e-3
        movement[:, ::128] = 1.0
        moved += movement
        packed = one.pack_movement(one.known[:, 64:] + movement, 64, 512)
        for row, term in zip(sent, packed, strict=True):
            row += one.mean_movement(term[None], 448)
        assert torch.allclose(sent + one.lost[:, 64:], moved, rtol=0, atol=1e-3)
    assert (sent - moved).abs().max() < 1.05 / (2 ** (BLOCK_FORMATS[name].bits - 1) - 1) / 2
    assert not one.lost[:, :64].any()
    movement[0, 3] = float("inf")
    packed = one.pack_movement(one.known[:, 64:] + movement, 64, 512)
    assert not one.mean_movement(packed[:1], 448).isfinite().all()
    assert one.mean_movement(packed[1:], 448).isfinite().all()
    assert one.lost.isfinite().all()
