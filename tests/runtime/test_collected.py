"""The garbage collector comes when it will."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.distributed import run_ranks


def _drop_in_a_cycle(stage: int) -> float:
    """Rank 0 collects an optimizer that rank 1 still has, which waits in another one's collectives by then."""
    gc.disable()
    first = nn.Linear(64, 64)
    optimizer = zerokit.ZeroOptimizer(first, torch.optim.SGD, stage=stage, lr=0.1)  # type: ignore[arg-type]
    optimizer.backward(first(torch.ones(2, 64)).float().sum())
    optimizer.step()
    cycle = [optimizer]
    cycle.append(cycle)  # type: ignore[arg-type]
    second = nn.Linear(64, 64)
    other = zerokit.ZeroOptimizer(second, torch.optim.SGD, stage=stage, lr=0.1)  # type: ignore[arg-type]
    del optimizer, cycle
    if dist.get_rank() == 0:
        gc.collect()
    loss = second(torch.ones(2, 64)).float().sum()
    other.backward(loss)
    other.step()
    return float(loss.detach())


def test_an_optimizer_collected_on_one_rank_alone_holds_up_nobody() -> None:
    for stage in (1, 2):
        run_ranks(2, _drop_in_a_cycle, stage, timeout=60.0, deadline=100.0)
