# mypy: disable-error-code="no-any-return"
"""The usual small models: regression, perceptrons, convolutions, recurrent layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models.base import (
    Batch,
    case,
    classify,
    floats,
    labels,
)


@case("mlp_10_64_2", classify(10, 2, 7))
def _mlp_10_64_2() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(inplace=True), nn.Linear(64, 2))


@case("mlp_784_256_10", classify(784, 10, 4))
class Mlp(nn.Module):
    """No ModuleList and no Sequential: everything is the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(784, 256)
        self.out = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.hidden(x)))


def _images(generator: torch.Generator, rank: int) -> Batch:
    return {"x": floats(generator, 3, 3, 8, 8), "y": labels(generator, 5, 3)}


class BasicBlock(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(inplace=True),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


@case("resnet", _images)
class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 6, 3, 1, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=True)
        )
        self.layers = nn.Sequential(BasicBlock(6, 6, 1), BasicBlock(6, 10, 2))
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(x)).mean((2, 3)))
