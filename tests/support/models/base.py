# mypy: disable-error-code="no-any-return"
"""A `Case`, the registry of cases, and the batches and losses that many of them share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = dict[str, Any]
Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model with its data: `build` reads torch's global random state, `make` a generator of its own."""

    name: str
    build: Callable[[], nn.Module]
    #: (generator, rank) -> inputs and targets of one micro-batch.
    make: Callable[[torch.Generator, int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    #: The optimizer's `params=`; None means all parameters.
    groups: Callable[[nn.Module], Groups] | None = None

    def batch(self, seed: int, step: int, rank: int) -> Batch:
        """One micro-batch; the same arguments give the same bits."""
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step * 1009 + rank)
        return self.make(generator, rank)


CASES: dict[str, Case] = {}


def case(name: str, make: Callable[[torch.Generator, int], Batch], **options: Any) -> Callable[[Any], Any]:
    """Registers a model class, or a function that builds a model, under `name`."""

    def register(build: Any) -> Any:
        CASES[name] = Case(name, build, make, options.pop("loss", cross_entropy), **options)
        return build

    return register


def floats(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def labels(generator: torch.Generator, high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=generator)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(batch["x"])
    return F.cross_entropy(logits.flatten(0, -2).float(), batch["y"].flatten())


def squared(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"]).float(), batch["y"])


def classify(features: int, classes: int, size: int) -> Callable[[torch.Generator, int], Batch]:
    def make(generator: torch.Generator, rank: int) -> Batch:
        return {"x": floats(generator, size, features), "y": labels(generator, classes, size)}

    return make


def regress(features: int, size: int) -> Callable[[torch.Generator, int], Batch]:
    def make(generator: torch.Generator, rank: int) -> Batch:
        return {"x": floats(generator, size, features), "y": floats(generator, size, 1), "rank": rank}

    return make


def count(model: nn.Module) -> int:
    """Trainable elements Ψ, each tied parameter once."""
    return sum(math.prod(p.shape) for p in model.parameters() if p.requires_grad)
