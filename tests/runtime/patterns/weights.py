"""Weights, read and changed outside of forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.runtime.patterns.engines import STEPS, VARIED_STEPS, Engine
from tests.runtime.patterns.harness import OUTSIDE, Refused, always, pattern, usage
from tests.runtime.patterns.models import Mlp, Words, square


def _usual(engine: Engine, after: Callable[[], None]) -> None:
    for _ in range(STEPS):
        engine.update(square(engine.model(engine.data(4, 8))))
        after()


def _penalty(model: nn.Module) -> Tensor:
    return sum((p.square().sum() for p in model.parameters()), start=torch.zeros(()))


# ---- reading


class Regularized(Mlp):
    """The penalty comes first, before any unit is called."""

    def forward(self, x: Tensor) -> Tensor:
        penalty = _penalty(self)
        return square(super().forward(x)) + 1e-3 * penalty


@pattern("an L2 penalty over `self.parameters()` inside forward", Regularized)
def penalty_inside(engine: Engine) -> None:
    for _ in range(STEPS):
        engine.update(engine.model(engine.data(4, 8)))


@pattern("an L2 penalty over `model.parameters()` before the forward", Mlp, refused=OUTSIDE)
def penalty_before(engine: Engine) -> None:
    for _ in range(STEPS):
        penalty = _penalty(engine.model)
        engine.update(square(engine.model(engine.data(4, 8))) + 1e-3 * penalty)


@pattern("an L2 penalty over `model.parameters()` after the forward", Mlp, refused=OUTSIDE)
def penalty_after(engine: Engine) -> None:
    for _ in range(STEPS):
        loss = square(engine.model(engine.data(4, 8)))
        engine.update(loss + 1e-3 * _penalty(engine.model))


@pattern("an L2 penalty, all of it inside `gathered()`", Mlp)
def penalty_gathered(engine: Engine) -> None:
    for _ in range(STEPS):
        with engine.gathered():
            loss = square(engine.model(engine.data(4, 8))) + 1e-3 * _penalty(engine.model)
            engine.record(loss)
            engine.backward(loss)
        engine.step()
        engine.zero_grad()


@pattern("`gathered()` between forward and backward, and between backward and `step()`", Mlp)
def gathered_in_between(engine: Engine) -> None:
    for _ in range(STEPS):
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

    def after() -> None:
        with engine.gathered():
            _average(engine, shadow)

    _usual(engine, after)


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


@pattern("AveragedModel", Averaged, refused=OUTSIDE)
def swa(engine: Engine) -> None:
    _usual(engine, lambda: _swa(engine))


@pattern("AveragedModel inside `gathered()`", Averaged)
def swa_gathered(engine: Engine) -> None:
    def after() -> None:
        with engine.gathered():
            _swa(engine)

    _usual(engine, after)


@pattern(
    "one rank alone reads a norm",
    Mlp,
    refused={3: usage("gathered()", everywhere=False)},
    apart=True,
    timeout=4.0,  # the other rank waits that long
)
def one_rank_reads(engine: Engine) -> None:
    def after() -> None:
        if engine.rank == 0:
            engine.record(engine.model.blocks[0].inner.weight.detach().norm())
        dist.barrier()

    _usual(engine, after)


@pattern("one rank alone reads a norm, inside `gathered()`", Mlp)
def one_rank_reads_gathered(engine: Engine) -> None:
    def after() -> None:
        with engine.gathered():
            if engine.rank == 0:
                engine.record(engine.model.blocks[0].inner.weight.detach().norm())
            dist.barrier()

    _usual(engine, after)


@pattern("`p.shape`, `p.numel()`, `p.dtype`, `p.dim()` at any time", Mlp)
def shapes(engine: Engine) -> None:
    def after() -> None:
        engine.record(sum(p.numel() for p in engine.model.parameters()))
        for p in engine.model.parameters():
            engine.record(sum(p.shape) + p.dim() + p.dtype.itemsize + p.size(0))

    after()
    _usual(engine, after)


@pattern("`model.state_dict()` after every step", Mlp)
def state_dict(engine: Engine) -> None:
    def after() -> None:
        engine.record(sum(value.double().norm() for value in engine.model.state_dict().values()))

    _usual(engine, after)


# ---- changing


def _clamp(engine: Engine) -> None:
    with torch.no_grad():
        for p in engine.model.parameters():
            p.clamp_(-0.1, 0.1)


def _clamp_data(engine: Engine) -> None:
    for p in engine.model.parameters():
        p.data.clamp_(-0.1, 0.1)


@pattern("weights clamped after `step()`, under `no_grad`", Mlp, refused=OUTSIDE)
def clamp(engine: Engine) -> None:
    _usual(engine, lambda: _clamp(engine))


@pattern("weights clamped after `step()`, through `p.data`", Mlp, refused=OUTSIDE)
def clamp_data(engine: Engine) -> None:
    _usual(engine, lambda: _clamp_data(engine))


@pattern("weights clamped inside `gathered()`, under `no_grad`", Mlp)
def clamp_gathered(engine: Engine) -> None:
    def after() -> None:
        with engine.gathered():
            _clamp(engine)

    _usual(engine, after)


@pattern("weights clamped inside `gathered()`, through `p.data`", Mlp)
def clamp_data_gathered(engine: Engine) -> None:
    def after() -> None:
        with engine.gathered():
            _clamp_data(engine)

    _usual(engine, after)


def _initialize(engine: Engine) -> None:
    torch.manual_seed(9)
    for p in engine.model.parameters():
        nn.init.normal_(p, std=0.1)


@pattern("`nn.init` after construction, with equal seeds", Mlp, refused=OUTSIDE)
def initialize(engine: Engine) -> None:
    _initialize(engine)
    _usual(engine, lambda: None)


@pattern("`nn.init` after construction, inside `gathered()`", Mlp)
def initialize_gathered(engine: Engine) -> None:
    with engine.gathered():
        _initialize(engine)
    _usual(engine, lambda: None)


@pattern("`model.load_state_dict()` in the middle of training", Mlp)
def load_state_dict(engine: Engine) -> None:
    kept = engine.weights()

    def after() -> None:
        engine.model.load_state_dict(kept)

    _usual(engine, after)
    _usual(engine, lambda: None)


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


@pattern("a child's weight used before the child is called, inside forward", Head)
def weight_of_a_child(engine: Engine) -> None:
    for _ in range(STEPS):
        engine.update(square(engine.model(engine.ids(80, 2, 6))))


class HeadLater(Words):
    """Uses the head's weight, and never calls the head."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.linear(x, self.head.weight)


@pattern("`F.linear(x, self.head.weight)` inside forward", HeadLater)
def functional_head(engine: Engine) -> None:
    for _ in range(STEPS):
        engine.update(square(engine.model(engine.ids(80, 2, 6))))


class BlockWeights(Mlp):
    """A unit's weight used by the parent, before and after the unit is called."""

    def forward(self, x: Tensor) -> Tensor:
        blocks: Any = self.blocks
        x = self.first(x)
        early = x @ blocks[2].inner.weight
        for block in blocks:
            x = block(x)
        return self.head(x + 0.1 * early @ blocks[0].inner.weight)  # type: ignore[no-any-return]


@pattern("a unit's weight used by the parent, before and after the unit is called", BlockWeights)
def weights_of_units(engine: Engine) -> None:
    for _ in range(STEPS):
        engine.update(square(engine.model(engine.data(4, 8))))
