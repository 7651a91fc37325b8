"""Generated backward passes: whatever arrives, on whichever ranks, every gradient is the mean of all ranks'.

Weights are multiplied by whole numbers, and ranks are four, so that every sum and every mean is exact.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit
from tests.support.distributed import run_ranks
from tests.support.streams import LaggingStream, PromptStream, device_way
from zerokit.placement import stage_of

WORLD = 4
SHAPES: tuple[tuple[int, ...], ...] = ((1,), (3,), (64,), (128,), (5, 7), (16, 16), (2, 64), (90,))
LARGE = (520, 520)
"""More than what is small enough for gradients of a unit to wait for each other: 1 MiB."""

ROUTES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "host": nullcontext,
    "device": lambda: device_way(PromptStream),
    "late device": lambda: device_way(LaggingStream),
}


class Part(nn.Module):
    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(shape) for shape in shapes])

    def forward(self, x: Tensor, factors: list[int]) -> Tensor:
        for weight, factor in zip(self.weights, factors, strict=True):
            if factor:
                x = x + (weight * factor).sum()
        return x


class Parts(nn.Module):
    def __init__(self, shapes: list[list[tuple[int, ...]]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(each) for each in shapes])

    def forward(self, x: Tensor, factors: list[list[int]]) -> Tensor:
        for part, each in zip(self.parts, factors, strict=True):
            if any(each):
                x = part(x, each)
        return x


@dataclass(frozen=True)
class Pass:
    """A backward pass: for each rank, by what each weight is multiplied; 0 where it is not used."""

    factors: list[list[list[int]]]
    accumulates: bool
    twice: bool

    def gradients(self) -> list[Tensor]:
        ranks = torch.tensor([[factor for part in rank for factor in part] for rank in self.factors])
        return list(ranks.sum(0) * (1 + self.twice) / WORLD)


def _draw_shapes(draw: random.Random) -> list[list[tuple[int, ...]]]:
    shapes = [[draw.choice(SHAPES) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(1, 4))]
    draw.choice(shapes).append(LARGE) if draw.random() < 0.3 else shapes.append([LARGE])
    return shapes


def _draw_passes(draw: random.Random, shapes: list[list[tuple[int, ...]]]) -> list[Pass]:
    passes = []
    count = draw.randint(1, 3)
    accumulates = draw.random() < 0.3
    for number in range(count):
        factors = [
            [[draw.choice((0, 0, 1, 2, 4)) for _ in part] for part in shapes] for _rank in range(WORLD)
        ]
        for rank in factors:
            rank[0][0] = rank[0][0] or 1  # every rank starts a backward pass
        passes.append(Pass(factors, accumulates and number < count - 1, draw.random() < 0.3))
    return passes


def _backward(model: nn.Module, optimizer: zerokit.ZeroOptimizer, one: Pass) -> None:
    with optimizer.accumulate() if one.accumulates else nullcontext():
        loss = model(torch.zeros(()), one.factors[dist.get_rank()])
        if one.twice:
            optimizer.backward(loss, retain_graph=True)
        optimizer.backward(loss)


def _train(stage: int, seed: int) -> None:
    draw = random.Random(seed)
    shapes = _draw_shapes(draw)
    model = Parts(shapes)
    optimizer = zerokit.ZeroOptimizer(
        model,
        torch.optim.SGD,
        stage=stage_of(stage),
        precision="fp32",
        bucket_mb=draw.choice((1e-6, 64.0)),
        lr=1.0,
    )
    parameters = list(model.parameters())
    weights = [0.0] * len(parameters)
    for _step in range(3):
        expected = [torch.zeros(()) for _ in parameters]
        for one in _draw_passes(draw, shapes):
            _backward(model, optimizer, one)
            expected = [total + more for total, more in zip(expected, one.gradients(), strict=True)]
        if draw.random() < 0.5:
            cleared = draw.randrange(len(parameters))
            parameters[cleared].grad = None
            expected[cleared] = torch.zeros(())
        if draw.random() < 0.5:
            with optimizer.gathered_gradients():
                for parameter, total in zip(parameters, expected, strict=True):
                    found = torch.zeros(()) if parameter.grad is None else parameter.grad
                    assert bool((found == total).all()), (stage, seed)
        squares = sum(
            float(total) ** 2 * parameter.numel()
            for parameter, total in zip(parameters, expected, strict=True)
        )
        norm = float(optimizer.clip_grad_norm_(float("inf")))
        assert norm == pytest.approx(squares**0.5, rel=1e-6), (stage, seed)
        if squares:
            optimizer.step()
            weights = [weight - float(total) for weight, total in zip(weights, expected, strict=True)]
        optimizer.zero_grad()
        with optimizer.gathered():
            for parameter, weight in zip(parameters, weights, strict=True):
                assert bool((parameter == weight).all()), (stage, seed)


def _train_all(route: str, seeds: range) -> None:
    with ROUTES[route]():
        for seed in seeds:
            _train(seed % 4, seed)
            _train((seed + 2) % 4, seed)


@pytest.mark.full(default=["host", "device"])
@pytest.mark.parametrize("route", ROUTES)
def test_gradients_are_the_mean_over_ranks_whatever_arrives(route: str) -> None:
    run_ranks(WORLD, _train_all, route, range(8 if route == "host" else 4))
