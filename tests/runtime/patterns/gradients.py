"""Gradients, read, changed and cleared between backward and step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import Subject, always, usage
from tests.runtime.patterns.models import Mlp, square

pattern = Subject(__name__)

REFUSED = always(usage("gathered_gradients()"))
CLIPPING = always(usage("gathered_gradients()", "optimizer.clip_grad_norm_"))


def _usual(engine: Engine, between: Callable[[list[nn.Parameter]], Any], clear: bool = True) -> None:
    parameters = list(engine.model.parameters())
    for _ in range(STEPS):
        loss = square(engine.model(engine.data(4, 8)))
        engine.record(loss)
        engine.backward(loss)
        between(parameters)
        engine.step()
        if clear:
            engine.zero_grad()


def _clearing(engine: Engine, clear: Callable[[], Any]) -> None:
    for _ in range(STEPS):
        engine.backward(square(engine.model(engine.data(4, 8))))
        clear()
        loss = square(engine.model(engine.data(4, 8)))
        engine.record(loss)
        engine.backward(loss)
        engine.record(engine.clip(0.1))
        engine.step()
        clear()


pattern("`model.zero_grad()`", Mlp)(
    lambda engine: _clearing(engine, engine.model.zero_grad), "model_zero_grad"
)


@pattern("`model.zero_grad(set_to_none=False)`", Mlp)
def model_zero_grad_to_zeros(engine: Engine) -> None:
    _clearing(engine, lambda: engine.model.zero_grad(set_to_none=False))


@pattern("`optimizer.zero_grad(set_to_none=False)`", Mlp)
def zero_grad_to_zeros(engine: Engine) -> None:
    _clearing(engine, lambda: engine.optimizer.zero_grad(set_to_none=False))


@pattern("`p.grad = None` for all parameters", Mlp)
def grad_none(engine: Engine) -> None:
    def clear() -> None:
        for p in engine.model.parameters():
            p.grad = None

    _clearing(engine, clear)


@pattern("`p.grad.zero_()` for all parameters", Mlp)
def grad_zero(engine: Engine) -> None:
    def clear() -> None:
        for p in engine.model.parameters():
            if p.grad is not None:
                p.grad.zero_()

    _clearing(engine, clear)


@pattern.each_step("`p.grad is None` before the first backward and after `zero_grad()`", Mlp)
def grad_is_none(engine: Engine) -> None:
    engine.record(sum(p.grad is None for p in engine.model.parameters()))
    loss = square(engine.model(engine.data(4, 8)))
    engine.record(sum(p.grad is None for p in engine.model.parameters()))
    engine.update(loss)


@pattern("`nn.utils.clip_grad_norm_(model.parameters(), …)`", Mlp, refused=CLIPPING)
def torch_clip_norm(engine: Engine) -> None:
    _usual(engine, lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1))


@pattern("`nn.utils.get_total_norm` of the gradients", Mlp, refused=REFUSED)
def torch_total_norm(engine: Engine) -> None:
    def read(parameters: list[nn.Parameter]) -> None:
        engine.record(nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))

    _usual(engine, read)


@pattern("`nn.utils.clip_grad_value_(model.parameters(), …)`", Mlp, refused=REFUSED)
def torch_clip_value(engine: Engine) -> None:
    _usual(engine, lambda parameters: nn.utils.clip_grad_value_(parameters, 1e-3))


pattern("`p.grad.norm()` read", Mlp, refused=REFUSED)(
    lambda engine: _usual(engine, lambda parameters: engine.record(_norms(parameters))), "read_norm"
)
pattern("`p.grad.mul_()`", Mlp, refused=REFUSED)(lambda engine: _usual(engine, _halve), "multiply")


@pattern("`p.grad = tensor`", Mlp, refused=REFUSED)
def assign(engine: Engine) -> None:
    def change(parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            p.grad = torch.ones_like(p)

    _usual(engine, change)


def _norms(parameters: list[nn.Parameter]) -> Tensor:
    # In fp64: the reference sums in another order, being a tensor of another layout.
    norms = [p.grad.double().norm() for p in parameters if p.grad is not None]
    return torch.stack(norms).sum()


def _halve(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        assert p.grad is not None
        p.grad.mul_(0.5)


@pattern("norms of each parameter inside `gathered_gradients()`", Mlp)
def gathered_norms(engine: Engine) -> None:
    def read(parameters: list[nn.Parameter]) -> None:
        with engine.gathered_gradients():
            engine.record(_norms(parameters))

    _usual(engine, read)


@pattern("`clip_grad_value_` inside `gathered_gradients()`", Mlp)
def gathered_clip_value(engine: Engine) -> None:
    def clip(parameters: list[nn.Parameter]) -> None:
        with engine.gathered_gradients():
            nn.utils.clip_grad_value_(parameters, 1e-3)

    _usual(engine, clip)


@pattern("gradients masked inside `gathered_gradients()`, then clipped", Mlp)
def gathered_mask(engine: Engine) -> None:
    def mask(parameters: list[nn.Parameter]) -> None:
        with engine.gathered_gradients(), torch.no_grad():
            for p in parameters:
                assert p.grad is not None
                p.grad.mul_(p.grad > 0)
        engine.record(engine.clip(0.05))

    _usual(engine, mask)


@pattern("gradients changed inside `gathered_gradients()`, then another backward", Mlp)
def gathered_then_more(engine: Engine) -> None:
    def more(parameters: list[nn.Parameter]) -> None:
        with engine.gathered_gradients():
            _halve(parameters)
        engine.backward(square(engine.model(engine.data(4, 8))))

    _usual(engine, more)


@pattern("gradients changed inside `gathered_gradients()`, never cleared", Mlp)
def gathered_never_cleared(engine: Engine) -> None:
    def change(parameters: list[nn.Parameter]) -> None:
        with engine.gathered_gradients():
            _halve(parameters)

    _usual(engine, change, clear=False)


@pattern("a parameter's own hook that scales its gradient (`p.register_hook`)", Mlp)
def parameter_hook(engine: Engine) -> None:
    for p in engine.model.blocks[1].parameters():
        p.register_hook(lambda gradient: 0.25 * gradient)
    _usual(engine, lambda parameters: None)


class Hooked(Mlp):
    """The hook is there before the optimizer is."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_hook(lambda gradient: 0.25 * gradient)


@pattern("a parameter's own hook, registered before the optimizer is built", Hooked)
def parameter_hook_before(engine: Engine) -> None:
    _usual(engine, lambda parameters: engine.record(engine.clip(0.01)))
