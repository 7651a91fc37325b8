"""A model that does not fit equally into two unequal memory limits trains with `shares="memory"`.

Each rank is in a control group of its own, where the machine allows it; the limits are simulated as well, everywhere.
"""

from __future__ import annotations

import re
import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.control_groups import memory_group
from tests.support.distributed import run_ranks, run_ranks_expecting_errors

MB = 1_000_000
LIMITS = (800 * MB, 350 * MB)
WIDTH, LAYERS, STEPS = 1024, 40, 3
BUFFERS = 72 * MB
"""At least what a rank takes beyond `memory()`: activations, pages that it shared with the server of ranks before, and
freed memory that the heap keeps."""


def _model() -> nn.Module:
    """42 million parameters in layers of 4.2 MB: 671 MB with gradients and AdamW's states."""
    torch.manual_seed(3)
    with torch.device("meta"):
        return nn.Sequential(
            *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)), nn.LayerNorm(WIDTH)
        )


@dataclass
class Trained:
    losses: list[str]
    shares: tuple[int, ...]
    predicted: int


def _train(shares: Any, groups: list[str] | None = None, free: Any = None) -> Trained:
    """`groups` are what ranks enter, after the imports; `free` simulates what is free."""
    rank = dist.get_rank()
    with ExitStack() as undo:
        if groups:
            Path(groups[rank], "cgroup.procs").write_text("0")
        if free:
            pools = {str(rank): free[rank]}
            undo.enter_context(patch("zerokit.runtime.shares.memory_pools", lambda: pools))
        optimizer = zerokit.ZeroOptimizer(
            model := _model(), torch.optim.AdamW, lr=1e-3, stage=3, shares=shares, bucket_mb=4
        )
        losses = []
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + rank)
            loss = model(torch.randn(4, WIDTH, generator=generator)).square().sub(0.5).square().mean()
            optimizer.backward(loss)
            optimizer.step()
            losses.append(loss.item().hex())
    predicted = optimizer.predicted_memory()
    most = predicted.total + max(predicted.transient, predicted.exchange, predicted.visiting)
    return Trained(losses, optimizer.layout.shares, most)


def test_shares_by_memory_train_what_does_not_fit_equally() -> None:
    equal = run_ranks(2, _train, None)
    simulated = run_ranks(2, _train, "memory", None, LIMITS)
    assert equal[1].predicted > LIMITS[1]
    assert sum(rank.predicted for rank in equal) + 2 * BUFFERS < sum(LIMITS)
    for rank, (found, limit) in enumerate(zip(simulated, LIMITS, strict=True)):
        assert found.losses == equal[rank].losses
        assert found.predicted + BUFFERS < limit
    with memory_group(LIMITS[0]) as large, memory_group(LIMITS[1]) as small:
        if large is None or small is None:
            return  # what is above has checked the arithmetic
        limited = run_ranks(2, _train, "memory", [str(large), str(small)])
        for rank, found in enumerate(limited):
            assert found.losses == equal[rank].losses
            assert found.shares[0] > 1.5 * found.shares[1]
    with memory_group(LIMITS[0]) as large, memory_group(LIMITS[1]) as small:
        killed = run_ranks_expecting_errors(2, _train, None, [str(large), str(small)], timeout=60.0)
        assert killed[1].exitcode == -signal.SIGKILL
        assert not killed[0].ok
        assert re.search("rank 1", killed[0].error)
