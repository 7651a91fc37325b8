# mypy: disable-error-code="no-any-return"
"""Weights of one part that follow those of another, changed in the model's forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tests.runtime.patterns.changes import IN_FORWARD
from tests.runtime.patterns.harness import OUTSIDE, USUAL, Subject
from tests.runtime.patterns.models import Mlp

pattern = Subject(__name__)

Follow = Callable[[nn.Parameter, nn.Parameter], object]
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


def by_data(query: nn.Parameter, key: nn.Parameter) -> None:
    key.data.mul_(0.9).add_(query.data, alpha=0.1)


def by_new_data(query: nn.Parameter, key: nn.Parameter) -> None:
    key.data = key.data * 0.9 + query.data * 0.1


FOLLOWS: dict[str, tuple[str, Follow]] = {
    "by_data": ("`key.data.mul_().add_()`", by_data),
    "by_lerp": ("`key.data.lerp_()`", lambda query, key: key.data.lerp_(query.data, 0.1)),
    "in_place": ("`key.mul_().add_()`", lambda query, key: key.mul_(0.9).add_(query, alpha=0.1)),
    "by_copy": ("`key.copy_()`", lambda query, key: key.copy_(key * 0.9 + query * 0.1)),
    "by_detached": (
        "`key.detach().mul_()`",
        lambda query, key: key.detach().mul_(0.9).add_(query, alpha=0.1),
    ),
    "by_view": ("a view of `key` changed", lambda query, key: key.view(-1)[:4].mul_(0.9)),
}
for key, (how, follow) in FOLLOWS.items():
    pattern(f"{how} in the root's forward", partial(Contrast, follow), refused=IN_FORWARD)(USUAL, key)
pattern("`key.data = …` in the root's forward", partial(Contrast, by_new_data), refused=OUTSIDE)(
    USUAL, "by_new_data"
)
pattern(
    "`.data` of a layer outside the units changed in the root's forward",
    partial(Contrast, by_data, part="first"),
    refused=IN_FORWARD,
)(USUAL, "by_data_of_rest")
pattern(
    "a trained part whose `.data` is changed in the root's forward",
    partial(Contrast, by_data, frozen=False),
    refused=IN_FORWARD,
)(USUAL, "trained")
