"""Gradients, read, changed and cleared between backward and step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.runtime.patterns.engines import Engine
from tests.runtime.patterns.harness import USUAL, Subject, always, usage
from tests.runtime.patterns.models import Mlp

pattern = Subject(__name__)


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


# ---- cleared

CLEARINGS: dict[str, tuple[str, Callable[[Engine], Any]]] = {
    "model_zero_grad": ("`model.zero_grad()`", lambda engine: engine.model.zero_grad()),
    "model_zero_grad_to_zeros": (
        "`model.zero_grad(set_to_none=False)`",
        lambda engine: engine.model.zero_grad(set_to_none=False),
    ),
    "zero_grad_to_zeros": (
        "`optimizer.zero_grad(set_to_none=False)`",
        lambda engine: engine.optimizer.zero_grad(set_to_none=False),
    ),
    "grad_none": ("`p.grad = None` for all parameters", partial(_each, _unset)),
    "grad_zero": ("`p.grad.zero_()` for all parameters", partial(_each, _zero)),
}


def _clearing(clear: Callable[[Engine], Any], engine: Engine) -> None:
    engine.backward(engine.loss())
    clear(engine)
    engine.backward(engine.loss())
    engine.clip(0.1)
    engine.step()
    clear(engine)


for key, (name, clear) in CLEARINGS.items():
    pattern.each_step(name)(partial(_clearing, clear), key)


@pattern.each_step("`p.grad is None` before the first backward and after `zero_grad()`")
def grad_is_none(engine: Engine) -> None:
    engine.record(sum(p.grad is None for p in engine.model.parameters()))
    loss = engine.loss()
    engine.record(sum(p.grad is None for p in engine.model.parameters()))
    engine.update(loss)


# ---- read and changed


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


REFUSED: dict[str, tuple[str, Callable[[Engine], Any], tuple[str, ...]]] = {
    "torch_clip_norm": (
        "`nn.utils.clip_grad_norm_(model.parameters(), …)`",
        lambda engine: nn.utils.clip_grad_norm_(engine.model.parameters(), 0.1),
        ("optimizer.clip_grad_norm_",),
    ),
    "torch_total_norm": (
        "`nn.utils.get_total_norm` of the gradients",
        lambda engine: nn.utils.get_total_norm([p.grad for p in engine.model.parameters()]),
        (),
    ),
    "torch_clip_value": ("`nn.utils.clip_grad_value_(model.parameters(), …)`", _clip_values, ()),
    "read_norm": ("`p.grad.norm()` read", _norms, ()),
    "multiply": ("`p.grad.mul_()`", partial(_each, _halve), ()),
    "assign": ("`p.grad = tensor`", partial(_each, _assign), ()),
}
for key, (name, does, words) in REFUSED.items():
    refused = always(usage("gathered_gradients()", *words))
    pattern.each_step(name, refused=refused)(partial(_between, does), key)
for key, name, does in (
    ("gathered_norms", "norms of each parameter", _norms),
    ("gathered_clip_value", "`clip_grad_value_`", _clip_values),
):
    pattern.each_step(f"{name} inside `gathered_gradients()`")(partial(_between, does, gathered=True), key)


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


# ---- the parameters' own hooks


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
