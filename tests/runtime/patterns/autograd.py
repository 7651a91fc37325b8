# mypy: disable-error-code="no-any-return"
"""Autograd: gradients of gradients, of inputs, custom functions; `torch.func`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, func, nn

from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import CLIPPED, Refused, Subject, always, updates, usage
from tests.runtime.patterns.models import WIDTH, Mlp, square

pattern = Subject(__name__)

grad = torch.autograd.grad


@pattern.each_step("a gradient penalty, as in WGAN-GP")
def gradient_penalty(engine: Engine) -> None:
    real, fake = engine.data(), engine.data()
    loss = engine.model(fake).mean() - engine.model(real).mean()
    mixed = (0.5 * (real + fake)).requires_grad_()
    (slope,) = grad(engine.model(mixed).sum(), mixed, create_graph=True)
    engine.update(loss + 10 * (slope.norm(dim=1) - 1).square().mean())


class ForceField(Mlp):
    """Forces are the negative gradient of an energy, taken inside forward."""

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            x = x.requires_grad_()
            energy = super().forward(x).sum()
            (slope,) = grad(energy, x, create_graph=True)
        return energy, -slope


@pattern.each_step(
    "a force field: `autograd.grad` inside forward, evaluated under `no_grad` in between", ForceField
)
def force_field(engine: Engine) -> None:
    energy, force = engine.model(engine.data())
    engine.update(1e-2 * energy.square() + square(force - 1))
    with torch.no_grad():
        engine.record(square(engine.model(engine.data())[1]))


@pattern.each_step("`loss.backward(create_graph=True)`")
def backward_create_graph(engine: Engine) -> None:
    loss = engine.loss()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward")
        loss.backward(create_graph=True)
    engine.record(loss)
    engine.finish()


@pattern("a Hessian-vector product")
def hessian_vector(engine: Engine) -> None:
    parameters = list(engine.model.parameters())
    for _ in range(STEPS):
        loss = engine.loss()
        vector = [engine.data(*p.shape) for p in parameters]
        slopes = grad(loss, parameters, create_graph=True)
        product = sum(((g * v).sum() for g, v in zip(slopes, vector, strict=True)), start=torch.zeros(()))
        for part in grad(product, parameters, retain_graph=True):
            engine.record(part.norm())
        engine.update(loss)


@pattern.each_step("`autograd.grad` with respect to parameters, beside the update")
def gradients_of_parameters(engine: Engine) -> None:
    loss = engine.loss()
    weights = [engine.model.head.weight, engine.model.blocks[0].inner.weight]
    for slope in grad(loss, weights, retain_graph=True):
        engine.record(slope.norm())
    engine.update(loss)


@pattern.each_step("adversarial training: `x.grad` (FGSM), at times dropping its gradients")
def adversarial(engine: Engine) -> None:
    x = engine.data().requires_grad_()
    engine.backward(square(engine.model(x)))
    assert x.grad is not None
    if engine.number % 2:
        engine.zero_grad()
    engine.update(square(engine.model(x.detach() + 0.1 * x.grad)))


@pattern.each_step("saliency: `autograd.grad` of inputs, the graph given up")
def saliency(engine: Engine) -> None:
    x = engine.data().requires_grad_()
    (slope,) = grad(square(engine.model(x)), x)
    engine.record(slope.norm())
    engine.train()


@pattern.each_step("an inner loop over inputs (energy-based), `retain_graph` within it")
def inner_loop(engine: Engine) -> None:
    x = engine.data().requires_grad_()
    for _ in range(3):
        (slope,) = grad(square(engine.model(x)), x, retain_graph=True)
        x = (x - 0.1 * slope).detach().requires_grad_()
    engine.update(engine.loss() - 0.1 * square(engine.model(x)))


@pattern.each_step("an unrolled inner loop over inputs, differentiated through")
def unrolled_loop(engine: Engine) -> None:
    x = engine.data().requires_grad_()
    for _ in range(2):
        (slope,) = grad(square(engine.model(x)), x, create_graph=True)
        x = x - 0.1 * slope
    engine.update(square(engine.model(x)))


class SavesWeight(torch.autograd.Function):
    """The usual way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


class KeepsWeight(torch.autograd.Function):
    """Reads the parameter again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.t() @ x


class Adjoint(torch.autograd.Function):
    """Runs a block again in backward, with its weights as arguments of the function."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.block = block
        ctx.save_for_backward(x, *weights)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, *weights = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return None, *torch.autograd.grad(ctx.block(x), (x, *weights), gradient)


@pattern.features(
    "a custom function that saves the weights of a unit (adjoint method of torchdiffeq)",
    refused={3: Refused("ScheduleError", ("units=", "stage 2"), or_right=True)},
)
def adjoint(model: Any, x: Tensor) -> Tensor:
    x, function = model.first(x), cast(Any, Adjoint)
    for block in model.blocks:
        x = function.apply(block, x, *block.parameters())
    return x


class Custom(nn.Module):
    """A layer around a custom function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.function.apply(x, self.weight))


pattern("a custom function that saves its weight", lambda: Mlp(block=lambda: Custom(SavesWeight)))(
    CLIPPED, "saves_weight"
)
pattern("a custom function that keeps its weight on `ctx`", lambda: Mlp(block=lambda: Custom(KeepsWeight)))(
    CLIPPED, "keeps_weight"
)


@pattern.features("a forward with parts under `no_grad` and a detached middle")
def cut(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = model.blocks[0](model.first(x))
    y = model.blocks[1](x)
    return model.blocks[2](y.detach()) + y


@pattern.model("a first pass under `no_grad`, fed to a second one, in one forward (self-conditioning)")
class Again(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            guess = super().forward(x)
        return super().forward(x + guess)


@pattern.each_step("`save_on_cpu`; saved tensors packed by hooks of the user's (as copies)")
def packed(engine: Engine) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = engine.loss()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = loss + engine.loss()
    engine.update(loss)


@pattern("anomaly detection")
def anomaly(engine: Engine) -> None:
    with warnings.catch_warnings(action="ignore"), torch.autograd.set_detect_anomaly(True):
        CLIPPED(engine)


@pattern.each_step("`retain_grad()` on an activation")
def retain_grad(engine: Engine) -> None:
    y = engine.model(engine.data())
    y.retain_grad()
    engine.update(square(y))
    engine.record(y.grad.norm())


@pattern("compiled autograd", refused=always(usage("compiled autograd", "compile the model")))
def compiled(engine: Engine) -> None:
    loss = engine.loss()
    engine.record(loss)
    if not engine.plain:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            engine.backward(loss)


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
