# mypy: disable-error-code="no-any-return"
"""Autograd: gradients of gradients, gradients of inputs, custom functions."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import CLIPPED, Subject, always, usage
from tests.runtime.patterns.models import WIDTH, Block, Mlp, chain, square

pattern = Subject(__name__)

grad = torch.autograd.grad


# ---- gradients of gradients


@pattern.each_step("a gradient penalty, as in WGAN-GP", Mlp)
def gradient_penalty(engine: Engine) -> None:
    real, fake = engine.data(4, 8), engine.data(4, 8)
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


@pattern.each_step("a force field: `autograd.grad` inside forward, loss of energy and forces", ForceField)
def force_field(engine: Engine) -> None:
    energy, force = engine.model(engine.data(4, 8))
    engine.update(1e-2 * energy.square() + square(force - 1))


@pattern.each_step("a force field, evaluated under `no_grad` in between", ForceField)
def force_field_evaluated(engine: Engine) -> None:
    with torch.no_grad():
        engine.record(square(engine.model(engine.data(4, 8))[1]))
    engine.update(square(engine.model(engine.data(4, 8))[1]))


@pattern.each_step("`loss.backward(create_graph=True)`", Mlp)
def backward_create_graph(engine: Engine) -> None:
    loss = square(engine.model(engine.data(4, 8)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward")
        loss.backward(create_graph=True)
    engine.record(loss)
    engine.step()
    engine.zero_grad()


@pattern("a Hessian-vector product", Mlp)
def hessian_vector(engine: Engine) -> None:
    parameters = list(engine.model.parameters())
    for _ in range(STEPS):
        loss = square(engine.model(engine.data(4, 8)))
        vector = [engine.data(*p.shape) for p in parameters]
        slopes = grad(loss, parameters, create_graph=True)
        product = sum(((g * v).sum() for g, v in zip(slopes, vector, strict=True)), start=torch.zeros(()))
        for part in grad(product, parameters, retain_graph=True):
            engine.record(part.norm())
        engine.update(loss)


@pattern.each_step("a penalty of the parameters' gradients", Mlp)
def penalty_of_gradients(engine: Engine) -> None:
    loss = square(engine.model(engine.data(4, 8)))
    slopes = grad(loss, list(engine.model.parameters()), create_graph=True)
    engine.update(loss + 0.1 * sum(g.square().sum() for g in slopes))


@pattern.each_step("`autograd.grad` with respect to parameters, beside the update", Mlp)
def gradients_of_parameters(engine: Engine) -> None:
    loss = square(engine.model(engine.data(4, 8)))
    weights = [engine.model.head.weight, engine.model.blocks[0].inner.weight]
    for slope in grad(loss, weights, retain_graph=True):
        engine.record(slope.norm())
    engine.update(loss)


# ---- gradients of inputs


@pattern.each_step("adversarial training: `x.grad` (FGSM), then a step", Mlp)
def adversarial(engine: Engine) -> None:
    x = engine.data(4, 8).requires_grad_()
    engine.backward(square(engine.model(x)))
    assert x.grad is not None
    engine.zero_grad()
    engine.update(square(engine.model(x.detach() + 0.1 * x.grad)))


@pattern.each_step("adversarial training that keeps both gradients", Mlp)
def adversarial_both(engine: Engine) -> None:
    x = engine.data(4, 8).requires_grad_()
    engine.backward(square(engine.model(x)))
    assert x.grad is not None
    engine.update(square(engine.model(x.detach() + 0.1 * x.grad)))


@pattern.each_step("saliency: `autograd.grad` of inputs, the graph given up", Mlp)
def saliency(engine: Engine) -> None:
    x = engine.data(4, 8).requires_grad_()
    (slope,) = grad(square(engine.model(x)), x)
    engine.record(slope.norm())
    engine.update(square(engine.model(engine.data(4, 8))))


@pattern.each_step("an inner loop over inputs (energy-based), `retain_graph` within it", Mlp)
def inner_loop(engine: Engine) -> None:
    x = engine.data(4, 8).requires_grad_()
    for _ in range(3):
        energy = square(engine.model(x))
        (slope,) = grad(energy, x, retain_graph=True)
        x = (x - 0.1 * slope).detach().requires_grad_()
    engine.update(square(engine.model(engine.data(4, 8))) - 0.1 * square(engine.model(x)))


@pattern.each_step("an unrolled inner loop over inputs, differentiated through", Mlp)
def unrolled_loop(engine: Engine) -> None:
    x = engine.data(4, 8).requires_grad_()
    for _ in range(2):
        (slope,) = grad(square(engine.model(x)), x, create_graph=True)
        x = x - 0.1 * slope
    engine.update(square(engine.model(x)))


# ---- custom functions


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


class Custom(nn.Module):
    """A layer around a custom function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.function.apply(x, self.weight))


def _customs(function: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(8, WIDTH), *(Custom(function) for _ in range(3)), nn.Linear(WIDTH, 8))


pattern("a custom function that saves its weight", lambda: _customs(SavesWeight))(CLIPPED, "saves_weight")
pattern("a custom function that keeps its weight on `ctx`", lambda: _customs(KeepsWeight))(
    CLIPPED, "keeps_weight"
)


class Reverse(torch.autograd.Function):
    """The gradient reversal of domain-adversarial training."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Domains(Mlp):
    """Two heads, one behind a gradient reversal."""

    def __init__(self) -> None:
        super().__init__()
        self.domain = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Any:
        x = self.features(x)
        reverse: Any = Reverse.apply
        return self.head(x), self.domain(reverse(x))


@pattern.each_step("gradient reversal before a second head", Domains)
def reversal(engine: Engine) -> None:
    one, two = engine.model(engine.data(4, 8))
    engine.update(square(one) + square(two))


class Rounded(Block):
    """A straight-through estimator."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + (y.round() - y).detach()


pattern("straight-through rounding", lambda: nn.Sequential(nn.Linear(8, WIDTH), Rounded(), Block()))(
    CLIPPED, "straight_through"
)


# ---- what is cut out of the graph, or stored elsewhere


class Cut(Mlp):
    """Parts without gradient, and a detached middle."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
            x = self.blocks[0](x)
        y = self.blocks[1](x)
        return self.head(self.blocks[2](y.detach()) + y)


pattern("a forward with parts under `no_grad` and a detached middle", Cut)(CLIPPED, "cut")


class Again(Mlp):
    """The same blocks without and then with gradients (self-conditioning)."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            guess = super().forward(x)
        return super().forward(x + guess)


pattern("a first pass under `no_grad`, fed to a second one, in one forward", Again)(
    CLIPPED, "self_conditioning"
)


@pattern("truncated backpropagation through time, the hidden state detached", lambda: chain(2))
def truncated(engine: Engine) -> None:
    hidden = torch.zeros(4, WIDTH)
    for _ in range(STEPS):
        hidden = engine.model(hidden.detach() + engine.data(4, WIDTH))
        engine.update(square(hidden))


@pattern.each_step("`save_on_cpu`", Mlp)
def save_on_cpu(engine: Engine) -> None:
    with torch.autograd.graph.save_on_cpu():
        loss = square(engine.model(engine.data(4, 8)))
    engine.update(loss)


@pattern.each_step("saved tensors packed by hooks of the user's (as copies)", Mlp)
def packed(engine: Engine) -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        loss = square(engine.model(engine.data(4, 8)))
    engine.update(loss)


@pattern("anomaly detection", Mlp)
def anomaly(engine: Engine) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True):
            CLIPPED(engine)


@pattern.each_step("`retain_grad()` on an activation", Mlp)
def retain_grad(engine: Engine) -> None:
    y = engine.model(engine.data(4, 8))
    y.retain_grad()
    loss = square(y)
    engine.backward(loss)
    engine.record(y.grad.norm())
    engine.step()
    engine.zero_grad()


@pattern("compiled autograd", Mlp, refused=always(usage("compiled autograd", "compile the model")))
def compiled(engine: Engine) -> None:
    loss = square(engine.model(engine.data(4, 8)))
    engine.record(loss)
    if not engine.plain:
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            engine.backward(loss)
