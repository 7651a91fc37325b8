"""Gradients, read, changed and cleared between backward and step."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import CLIPPED, USUAL, Subject, always, usage
from tests.runtime.patterns.models import Mlp, square

pattern = Subject(__name__)

REFUSED = always(usage("gathered_gradients()"))
CLIPPING = always(usage("gathered_gradients()", "optimizer.clip_grad_norm_"))


def _between(does: Callable[[Engine], Any]) -> Callable[[Engine], None]:
    """Trains as usual, and does this between backward and `step()`."""

    @wraps(does)
    def train(engine: Engine) -> None:
        for _ in range(STEPS):
            loss = square(engine.model(engine.data(4, 8)))
            engine.record(loss)
            engine.backward(loss)
            does(engine)
            engine.step()
            engine.zero_grad()

    return train


def _norms(engine: Engine) -> Tensor:
    # In fp64: the reference sums in another order, being a tensor of another layout.
    norms = [p.grad.double().norm() for p in engine.model.parameters() if p.grad is not None]
    return torch.stack(norms).sum()


def _halve(engine: Engine) -> None:
    for p in engine.model.parameters():
        assert p.grad is not None
        p.grad.mul_(0.5)


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
@_between
def torch_clip_norm(engine: Engine) -> None:
    nn.utils.clip_grad_norm_(engine.model.parameters(), 0.1)


@pattern("`nn.utils.get_total_norm` of the gradients", Mlp, refused=REFUSED)
@_between
def torch_total_norm(engine: Engine) -> None:
    engine.record(nn.utils.get_total_norm([p.grad for p in engine.model.parameters() if p.grad is not None]))


@pattern("`nn.utils.clip_grad_value_(model.parameters(), …)`", Mlp, refused=REFUSED)
@_between
def torch_clip_value(engine: Engine) -> None:
    nn.utils.clip_grad_value_(engine.model.parameters(), 1e-3)


pattern("`p.grad.norm()` read", Mlp, refused=REFUSED)(
    _between(lambda engine: engine.record(_norms(engine))), "read_norm"
)
pattern("`p.grad.mul_()`", Mlp, refused=REFUSED)(_between(_halve), "multiply")


@pattern("`p.grad = tensor`", Mlp, refused=REFUSED)
@_between
def assign(engine: Engine) -> None:
    for p in engine.model.parameters():
        p.grad = torch.ones_like(p)


@pattern("norms of each parameter inside `gathered_gradients()`", Mlp)
@_between
def gathered_norms(engine: Engine) -> None:
    with engine.gathered_gradients():
        engine.record(_norms(engine))


@pattern("`clip_grad_value_` inside `gathered_gradients()`", Mlp)
@_between
def gathered_clip_value(engine: Engine) -> None:
    with engine.gathered_gradients():
        nn.utils.clip_grad_value_(engine.model.parameters(), 1e-3)


@pattern("gradients masked inside `gathered_gradients()`, then clipped", Mlp)
@_between
def gathered_mask(engine: Engine) -> None:
    with engine.gathered_gradients(), torch.no_grad():
        for p in engine.model.parameters():
            assert p.grad is not None
            p.grad.mul_(p.grad > 0)
    engine.record(engine.clip(0.05))


@pattern("gradients changed inside `gathered_gradients()`, then another backward", Mlp)
@_between
def gathered_then_more(engine: Engine) -> None:
    with engine.gathered_gradients():
        _halve(engine)
    engine.backward(square(engine.model(engine.data(4, 8))))


@pattern.each_step("gradients changed inside `gathered_gradients()`, never cleared", Mlp)
def gathered_never_cleared(engine: Engine) -> None:
    engine.backward(square(engine.model(engine.data(4, 8))))
    with engine.gathered_gradients():
        _halve(engine)
        engine.record(_norms(engine))
    engine.step()


@pattern("a parameter's own hook that scales its gradient (`p.register_hook`)", Mlp)
def parameter_hook(engine: Engine) -> None:
    for p in engine.model.blocks[1].parameters():
        p.register_hook(lambda gradient: 0.25 * gradient)
    USUAL(engine)


class Hooked(Mlp):
    """The hook is there before the optimizer is."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.parameters():
            p.register_hook(lambda gradient: 0.25 * gradient)


pattern("a parameter's own hook, registered before the optimizer is built", Hooked)(
    CLIPPED, "parameter_hook_before"
)
