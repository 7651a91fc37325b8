# mypy: disable-error-code="no-any-return"
"""Models that use their parameters, units and outputs in ways that break naive hooks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models.base import (
    Batch,
    case,
    regress,
    squared,
)


class Dense(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


class Stack(nn.Module):
    """Dense blocks between two linear layers; `route` says which blocks run, in which order."""

    def __init__(self, depth: int = 3, width: int = 13) -> None:
        super().__init__()
        self.stem = nn.Linear(9, width)
        self.blocks = nn.ModuleList(Dense(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def route(self, rank: int) -> list[int]:
        return list(range(len(self.blocks)))

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        x = self.stem(x)
        for index in self.route(rank):
            x = self.blocks[index](x)
        return self.head(x)


def _ranked(model: nn.Module, batch: Batch) -> Tensor:
    return F.mse_loss(model(batch["x"], batch["rank"]).float(), batch["y"])


@case("unit_called_twice", regress(9, 5), loss=_ranked)
class CalledTwice(Stack):
    def route(self, rank: int) -> list[int]:
        return [0, 1, 0, 2, 1]


@case("unit_unused_on_one_rank", regress(9, 5), loss=_ranked)
class UnusedUnitOnOneRank(Stack):
    """Rank 0 skips the block in the middle, the last rank of four the first one."""

    def route(self, rank: int) -> list[int]:
        return {0: [0, 2], 3: [1, 2]}.get(rank, [0, 1, 2])


@case("unit_unused_on_rank_1", regress(9, 5), loss=_ranked)
class UnusedUnitOnRankOne(Stack):
    """Rank 1 skips the first and the last block, so its first collectives would come early and late."""

    def route(self, rank: int) -> list[int]:
        return [1] if rank == 1 else [0, 1, 2]


@case("unused_everywhere", regress(9, 5), loss=_ranked)
class UnusedEverywhere(Stack):
    """A spare parameter and a spare block that no rank touches."""

    def __init__(self) -> None:
        super().__init__(4)
        self.spare = nn.Parameter(torch.randn(17))

    def route(self, rank: int) -> list[int]:
        return [0, 1, 3]


@case("tied_blocks", regress(9, 5), loss=_ranked)
class TiedBlocks(Stack):
    """One weight that lives in two units: the last block shares the first block's matrix, not its bias."""

    def __init__(self) -> None:
        super().__init__(4)
        first, last = self.blocks[0], self.blocks[3]
        assert isinstance(first, Dense)
        assert isinstance(last, Dense)
        last.inner.weight = first.inner.weight


class Pair(nn.Module):
    """Two layers with an activation between."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.second(torch.tanh(self.first(x))))


@case("tied_inside", regress(9, 5), loss=_ranked)
class TiedInside(Stack):
    """The last block's second layer is the first block's: its backward happens in the middle of another unit's."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Pair(13) for _ in range(4))
        first, last = self.blocks[0], self.blocks[3]
        assert isinstance(first, Pair)
        assert isinstance(last, Pair)
        last.second.weight = first.second.weight


@case("tiny_parameters", regress(9, 5), loss=squared)
class TinyParameters(nn.Module):
    """Parameters with fewer elements than ranks, 0-d ones, an empty one, and some of the root itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.steps = nn.ParameterList(
            [torch.full((), 0.3), torch.tensor([0.1]), torch.tensor([0.2, -0.1, 0.4])]
        )
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.layers = nn.Sequential(nn.Linear(9, 3), nn.Tanh(), nn.Linear(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) * self.steps[2] + self.steps[1]
        return self.layers[2](x.tanh()) * self.scale + self.steps[0] + self.empty.sum()


class LoraLinear(nn.Module):
    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


@case("lora", regress(9, 5), loss=squared)
class Lora(nn.Module):
    """A frozen base under trainable low-rank adapters; the first block and the stem are all frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(9, 15)
        self.blocks = nn.ModuleList(LoraLinear(15) for _ in range(3))
        self.head = nn.Linear(15, 1)
        self.stem.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.head.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@case("odd_shapes", regress(9, 5), loss=squared)
class OddShapes(nn.Module):
    """Three and four dimensions, one row, one column, no element, and a few matrices of equal shape."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(9, 12)
        self.experts = nn.Parameter(torch.randn(3, 12, 12) / 4)
        self.blocks = nn.ModuleList(Dense(12) for _ in range(3))
        self.kernel = nn.Parameter(torch.randn(4, 1, 2, 3) / 3)
        self.column = nn.Linear(1, 12, bias=False)
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.head = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for expert, block in zip(self.experts, self.blocks, strict=True):
            x = block(x + torch.tanh(x @ expert))
        image = F.conv2d(x.view(-1, 1, 3, 4), self.kernel).flatten(1).mean(1, keepdim=True)
        return self.head(x + self.column(image)) + self.empty.sum()
