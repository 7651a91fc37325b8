"""The garbage collector comes when it will."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import pytest
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
        run_ranks(2, _drop_in_a_cycle, stage, timeout=60.0)


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _many_optimizers(folder: Path, islands: bool) -> list[int]:
    threads = []
    where: Any = {"stage": ("local", 2), "mesh": (2, 1)} if islands else {"stage": 2}
    for step in range(4):
        model = nn.Linear(8, 8)
        optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, lr=0.1, **where)
        local = zerokit.LocalSteps(optimizer, every=1) if islands else None
        optimizer.backward(model(torch.ones(2, 8)).float().sum())
        optimizer.step()
        zerokit.save(folder, optimizer, step=step)  # over a group of its own
        del model, optimizer, local
        gc.collect()
        threads.append(_threads())
        deadline = time.monotonic() + 20.0
        while threads[-1] > threads[0] and time.monotonic() < deadline:
            time.sleep(0.05)  # a thread that works off tasks ends by itself, when it gets to it
            threads[-1] = _threads()
    return threads


@pytest.mark.parametrize("islands", [False, True])
def test_groups_of_collected_optimizers_are_destroyed_with_their_threads(
    islands: bool, tmp_path: Path
) -> None:
    for threads in run_ranks(2, _many_optimizers, tmp_path, islands, timeout=60.0):
        assert max(threads) == threads[0], threads  # a group that stays has three threads or more
