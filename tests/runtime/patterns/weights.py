"""Weights, read and changed outside of forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.runtime.patterns.engines import STEPS, VARIED_STEPS, Engine
from tests.runtime.patterns.harness import OUTSIDE, USUAL, Refused, Subject, always, updates, usage
from tests.runtime.patterns.models import Mlp, Words, square

pattern = Subject(__name__)


def _usual(engine: Engine, after: Callable[[], Any], *, gathered: bool = False) -> None:
    for _ in range(STEPS):
        engine.update(square(engine.model(engine.data(4, 8))))
        with engine.gathered() if gathered else contextlib.nullcontext():
            after()


def _penalty(model: nn.Module) -> Tensor:
    return sum((p.square().sum() for p in model.parameters()), start=torch.zeros(()))


# ---- reading


class Regularized(Mlp):
    """The penalty comes first, before any unit is called."""

    def forward(self, x: Tensor) -> Tensor:
        penalty = _penalty(self)
        return square(super().forward(x)) + 1e-3 * penalty


pattern("an L2 penalty over `self.parameters()` inside forward", Regularized)(
    updates(lambda engine: engine.model(engine.data(4, 8))), "penalty_inside"
)


@pattern.each_step("an L2 penalty over `model.parameters()` before the forward", Mlp, refused=OUTSIDE)
def penalty_before(engine: Engine) -> None:
    penalty = _penalty(engine.model)
    engine.update(square(engine.model(engine.data(4, 8))) + 1e-3 * penalty)


@pattern.each_step("an L2 penalty over `model.parameters()` after the forward", Mlp, refused=OUTSIDE)
def penalty_after(engine: Engine) -> None:
    loss = square(engine.model(engine.data(4, 8)))
    engine.update(loss + 1e-3 * _penalty(engine.model))


@pattern.each_step("an L2 penalty, all of it inside `gathered()`", Mlp)
def penalty_gathered(engine: Engine) -> None:
    with engine.gathered():
        loss = square(engine.model(engine.data(4, 8))) + 1e-3 * _penalty(engine.model)
        engine.record(loss)
        engine.backward(loss)
    engine.step()
    engine.zero_grad()


@pattern.each_step("`gathered()` between forward and backward, and between backward and `step()`", Mlp)
def gathered_in_between(engine: Engine) -> None:
    loss = square(engine.model(engine.data(4, 8)))
    with engine.gathered():
        engine.record(_penalty(engine.model))
    engine.backward(loss)
    with engine.gathered():
        engine.record(_penalty(engine.model))
    engine.step()
    engine.zero_grad()


def _average(engine: Engine, shadow: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in engine.model.named_parameters():
            shadow.setdefault(name, p.clone()).lerp_(p, 0.1)
    engine.record(sum(float(value.double().sum()) for value in shadow.values()))


@pattern("an EMA over `model.parameters()` after `step()`", Mlp, refused=OUTSIDE)
def ema(engine: Engine) -> None:
    shadow: dict[str, Tensor] = {}
    _usual(engine, lambda: _average(engine, shadow))


@pattern("an EMA inside `gathered()`", Mlp)
def ema_gathered(engine: Engine) -> None:
    shadow: dict[str, Tensor] = {}
    _usual(engine, lambda: _average(engine, shadow), gathered=True)


class Averaged(Mlp):
    """AveragedModel copies the model before it is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["average"] = torch.optim.swa_utils.AveragedModel(self)


def _swa(engine: Engine) -> None:
    average = engine.model.__dict__["average"]
    average.update_parameters(engine.model)
    with torch.no_grad():
        engine.record(square(average(torch.ones(2, 8))))


pattern("AveragedModel", Averaged, refused=OUTSIDE)(
    lambda engine: _usual(engine, lambda: _swa(engine)), "swa"
)
pattern("AveragedModel inside `gathered()`", Averaged)(
    lambda engine: _usual(engine, lambda: _swa(engine), gathered=True), "swa_gathered"
)


def _read_alone(engine: Engine) -> None:
    if engine.rank == 0:
        engine.record(engine.model.blocks[0].inner.weight.detach().norm())
    dist.barrier()


pattern(
    "one rank alone reads a norm",
    Mlp,
    refused={3: usage("gathered()", everywhere=False)},
    apart=True,
    timeout=4.0,  # the other rank waits that long
)(lambda engine: _usual(engine, lambda: _read_alone(engine)), "one_rank_reads")
pattern("one rank alone reads a norm, inside `gathered()`", Mlp)(
    lambda engine: _usual(engine, lambda: _read_alone(engine), gathered=True), "one_rank_reads_gathered"
)


@pattern("`p.shape`, `p.numel()`, `p.dtype`, `p.dim()` at any time", Mlp)
def shapes(engine: Engine) -> None:
    def after() -> None:
        engine.record(sum(p.numel() for p in engine.model.parameters()))
        for p in engine.model.parameters():
            engine.record(sum(p.shape) + p.dim() + p.dtype.itemsize + p.size(0))

    after()
    _usual(engine, after)


@pattern.each_step("`model.state_dict()` after every step", Mlp)
def state_dict(engine: Engine) -> None:
    engine.update(square(engine.model(engine.data(4, 8))))
    engine.record(sum(value.double().norm() for value in engine.model.state_dict().values()))


# ---- changing


def _clamp(engine: Engine) -> None:
    with torch.no_grad():
        for p in engine.model.parameters():
            p.clamp_(-0.1, 0.1)


def _clamp_data(engine: Engine) -> None:
    for p in engine.model.parameters():
        p.data.clamp_(-0.1, 0.1)


pattern("weights clamped after `step()`, under `no_grad`", Mlp, refused=OUTSIDE)(
    lambda engine: _usual(engine, lambda: _clamp(engine)), "clamp"
)
pattern("weights clamped after `step()`, through `p.data`", Mlp, refused=OUTSIDE)(
    lambda engine: _usual(engine, lambda: _clamp_data(engine)), "clamp_data"
)
pattern("weights clamped inside `gathered()`, under `no_grad`", Mlp)(
    lambda engine: _usual(engine, lambda: _clamp(engine), gathered=True), "clamp_gathered"
)
pattern("weights clamped inside `gathered()`, through `p.data`", Mlp)(
    lambda engine: _usual(engine, lambda: _clamp_data(engine), gathered=True), "clamp_data_gathered"
)


def _initialize(engine: Engine) -> None:
    torch.manual_seed(9)
    for p in engine.model.parameters():
        nn.init.normal_(p, std=0.1)


@pattern("`nn.init` after construction, with equal seeds", Mlp, refused=OUTSIDE)
def initialize(engine: Engine) -> None:
    _initialize(engine)
    USUAL(engine)


@pattern("`nn.init` after construction, inside `gathered()`", Mlp)
def initialize_gathered(engine: Engine) -> None:
    with engine.gathered():
        _initialize(engine)
    USUAL(engine)


@pattern("`model.load_state_dict()` in the middle of training", Mlp)
def load_state_dict(engine: Engine) -> None:
    kept = engine.weights()
    _usual(engine, lambda: engine.model.load_state_dict(kept))
    USUAL(engine)


@pattern("weights swapped for averaged ones to evaluate, and back", Mlp)
def swapped(engine: Engine) -> None:
    early = engine.weights()

    def after() -> None:
        late = engine.weights()
        engine.model.load_state_dict(early)
        with torch.no_grad():
            engine.record(square(engine.model(torch.ones(2, 8))))
        engine.model.load_state_dict(late)

    _usual(engine, after)


@pattern("`p.requires_grad_(False)` after construction", Mlp)
def freeze_later(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        if step == 2:
            engine.model.first.requires_grad_(False)
            engine.model.blocks[1].inner.weight.requires_grad_(False)
        engine.update(square(engine.model(engine.data(4, 8))))


@pattern("frozen for a step, then trained again", Mlp)
def freeze_and_thaw(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        engine.model.blocks[1].requires_grad_(step % 2 == 0)
        engine.update(square(engine.model(engine.data(4, 8))), max_norm=0.1)


@pattern(
    "frozen on one rank only",
    Mlp,
    refused=always(Refused("LayoutMismatch", ())),
    apart=True,
    timeout=5.0,
)
def freeze_one_rank(engine: Engine) -> None:
    for step in range(VARIED_STEPS):
        if step == 1 and engine.rank == 1 and not engine.plain:
            engine.model.blocks[1].requires_grad_(False)
        engine.update(square(engine.model(engine.data(4, 8))))


class Head(Words):
    """Reads the head's weight before the head is called."""

    def forward(self, ids: Tensor) -> Tensor:
        x = nn.functional.embedding(ids, self.head.weight)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


pattern("a child's weight used before the child is called, inside forward", Head)(
    updates(lambda engine: square(engine.model(engine.ids(80, 2, 6)))), "weight_of_a_child"
)


class HeadLater(Words):
    """Uses the head's weight, and never calls the head."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.head.weight)


pattern("`F.linear(x, self.head.weight)` inside forward", HeadLater)(
    updates(lambda engine: square(engine.model(engine.ids(80, 2, 6)))), "functional_head"
)


class BlockWeights(Mlp):
    """A unit's weight used by the parent, before and after the unit is called."""

    def forward(self, x: Tensor) -> Tensor:
        blocks: Any = self.blocks
        x = self.first(x)
        early = x @ blocks[2].inner.weight
        for block in blocks:
            x = block(x)
        return self.head(x + 0.1 * early @ blocks[0].inner.weight)  # type: ignore[no-any-return]


pattern("a unit's weight used by the parent, before and after the unit is called", BlockWeights)(
    USUAL, "weights_of_units"
)
