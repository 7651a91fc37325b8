# mypy: disable-error-code="no-any-return"
"""Small models that many patterns share.

Hidden matrices have 64×64 fp32 elements, 16 KB: with smaller ones, memory that was given back too early may still
hold its contents, and a fault goes unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 64
Features = Callable[[Any, Tensor], Tensor]


def square(output: Tensor) -> Tensor:
    """A loss without targets."""
    return output.float().square().mean()


class Block(nn.Module):
    """A residual layer; smooth, for patterns that differentiate twice."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Mlp(nn.Module):
    """Some blocks between a first layer and a head; a function may say how an input passes through them."""

    def __init__(
        self,
        depth: int = 3,
        inputs: int = 8,
        outputs: int = 8,
        *,
        block: Callable[[], nn.Module] = Block,
        features: Features | None = None,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, outputs)
        self.how = features

    def features(self, x: Tensor) -> Tensor:
        if self.how is not None:
            return self.how(self, x)
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Words(nn.Module):
    """An embedding, blocks and a head, which may be tied."""

    def __init__(self, *, tied: bool = False, rows: int = 80, **embedding: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(rows, WIDTH, **embedding)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, rows, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def features(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.features(ids))


def chain(depth: int = 3, width: int = WIDTH) -> nn.Sequential:
    """Only a Sequential."""
    return nn.Sequential(*(Block(width) for _ in range(depth)))
