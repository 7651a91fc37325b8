"""What changes while the model is being trained."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.runtime.patterns.engines import VARIED_STEPS, Engine
from tests.runtime.patterns.harness import USUAL, Refused, Subject, always, usage
from tests.runtime.patterns.models import Block, Mlp, Words, square

pattern = Subject(__name__)

IN_FORWARD: dict[int, Refused] = {3: usage("forward changes", "gathered()")}
"""Stage 3 cannot tell when other ranks read what forward changes."""


class Changing(Block):
    """Changes itself whenever it is called."""

    def __init__(self, change: Callable[[nn.Linear], object]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.inner)
        return super().forward(x)


def _shrink(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.9)


def _constrain(layer: nn.Linear) -> None:
    """As networks with a maximum norm do."""
    layer.weight.data = torch.renorm(layer.weight.data, p=2, dim=0, maxnorm=0.5)


def _frozen_later() -> nn.Module:
    """Blocks that decide in forward whether they are trained."""
    calls = itertools.count()
    return Mlp(block=lambda: Changing(lambda layer: layer.weight.requires_grad_(next(calls) <= 6)))


pattern(
    "a layer that multiplies its weight in forward",
    lambda: Mlp(block=partial(Changing, _shrink)),
    refused=IN_FORWARD,
)(USUAL, "shrinking")
pattern(
    "`self.weight.data = …` in forward", lambda: Mlp(block=partial(Changing, _constrain)), refused=IN_FORWARD
)(USUAL, "constrained")
pattern("`requires_grad_()` called in a block's forward", _frozen_later)(USUAL, "frozen_in_forward")


@pattern.each_step("frozen between forward and backward", steps=VARIED_STEPS)
def frozen_before_backward(engine: Engine) -> None:
    loss = engine.loss()
    engine.model.blocks[1].requires_grad_(engine.number != 1)
    engine.update(loss)
    engine.model.blocks[1].requires_grad_(True)


@pattern.each_step("frozen between backward and `step()`", steps=VARIED_STEPS)
def frozen_late(engine: Engine) -> None:
    engine.backward(engine.loss())
    engine.model.blocks[1].requires_grad_(engine.number != 1)
    engine.finish()
    engine.model.blocks[1].requires_grad_(True)


@pattern.each_step("`step()` inside `gathered()`, weights read after it")
def step_inside(engine: Engine) -> None:
    with engine.gathered():
        engine.train()
        for p in engine.model.parameters():
            engine.record(p.detach().double().square().sum())


INSIDE: dict[str, Any] = {"refused": always(usage("gathered_gradients()", "leave")), "apart": True}


def _inside_gradients(does: Callable[[Engine], None], engine: Engine) -> None:
    engine.train()
    engine.backward(engine.loss())
    if not engine.plain:
        with engine.gathered_gradients():
            does(engine)


pattern("`step()` inside `gathered_gradients()`", **INSIDE)(
    partial(_inside_gradients, Engine.step), "step_inside_gradients"
)
pattern("`zero_grad()` inside `gathered_gradients()`", **INSIDE)(
    partial(_inside_gradients, Engine.zero_grad), "zero_grad_inside_gradients"
)

NOT_THERE = always(usage("not in the model", "before"))


@pattern("weights tied after construction", Words, refused=NOT_THERE)
def tied_late(engine: Engine) -> None:
    if not engine.plain:
        engine.model.head.weight = engine.model.embedding.weight
    engine.update(square(engine.model(torch.arange(6).view(2, 3))))


@pattern("`torch.nn.utils.prune` after construction", refused=NOT_THERE)
def pruned_late(engine: Engine) -> None:
    if not engine.plain:
        with engine.gathered():
            prune.random_unstructured(engine.model.blocks[1].inner, "weight", amount=0.5)
    engine.train()


@pattern.each_step("a retained graph differentiated again, with that of a later forward")
def retained_and_joined(engine: Engine) -> None:
    first, second = engine.loss(), engine.loss()
    first.backward(retain_graph=True)
    engine.update(first + second)


class Around(Block):
    """Calls another block in the middle of its own work."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
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
