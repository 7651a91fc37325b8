"""Process groups of any shape: subsets of the ranks, of which each rank belongs to others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.on_ranks import on_ranks


def _train(group: dist.ProcessGroup | None) -> list[float]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = zerokit.ZeroOptimizer(
        model, torch.optim.AdamW, stage=3, precision="fp32", lr=1e-2, process_group=group
    )
    losses = []
    for _ in range(2):
        loss = model(torch.ones(3, 4)).square().sum()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@on_ranks(4, timeout=20.0)
def test_ranks_may_belong_to_different_numbers_of_groups() -> None:
    """Stages {0, 1} and {2, 3} of a pipeline; first and last rank share an embedding, one is in a group by itself."""
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 3), (0,), (0, 1), (2, 3), (1, 2))}
    mine = groups[(0, 1) if rank < 2 else (2, 3)]
    found = [_train(mine), _train(mine)]
    if rank in (1, 2):
        found.append(_train(groups[1, 2]))
    found.append(_train(None))
    assert all(losses == found[0] for losses in found)
