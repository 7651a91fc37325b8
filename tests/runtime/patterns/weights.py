# mypy: disable-error-code="no-any-return"
"""Weights and gradients, read and changed outside of forward."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.runtime.patterns.engines import STEPS, VARIED_STEPS, Engine
from tests.runtime.patterns.harness import OUTSIDE, USUAL, Build, Refused, Subject, always, updates, usage
from tests.runtime.patterns.models import Mlp, Words, square

pattern = Subject(__name__)
OF_WORDS = updates(lambda engine: square(engine.model(engine.ids(80, 2, 6))))


def _penalty(model: nn.Module) -> Tensor:
    return sum((p.square().sum() for p in model.parameters()), start=torch.zeros(()))


@pattern.features("an L2 penalty over `self.parameters()` inside forward, before any unit is called")
def penalty_inside(model: Mlp, x: Tensor) -> Tensor:
    penalty = _penalty(model)
    x = model.first(x)
    for block in model.blocks:
        x = block(x)
    return x + 1e-3 * penalty


@pattern.features("a unit's weight used by the parent, before and after the unit is called", USUAL)
def weights_of_units(model: Any, x: Tensor) -> Tensor:
    x = model.first(x)
    early = x @ model.blocks[2].inner.weight
    for block in model.blocks:
        x = block(x)
    return x + 0.1 * early @ model.blocks[0].inner.weight


@pattern.model("a child's weight used before the child is called, inside forward", OF_WORDS)
class Head(Words):
    def features(self, ids: Tensor) -> Tensor:
        x = nn.functional.embedding(ids, self.head.weight)
        for block in self.blocks:
            x = block(x)
        return x


@pattern.model("`F.linear(x, self.head.weight)` inside forward, the head never called", OF_WORDS)
class HeadLater(Words):
    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(self.features(ids), self.head.weight)


@pattern.each_step("an L2 penalty over `model.parameters()` before the forward", refused=OUTSIDE)
def penalty_before(engine: Engine) -> None:
    penalty = _penalty(engine.model)
    engine.update(engine.loss() + 1e-3 * penalty)


@pattern.each_step("an L2 penalty over `model.parameters()` after the forward", refused=OUTSIDE)
def penalty_after(engine: Engine) -> None:
    engine.update(engine.loss() + 1e-3 * _penalty(engine.model))


@pattern.each_step("an L2 penalty, all of it inside `gathered()`")
def penalty_gathered(engine: Engine) -> None:
    with engine.gathered():
        engine.backward(engine.loss() + 1e-3 * _penalty(engine.model))
    engine.finish()


@pattern.each_step("`gathered()` between forward and backward, and between backward and `step()`")
def gathered_in_between(engine: Engine) -> None:
    loss = engine.loss()
    with engine.gathered():
        engine.record(_penalty(engine.model))
    engine.backward(loss)
    with engine.gathered():
        engine.record(_penalty(engine.model))
    engine.finish()


@pattern.each_step("`p.shape`, `p.numel()`, `p.dtype`, `p.dim()` at any time")
def shapes(engine: Engine) -> None:
    for p in engine.model.parameters():
        engine.record(sum(p.shape) + p.numel() + p.dim() + p.dtype.itemsize + p.size(0))
    engine.train()


@pattern.each_step("`model.state_dict()` after every step")
def state_dict(engine: Engine) -> None:
    engine.train()
    engine.record(sum(value.double().norm() for value in engine.model.state_dict().values()))


def after_steps(name: str, build: Build = Mlp, **options: Any) -> Callable[[Callable[[Engine], Any]], None]:
    """Registers what is done after each step: outside of `gathered()`, which stage 3 refuses, and inside."""

    def register(after: Callable[[Engine], Any]) -> None:
        def step(engine: Engine, gathered: bool) -> None:
            engine.train()
            with engine.gathered() if gathered else contextlib.nullcontext():
                after(engine)

        key = after.__name__
        pattern.each_step(name, build, **({"refused": OUTSIDE} | options))(partial(step, gathered=False), key)
        pattern.each_step(f"{name}, inside `gathered()`", build)(
            partial(step, gathered=True), f"{key}_gathered"
        )

    return register


@after_steps("an EMA over `model.parameters()` after `step()`")
def ema(engine: Engine) -> None:
    shadow: dict[str, Tensor] = engine.__dict__.setdefault("shadow", {})
    with torch.no_grad():
        for name, p in engine.model.named_parameters():
            shadow.setdefault(name, p.clone()).lerp_(p, 0.1)
    engine.record(sum(float(value.double().sum()) for value in shadow.values()))


class Averaged(Mlp):
    """AveragedModel copies the model before it is wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["average"] = torch.optim.swa_utils.AveragedModel(self)


@after_steps("AveragedModel", Averaged)
def swa(engine: Engine) -> None:
    average = engine.model.__dict__["average"]
    average.update_parameters(engine.model)
    with torch.no_grad():
        engine.record(square(average(torch.ones(2, 8))))


@after_steps(
    "one rank alone reads a norm",
    refused={3: usage("gathered()", everywhere=False)},
    apart=True,
)
def one_rank_reads(engine: Engine) -> None:
    if engine.rank == 0:
        engine.record(engine.model.blocks[0].inner.weight.detach().norm())
    dist.barrier()


@after_steps("weights clamped after `step()`, under `no_grad`")
def clamp(engine: Engine) -> None:
    with torch.no_grad():
        for p in engine.model.parameters():
            p.clamp_(-0.1, 0.1)


@after_steps("weights clamped after `step()`, through `p.data`")
def clamp_data(engine: Engine) -> None:
    for p in engine.model.parameters():
        p.data.clamp_(-0.1, 0.1)


@after_steps("`nn.init` after construction, with equal seeds")
def initialize(engine: Engine) -> None:
    torch.manual_seed(9 + engine.number)
    for p in engine.model.parameters():
        nn.init.normal_(p, std=0.1)


@pattern("weights loaded by `model.load_state_dict()`, evaluated, and swapped back")
def swapped(engine: Engine) -> None:
    early = engine.weights()
    for _ in range(STEPS):
        engine.train()
        late = engine.weights()
        engine.model.load_state_dict(early)
        engine.evaluate()
        engine.model.load_state_dict(late)
    engine.model.load_state_dict(early)
    USUAL(engine)


@pattern.each_step("`p.requires_grad_(False)` after construction", steps=VARIED_STEPS)
def freeze_later(engine: Engine) -> None:
    if engine.number == 2:
        engine.model.first.requires_grad_(False)
        engine.model.blocks[1].inner.weight.requires_grad_(False)
    engine.train()


@pattern.each_step("frozen for a step, then trained again", steps=VARIED_STEPS)
def freeze_and_thaw(engine: Engine) -> None:
    engine.model.blocks[1].requires_grad_(engine.number % 2 == 0)
    loss = engine.loss()
    if engine.number > 2:  # released before its step, which leaves it out all the same
        engine.model.blocks[1].requires_grad_(True)
    engine.update(loss, max_norm=0.1)


@pattern.each_step("frozen on one rank only", refused=always(Refused("LayoutMismatch", ())), apart=True)
def freeze_one_rank(engine: Engine) -> None:
    if engine.number == 1 and engine.rank == 1 and not engine.plain:
        engine.model.blocks[1].requires_grad_(False)
    engine.train()


def _norms(engine: Engine) -> None:
    # In fp64: the reference sums in another order, being a tensor of another layout.
    norms = [p.grad.double().norm() for p in engine.model.parameters() if p.grad is not None]
    engine.record(torch.stack(norms).sum())


def _each(change: Callable[[nn.Parameter], Any], engine: Engine) -> None:
    for p in engine.model.parameters():
        change(p)


def _unset(p: nn.Parameter) -> None:
    p.grad = None


def _zero(p: nn.Parameter) -> None:
    if p.grad is not None:
        p.grad.zero_()


def _halve(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def _assign(p: nn.Parameter) -> None:
    p.grad = torch.ones_like(p)


def clearing(key: str, name: str, clear: Callable[[Engine], Any]) -> None:
    def step(engine: Engine) -> None:
        engine.backward(engine.loss())
        clear(engine)
        engine.backward(engine.loss())
        engine.clip(0.1)
        engine.step()
        clear(engine)

    pattern.each_step(name)(step, key)


TO_ZEROS = methodcaller("zero_grad", set_to_none=False)
clearing("model_zero_grad", "`model.zero_grad()`", lambda engine: engine.model.zero_grad())
clearing("model_to_zeros", "`model.zero_grad(set_to_none=False)`", lambda engine: TO_ZEROS(engine.model))
clearing("to_zeros", "`optimizer.zero_grad(set_to_none=False)`", lambda engine: TO_ZEROS(engine.optimizer))
clearing("grad_none", "`p.grad = None` for all parameters", partial(_each, _unset))
clearing("grad_zero", "`p.grad.zero_()` for all parameters", partial(_each, _zero))


@pattern.each_step("`p.grad = None` for all parameters inside `accumulate()`")
def grad_none_accumulated(engine: Engine) -> None:
    with engine.accumulate():
        engine.backward(engine.loss())
        _each(_unset, engine)
        engine.backward(engine.loss())
    engine.train()


@pattern.each_step("`p.grad is None` before the first backward and after `zero_grad()`")
def grad_is_none(engine: Engine) -> None:
    engine.record(sum(p.grad is None for p in engine.model.parameters()))
    loss = engine.loss()
    engine.record(sum(p.grad is None for p in engine.model.parameters()))
    engine.update(loss)


def _between(does: Callable[[Engine], Any], engine: Engine, *, gathered: bool = False) -> None:
    engine.backward(engine.loss())
    if gathered:
        with engine.gathered_gradients():
            does(engine)
    else:
        does(engine)
    engine.finish()


def _clip_values(engine: Engine) -> None:
    nn.utils.clip_grad_value_(engine.model.parameters(), 1e-3)


def refuses(key: str, name: str, does: Callable[[Engine], Any], *words: str) -> None:
    refused = always(usage("gathered_gradients()", *words))
    pattern.each_step(name, refused=refused)(partial(_between, does), key)


refuses(
    "torch_clip_norm",
    "`nn.utils.clip_grad_norm_(model.parameters(), …)`",
    lambda engine: nn.utils.clip_grad_norm_(engine.model.parameters(), 0.1),
    "optimizer.clip_grad_norm_",
)
refuses(
    "torch_total_norm",
    "`nn.utils.get_total_norm` of the gradients",
    lambda engine: nn.utils.get_total_norm([p.grad for p in engine.model.parameters()]),
)
refuses("torch_clip_value", "`nn.utils.clip_grad_value_(model.parameters(), …)`", _clip_values)
refuses("read_norm", "`p.grad.norm()` read", _norms)
refuses("multiply", "`p.grad.mul_()`", partial(_each, _halve))
refuses("assign", "`p.grad = tensor`", partial(_each, _assign))
pattern.each_step("`clip_grad_value_` inside `gathered_gradients()`")(
    partial(_between, _clip_values, gathered=True), "gathered_clip_value"
)


@pattern.each_step("gradients masked inside `gathered_gradients()`, then clipped")
def gathered_mask(engine: Engine) -> None:
    engine.backward(engine.loss())
    with engine.gathered_gradients(), torch.no_grad():
        _each(lambda p: p.grad.mul_(p.grad > 0), engine)  # type: ignore[union-attr, operator]
    engine.clip(0.05)
    engine.finish()


@pattern.each_step("gradients changed inside `gathered_gradients()`, then another backward, never cleared")
def gathered_then_more(engine: Engine) -> None:
    engine.backward(engine.loss())
    with engine.gathered_gradients():
        _each(_halve, engine)
        _norms(engine)
    engine.backward(engine.loss())
    engine.step()


def _quarter(gradient: Tensor) -> Tensor:
    return 0.25 * gradient


@pattern.model("a parameter's own hook that scales its gradient, registered before the optimizer is built")
class Hooked(Mlp):
    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_hook(_quarter)


@pattern("a parameter's own hook that scales its gradient (`p.register_hook`)")
def parameter_hook(engine: Engine) -> None:
    for p in engine.model.blocks[1].parameters():
        p.register_hook(_quarter)
    USUAL(engine)
