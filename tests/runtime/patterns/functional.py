# mypy: disable-error-code="no-any-return"
"""Functional use: `torch.func`, weights derived from the model's."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, func

from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import Subject, updates, usage
from tests.runtime.patterns.models import Mlp, square

pattern = Subject(__name__)

OUTSIDE: Any = {3: usage("gathered()", or_right=True)}


def _weights(engine: Engine) -> dict[str, Tensor]:
    return dict(engine.model.named_parameters())


def _maml(engine: Engine) -> Tensor:
    weights = _weights(engine)
    inner = square(func.functional_call(engine.model, weights, engine.data(4, 8)))
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    adapted = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), slopes, strict=True)}
    return square(func.functional_call(engine.model, adapted, engine.data(4, 8)))


pattern("MAML: one inner step, `functional_call` with adapted weights", Mlp, refused=OUTSIDE)(
    updates(_maml), "maml"
)


@pattern.each_step("MAML: the forward inside `gathered()`", Mlp)
def maml_gathered(engine: Engine) -> None:
    with engine.gathered():
        loss = _maml(engine)
    engine.update(loss)


def _first_order(engine: Engine) -> Tensor:
    weights = _weights(engine)
    inner = square(engine.model(engine.data(4, 8)))
    slopes = torch.autograd.grad(inner, list(weights.values()))
    adapted = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), slopes, strict=True)}
    return square(func.functional_call(engine.model, adapted, engine.data(4, 8)))


pattern("first-order MAML", Mlp, refused=OUTSIDE)(updates(_first_order), "first_order_maml")


def _loss(engine: Engine, x: Tensor) -> Any:
    def compute(weights: dict[str, Tensor]) -> Tensor:
        return square(func.functional_call(engine.model, weights, x))

    return compute


@pattern.each_step("`torch.func.grad` of the loss, beside the update", Mlp, refused=OUTSIDE)
def func_grad(engine: Engine) -> None:
    x = engine.data(4, 8)
    weights = {name: p.detach() for name, p in _weights(engine).items()}
    for slope in func.grad(_loss(engine, x))(weights).values():
        engine.record(slope.norm())
    engine.update(square(engine.model(x)))


def _per_example(engine: Engine, x: Tensor) -> None:
    weights = {name: p.detach() for name, p in _weights(engine).items()}

    def each(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return square(func.functional_call(engine.model, weights, row[None]))

    for slope in func.vmap(func.grad(each), (None, 0))(weights, x).values():
        engine.record(slope.norm())


@pattern.each_step("gradients of each example: `vmap` of `torch.func.grad`", Mlp, refused=OUTSIDE)
def per_example(engine: Engine) -> None:
    x = engine.data(4, 8)
    _per_example(engine, x)
    engine.update(square(engine.model(x)))


@pattern.each_step("gradients of each example inside `gathered()`", Mlp)
def per_example_gathered(engine: Engine) -> None:
    x = engine.data(4, 8)
    with engine.gathered():
        _per_example(engine, x)
    engine.update(square(engine.model(x)))


def _jvp(function: Any, at: Any, along: Any) -> Tensor:
    with warnings.catch_warnings():
        # Its first use imports torch's decompositions, which torch 2.13 compiles by its own deprecated means
        # (a DeprecationWarning; in torch 2.15 a FutureWarning).
        warnings.filterwarnings("ignore", "`torch.jit")
        result: Any = func.jvp(function, (at,), (along,))
    return result[1]


@pattern.each_step("`torch.func.jvp` along the weights", Mlp, refused=OUTSIDE)
def jvp(engine: Engine) -> None:
    x = engine.data(4, 8)
    weights = {name: p.detach() for name, p in _weights(engine).items()}
    tangents = {name: torch.ones_like(p) for name, p in weights.items()}
    engine.record(_jvp(_loss(engine, x), weights, tangents))
    engine.update(square(engine.model(x)))


@pattern.each_step("`torch.func.jvp` along the input", Mlp, refused=OUTSIDE)
def jvp_of_input(engine: Engine) -> None:
    x = engine.data(4, 8)
    slope = _jvp(engine.model, x, torch.ones_like(x))
    engine.update(square(engine.model(x)) + 0.1 * square(slope))


@pattern.each_step("`torch.func.jacrev` by the input, in the loss", Mlp, refused=OUTSIDE)
def jacobian(engine: Engine) -> None:
    x = engine.data(8)
    engine.update(square(engine.model(x)) + 0.1 * square(func.jacrev(engine.model)(x)))


@pattern.each_step("`functional_call` with the model's own weights", Mlp, refused=OUTSIDE)
def own_weights(engine: Engine) -> None:
    engine.update(square(func.functional_call(engine.model, _weights(engine), engine.data(4, 8))))


@pattern("`functional_call` with other buffers or weights that are none of the model's", Mlp, refused=OUTSIDE)
def other_weights(engine: Engine) -> None:
    other = {name: p.detach().clone() for name, p in Mlp().named_parameters()}
    for _ in range(STEPS):
        x = engine.data(4, 8)
        engine.update(square(engine.model(x) - func.functional_call(engine.model, other, x)))


@pattern.each_step("implicit differentiation: a fixed point found without gradients", Mlp)
def fixed_point(engine: Engine) -> None:
    bias = engine.data(4, 8)
    x = torch.zeros(4, 8)
    with torch.no_grad():
        for _ in range(5):
            x = torch.tanh(engine.model(0.5 * x) + bias)
    engine.update(square(torch.tanh(engine.model(0.5 * x) + bias)))
