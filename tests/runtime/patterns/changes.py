# mypy: disable-error-code="no-any-return"
"""What changes while the model is being trained, also in its forward."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.runtime.patterns.engines import VARIED_STEPS, Engine
from tests.runtime.patterns.harness import OUTSIDE, USUAL, Refused, Subject, always, usage
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
        mixed: Tensor = self.__dict__["other"](x) * torch.tanh(self.inner(x)) + before
        return mixed


def _around() -> Mlp:
    model = Mlp()
    model.blocks[0] = Around(model.blocks[2])
    return model


pattern("a block that calls another block", _around)(USUAL, "unit_in_unit")


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
