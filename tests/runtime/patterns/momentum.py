# mypy: disable-error-code="no-any-return"
"""Weights of one part that follow those of another, changed in the model's forward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.runtime.patterns.changes import IN_FORWARD
from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import OUTSIDE, pattern
from tests.runtime.patterns.models import Mlp, square

Follow = Callable[[nn.Parameter, nn.Parameter], None]
"""How a weight of the key encoder follows that of the query encoder."""


class Contrast(nn.Module):
    """MoCo's two encoders; `follow` is called in forward, before the key encoder is used."""

    def __init__(self, follow: Follow, *, frozen: bool = True, part: str = "") -> None:
        super().__init__()
        self.query, self.follow, self.part = Mlp(), follow, part
        self.key = copy.deepcopy(self.query)
        self.key.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        out = self.query(x)
        with torch.no_grad():
            parts = (encoder.get_submodule(self.part).parameters() for encoder in (self.query, self.key))
            for query, key in zip(*parts, strict=True):
                self.follow(query, key)
            other = self.key(x)
        return (out - 0.5 * other) * (1 + out)


def _by_data(query: nn.Parameter, key: nn.Parameter) -> None:
    key.data.mul_(0.9).add_(query.data, alpha=0.1)


def _by_lerp(query: nn.Parameter, key: nn.Parameter) -> None:
    key.data.lerp_(query.data, 0.1)


def _by_new_data(query: nn.Parameter, key: nn.Parameter) -> None:
    key.data = key.data * 0.9 + query.data * 0.1


def _in_place(query: nn.Parameter, key: nn.Parameter) -> None:
    key.mul_(0.9).add_(query, alpha=0.1)


def _by_copy(query: nn.Parameter, key: nn.Parameter) -> None:
    key.copy_(key * 0.9 + query * 0.1)


def _by_detached(query: nn.Parameter, key: nn.Parameter) -> None:
    key.detach().mul_(0.9).add_(query.detach(), alpha=0.1)


def _by_view(query: nn.Parameter, key: nn.Parameter) -> None:
    key.view(-1)[:4].mul_(0.9)


def _train(engine: Engine) -> None:
    for _ in range(STEPS):
        engine.update(square(engine.model(engine.data(4, 8))))


@pattern("`key.data.mul_().add_()` in the root's forward", lambda: Contrast(_by_data), refused=IN_FORWARD)
def by_data(engine: Engine) -> None:
    _train(engine)


@pattern("`key.data.lerp_()` in the root's forward", lambda: Contrast(_by_lerp), refused=IN_FORWARD)
def by_lerp(engine: Engine) -> None:
    _train(engine)


@pattern(
    "`.data` of a layer outside the units changed in the root's forward",
    lambda: Contrast(_by_data, part="first"),
    refused=IN_FORWARD,
)
def by_data_of_rest(engine: Engine) -> None:
    _train(engine)


@pattern("`key.data = …` in the root's forward", lambda: Contrast(_by_new_data), refused=OUTSIDE)
def by_new_data(engine: Engine) -> None:
    _train(engine)


@pattern("`key.mul_().add_()` in the root's forward", lambda: Contrast(_in_place), refused=IN_FORWARD)
def in_place(engine: Engine) -> None:
    _train(engine)


@pattern("`key.copy_()` in the root's forward", lambda: Contrast(_by_copy), refused=IN_FORWARD)
def by_copy(engine: Engine) -> None:
    _train(engine)


@pattern("`key.detach().mul_()` in the root's forward", lambda: Contrast(_by_detached), refused=IN_FORWARD)
def by_detached(engine: Engine) -> None:
    _train(engine)


@pattern("a view of `key` changed in the root's forward", lambda: Contrast(_by_view), refused=IN_FORWARD)
def by_view(engine: Engine) -> None:
    _train(engine)


@pattern(
    "a trained part whose `.data` is changed in the root's forward",
    lambda: Contrast(_by_data, frozen=False),
    refused=IN_FORWARD,
)
def trained(engine: Engine) -> None:
    _train(engine)
