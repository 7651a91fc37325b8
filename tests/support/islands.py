"""A small model for islands that train by themselves: how it is built, wrapped, and trained."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

import zerokit
from zerokit.placement import StageArgument, stage_of

SGD = torch.optim.SGD
DILOCO = functools.partial(SGD, lr=0.7, momentum=0.9, nesterov=True)


def model_of(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def batch_of(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step * 101 + rank)
    x = torch.randn(8, 16, generator=generator, dtype=torch.float32)
    return x, x.roll(1, dims=1).sin()


def train_step(model: nn.Module, optimizer: zerokit.ZeroOptimizer, step: int, rank: int) -> float:
    x, y = batch_of(step, rank)
    loss = nn.functional.mse_loss(model(x).float(), y)
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def wrap(
    model: nn.Module, mesh: tuple[int, int], stage: int | dict[str, int] = 2, **given: Any
) -> zerokit.ZeroOptimizer:
    """The optimizer of islands with this stage inside, or with these by module."""
    options: dict[str, Any] = {"precision": "fp32", "bucket_mb": 1e-6, "lr": 0.1} | given
    cls = options.pop("cls", SGD)
    local: StageArgument = (
        {path: ("local", stage_of(one)) for path, one in stage.items()}
        if isinstance(stage, dict)
        else ("local", stage_of(stage))
    )
    return zerokit.ZeroOptimizer(model, cls, mesh=mesh, stage=local, **options)
