# mypy: disable-error-code="no-any-return"
"""Functional use: `torch.func`, weights derived from the model's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, func

from tests.runtime.patterns.engines import Engine
from tests.runtime.patterns.harness import Subject, updates, usage
from tests.runtime.patterns.models import Mlp, square

pattern = Subject(__name__)

OUTSIDE: Any = {3: usage("gathered()", or_right=True)}


def _call(engine: Engine, weights: dict[str, Tensor], x: Tensor) -> Any:
    return square(func.functional_call(engine.model, weights, x))


def _weights(engine: Engine) -> dict[str, Tensor]:
    return dict(engine.model.named_parameters())


def _detached(engine: Engine) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in _weights(engine).items()}


def _maml(engine: Engine) -> Tensor:
    weights = _weights(engine)
    inner = _call(engine, weights, engine.data())
    slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
    adapted = {name: p - 0.1 * g for (name, p), g in zip(weights.items(), slopes, strict=True)}
    return _call(engine, adapted, engine.data())


pattern("MAML: one inner step, `functional_call` with adapted weights", refused=OUTSIDE)(
    updates(_maml), "maml"
)


@pattern.each_step("MAML: the forward inside `gathered()`")
def maml_gathered(engine: Engine) -> None:
    with engine.gathered():
        loss = _maml(engine)
    engine.update(loss)


# ---- transformations beside the update


def _grad(engine: Engine, x: Tensor) -> None:
    slopes = func.grad(lambda weights: _call(engine, weights, x))(_detached(engine))
    engine.record(sum(slope.norm() for slope in slopes.values()))


def _per_example(engine: Engine, x: Tensor) -> None:
    each = func.grad(lambda weights, row: _call(engine, weights, row[None]))
    slopes = func.vmap(each, (None, 0))(_detached(engine), x)
    engine.record(sum(slope.norm() for slope in slopes.values()))


def _jvp(function: Any, at: Any, along: Any) -> Tensor:
    with warnings.catch_warnings():
        # Its first use imports torch's decompositions, which torch 2.13 compiles by its own deprecated means
        # (a DeprecationWarning; in torch 2.15 a FutureWarning).
        warnings.filterwarnings("ignore", "`torch.jit")
        result: Any = func.jvp(function, (at,), (along,))
    return result[1]


def _along_weights(engine: Engine, x: Tensor) -> None:
    weights = _detached(engine)
    tangents = {name: torch.ones_like(p) for name, p in weights.items()}
    engine.record(_jvp(lambda weights: _call(engine, weights, x), weights, tangents))


BESIDE: dict[str, tuple[str, Callable[[Engine, Tensor], None]]] = {
    "func_grad": ("`torch.func.grad` of the loss", _grad),
    "per_example": ("gradients of each example: `vmap` of `torch.func.grad`", _per_example),
    "jvp": ("`torch.func.jvp` along the weights", _along_weights),
}
for key, (name, beside) in BESIDE.items():

    def step(engine: Engine, beside: Callable[[Engine, Tensor], None] = beside) -> None:
        x = engine.data()
        beside(engine, x)
        engine.update(square(engine.model(x)))

    pattern.each_step(name, refused=OUTSIDE)(step, key)


@pattern.each_step("gradients of each example inside `gathered()`")
def per_example_gathered(engine: Engine) -> None:
    with engine.gathered():
        _per_example(engine, engine.data())
    engine.train()


def _slope_of_input(engine: Engine) -> Tensor:
    x = engine.data()
    slope = _jvp(engine.model, x, torch.ones_like(x))
    return square(engine.model(x)) + 0.1 * square(slope)


def _jacobian(engine: Engine) -> Tensor:
    x = engine.data(8)
    return square(engine.model(x)) + 0.1 * square(func.jacrev(engine.model)(x))


def _beside_others(engine: Engine) -> Tensor:
    other = {name: p.detach() for name, p in Mlp().named_parameters()}
    x = engine.data()
    return square(engine.model(x) - func.functional_call(engine.model, other, x))


LOSSES: dict[str, tuple[str, Callable[[Engine], Tensor]]] = {
    "jvp_of_input": ("`torch.func.jvp` along the input", _slope_of_input),
    "jacobian": ("`torch.func.jacrev` by the input, in the loss", _jacobian),
    "own_weights": (
        "`functional_call` with the model's own weights",
        lambda engine: _call(engine, _weights(engine), engine.data()),
    ),
    "other_weights": ("`functional_call` with weights that are none of the model's", _beside_others),
}
for key, (name, loss) in LOSSES.items():
    pattern(name, refused=OUTSIDE)(updates(loss), key)


@pattern.each_step("implicit differentiation: a fixed point found without gradients")
def fixed_point(engine: Engine) -> None:
    bias = engine.data()
    x = torch.zeros(4, 8)
    with torch.no_grad():
        for _ in range(5):
            x = torch.tanh(engine.model(0.5 * x) + bias)
    engine.update(square(torch.tanh(engine.model(0.5 * x) + bias)))
