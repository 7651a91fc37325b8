"""The garbage collector comes when it will."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.on_ranks import on_ranks


@on_ranks(2, (1, 2), timeout=60.0)
def test_an_optimizer_collected_on_one_rank_alone_holds_up_nobody(stage: Any) -> None:
    """Rank 0 collects an optimizer that rank 1 still has, which waits in another one's collectives by then."""
    gc.disable()
    first = nn.Linear(64, 64)
    optimizer = zerokit.ZeroOptimizer(first, torch.optim.SGD, stage=stage, lr=0.1)
    optimizer.backward(first(torch.ones(2, 64)).float().sum())
    optimizer.step()
    cycle: list[Any] = [optimizer]
    cycle.append(cycle)
    second = nn.Linear(64, 64)
    other = zerokit.ZeroOptimizer(second, torch.optim.SGD, stage=stage, lr=0.1)
    del optimizer, cycle
    if dist.get_rank() == 0:
        gc.collect()
    other.backward(second(torch.ones(2, 64)).float().sum())
    other.step()


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


@on_ranks(2, (False, True), timeout=60.0)
def test_groups_of_collected_optimizers_are_destroyed_with_their_threads(
    islands: bool, tmp_path: Path
) -> None:
    threads = []
    where: Any = {"stage": ("local", 2), "mesh": (2, 1)} if islands else {"stage": 2}
    for step in range(4):
        model = nn.Linear(8, 8)
        optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, lr=0.1, **where)
        local = zerokit.LocalSteps(optimizer, every=1) if islands else None
        optimizer.backward(model(torch.ones(2, 8)).float().sum())
        optimizer.step()
        zerokit.save(tmp_path / str(islands), optimizer, step=step)  # over a group of its own
        del model, optimizer, local
        gc.collect()
        threads.append(_threads())
        deadline = time.monotonic() + 20.0
        while threads[-1] > threads[0] and time.monotonic() < deadline:
            time.sleep(0.05)  # a thread that works off tasks ends by itself, when it gets to it
            threads[-1] = _threads()
    assert max(threads) == threads[0], threads  # a group that stays has three threads or more
