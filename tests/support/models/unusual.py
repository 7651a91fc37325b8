# mypy: disable-error-code="no-any-return"
"""Models that use their parameters, units and outputs in ways that break naive hooks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.models.base import (
    Batch,
    case,
    classify,
    regress,
    squared,
)


@dataclass
class Output:
    """As Hugging Face's model outputs, but plain: pytree does not look inside."""

    loss: Tensor
    hidden: Any
    nothing: None = None


def _output_loss(model: nn.Module, batch: Batch) -> Tensor:
    output = model(batch["x"], labels=batch["y"])
    return output.loss + 1e-2 * output.hidden["last"][0].float().square().mean()


class Residual(nn.Module):
    """A block whose output is a dataclass that holds a dict that holds a list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Output:
        hidden = x + torch.tanh(self.inner(x))
        return Output(loss=hidden.square().mean(), hidden={"last": [hidden]})


@case("dataclass_output", classify(11, 4, 5), loss=_output_loss)
class DataclassOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual(11) for _ in range(3))
        self.head = nn.Linear(11, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        extra = x.new_zeros(())
        for block in self.blocks:
            output = block(x)
            x, extra = output.hidden["last"][0], extra + output.loss
        loss = F.cross_entropy(self.head(x).float(), labels) + 1e-3 * extra.float()
        return Output(loss=loss, hidden={"last": [x]})


class Halves(nn.Module):
    """A block that takes and returns a dict; its entries are views of one tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * width, 2 * width)

    def forward(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        left, right = self.inner(torch.cat([state["left"], state["right"]], -1)).chunk(2, -1)
        return {"left": state["left"] + left.tanh(), "right": right}


def _dict_loss(model: nn.Module, batch: Batch) -> Tensor:
    output = model({"image": batch["x"]}, "plain")
    return F.cross_entropy(output["logits"].float(), batch["y"])


@case("dict_output", classify(6, 4, 5), loss=_dict_loss)
class DictOutput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Halves(6) for _ in range(3))
        self.head = nn.Linear(6, 4)

    def forward(self, inputs: dict[str, Tensor], mode: str) -> dict[str, Any]:
        state = {"left": inputs["image"], "right": inputs["image"].flip(-1)}
        for block in self.blocks:
            state = block(state)
        state["left"].add_(state["right"])  # in place on a unit's output
        return {"mode": mode, "logits": self.head(state["left"])}


class Dense(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))

    def project(self, x: Tensor) -> Tensor:
        """The same by another name: no forward, so no forward hook either."""
        return self.forward(x)


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


@case("parameter_unused_on_one_rank", regress(9, 5), loss=_ranked)
class UnusedParameterOnOneRank(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"a": nn.Linear(9, 9), "b": nn.Linear(9, 9)}) for _ in range(2)
        )
        self.gain = nn.Parameter(torch.full((), 0.5))
        self.shift = nn.Parameter(torch.zeros(9))
        self.head = nn.Linear(9, 1)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        for block in self.blocks:
            assert isinstance(block, nn.ModuleDict)
            x = x + block["a" if rank % 2 else "b"](x).tanh()
        x = x * self.gain if rank == 0 else x + self.shift
        return self.head(x)


@case("unused_everywhere", regress(9, 5), loss=_ranked)
class UnusedEverywhere(Stack):
    """A spare parameter and a spare block that no rank touches."""

    def __init__(self) -> None:
        super().__init__(4)
        self.spare = nn.Parameter(torch.randn(17))

    def route(self, rank: int) -> list[int]:
        return [0, 1, 3]


@case("called_by_method", regress(9, 5), loss=_ranked)
class CalledByMethod(Stack):
    """Children of a ModuleList used through a method, through a child of theirs, and through their forward."""

    def forward(self, x: Tensor, rank: int = 0) -> Tensor:
        first, second, third = self.blocks
        assert isinstance(first, Dense)
        assert isinstance(second, Dense)
        x = first.project(self.stem(x))
        x = x + torch.tanh(second.inner(x))
        return self.head(third(x))


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


def _siamese_loss(model: nn.Module, batch: Batch) -> Tensor:
    left, right = model(batch["x"]), model(batch["x"].flip(-1))
    return F.mse_loss((left - right).float(), batch["y"]) + left.float().square().mean()


@case("two_forwards", regress(9, 5), loss=_siamese_loss)
class TwoForwards(Stack):
    """The whole model runs twice before one backward, as in contrastive learning."""


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
