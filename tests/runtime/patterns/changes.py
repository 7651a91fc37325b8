"""What changes while the model is being trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.runtime.patterns.engines import STEPS, VARIED_STEPS, Engine
from tests.runtime.patterns.harness import USUAL, Refused, Subject, always, usage
from tests.runtime.patterns.models import Block, Mlp, Words, square

pattern = Subject(__name__)

IN_FORWARD: dict[int, Refused] = {3: usage("forward changes", "gathered()")}
"""Stage 3 cannot tell when other ranks read what forward changes."""


class Shrinking(nn.Linear):
    """Changes its weight whenever it is called."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


class Constrained(nn.Linear):
    """Replaces its weight's data, as networks with a maximum norm do."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


def _with(layer: type[nn.Linear]) -> Mlp:
    model = Mlp()
    for block in model.blocks:
        block.inner = layer(64, 64)
    return model


def _train(engine: Engine, steps: int = STEPS) -> None:
    for _ in range(steps):
        engine.update(square(engine.model(engine.data(4, 8))))


pattern("a layer that multiplies its weight in forward", lambda: _with(Shrinking), refused=IN_FORWARD)(
    USUAL, "shrinking"
)
pattern("`self.weight.data = …` in forward", lambda: _with(Constrained), refused=IN_FORWARD)(
    USUAL, "constrained"
)


@pattern("frozen between forward and backward", Mlp)
def frozen_before_backward(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        loss = square(engine.model(engine.data(4, 8)))
        engine.model.blocks[1].requires_grad_(step != 1)
        engine.update(loss)
        engine.model.blocks[1].requires_grad_(True)


@pattern("frozen between backward and `step()`", Mlp)
def frozen_late(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        loss = square(engine.model(engine.data(4, 8)))
        engine.record(loss)
        engine.backward(loss)
        engine.model.blocks[1].requires_grad_(step != 1)
        engine.step()
        engine.zero_grad()
        engine.model.blocks[1].requires_grad_(True)


class Freezing(Block):
    """Decides in forward whether it is trained."""

    def forward(self, x: Tensor) -> Tensor:
        self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
        self.inner.weight.requires_grad_(self.__dict__["calls"] <= 2)
        return super().forward(x)


def _freezing() -> Mlp:
    model = Mlp()
    model.blocks[1] = Freezing()
    return model


pattern("`requires_grad_()` called in a block's forward", _freezing)(USUAL, "frozen_in_forward")


@pattern.each_step("`step()` inside `gathered()`, weights read after it", Mlp)
def step_inside(engine: Engine) -> None:
    with engine.gathered():
        engine.update(square(engine.model(engine.data(4, 8))))
        total = torch.zeros((), dtype=torch.float64)
        for p in engine.model.parameters():
            total += p.detach().double().square().sum()
        engine.record(total)


def _inside_gradients(engine: Engine, does: Any) -> None:
    _train(engine, 1)
    engine.backward(square(engine.model(engine.data(4, 8))))
    if engine.plain:
        return
    with engine.optimizer.gathered_gradients():
        does()


REFUSED = always(usage("gathered_gradients()", "leave"))


pattern("`step()` inside `gathered_gradients()`", Mlp, refused=REFUSED, apart=True)(
    lambda engine: _inside_gradients(engine, engine.step), "step_inside_gradients"
)
pattern("`zero_grad()` inside `gathered_gradients()`", Mlp, refused=REFUSED, apart=True)(
    lambda engine: _inside_gradients(engine, engine.zero_grad), "zero_grad_inside_gradients"
)


NOT_THERE = always(usage("not in the model", "before"))


@pattern("weights tied after construction", Words, refused=NOT_THERE)
def tied_late(engine: Engine) -> None:
    if not engine.plain:
        engine.model.head.weight = engine.model.embedding.weight
    engine.update(square(engine.model(torch.arange(6).view(2, 3))))


@pattern("`torch.nn.utils.prune` after construction", Mlp, refused=NOT_THERE)
def pruned_late(engine: Engine) -> None:
    if not engine.plain:
        with engine.gathered():
            prune.random_unstructured(engine.model.blocks[1].inner, "weight", amount=0.5)
    _train(engine, 1)


@pattern.each_step("a retained graph differentiated again, with that of a later forward", Mlp)
def retained_and_joined(engine: Engine) -> None:
    first = square(engine.model(engine.data(4, 8)))
    second = square(engine.model(engine.data(4, 8)))
    engine.record(second)
    torch.autograd.backward(first, retain_graph=True)
    engine.update(first + second)


class Around(nn.Module):
    """Calls another block in the middle of its own work."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.weight = nn.Parameter(torch.randn(64, 64) * 0.05)
        self.__dict__["other"] = other

    def forward(self, x: Tensor) -> Tensor:
        before = x @ self.weight
        mixed: Tensor = torch.tanh(self.inner(x)) * self.__dict__["other"](x) + before
        return mixed


def _around() -> Mlp:
    model = Mlp()
    model.blocks[0] = Around(model.blocks[2])
    return model


pattern("a block that calls another block", _around)(USUAL, "unit_in_unit")
