# mypy: disable-error-code="no-any-return"
"""Models and optimizers as objects: construction, copies, pickles, other tools of torch."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import zerokit
from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import USUAL, Refused, Subject, always, usage
from tests.runtime.patterns.models import Mlp, square

pattern = Subject(__name__)

OR_RIGHT = always(usage(or_right=True))


# ---- construction


def _zero(engine: Engine, build: Callable[[], Any], **options: Any) -> None:
    """Another ZeroOptimizer, which plain torch has not."""
    engine.record(0)
    if not engine.plain:
        settings: Any = {"stage": engine.setting.stage, "precision": "fp32", "lr": 0.1, **options}
        zerokit.ZeroOptimizer(build(), torch.optim.SGD, **settings)


def _sharing(engine: Engine) -> nn.Module:
    other = Mlp()
    other.blocks[0] = engine.model.blocks[0]
    return other


pattern("two optimizers over models that share a layer", refused=always(usage("already")))(
    lambda engine: _zero(engine, lambda: _sharing(engine)), "shared_layer"
)
pattern("two optimizers over one model", refused=always(usage("already")))(
    lambda engine: _zero(engine, lambda: engine.model), "same_model"
)
pattern("`ZeroOptimizer(model.parameters(), …)`", refused=always(usage("pass the model")))(
    lambda engine: _zero(engine, lambda: Mlp().parameters()), "parameters_given"
)


@pattern(
    "a weight decay of a group that differs by rank",
    refused=always(Refused("LayoutMismatch", ("rank 1", "weight_decay"))),
)
def weight_decays(engine: Engine) -> None:
    model = Mlp()
    groups = [
        {"params": model.head.parameters(), "weight_decay": 0.1 * engine.rank},
        {"params": [*model.first.parameters(), *model.blocks.parameters()]},
    ]
    _zero(engine, lambda: model, params=groups)


# ---- in the middle of training

Does = Callable[[Engine], Any]


def amid(name: str, **options: Any) -> Callable[..., Does]:
    """Registers a step, then something that plain torch allows, then more steps."""

    def register(does: Does, key: str = "") -> Does:
        @wraps(does)
        def train(engine: Engine) -> None:
            engine.train()
            does(engine)
            USUAL(engine)

        return pattern(name, **options)(train, key)

    return register


COPIES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "deepcopy": ("copy.deepcopy", copy.deepcopy),
    "save": ("torch.save", lambda thing: torch.save(thing, io.BytesIO())),
    "pickle": ("pickle.dumps", pickle.dumps),
}
for verb, (function, take) in COPIES.items():
    for what in ("model", "optimizer"):
        amid(f"`{function}({what})`", refused=always(usage()))(
            lambda engine, take=take, what=what: take(getattr(engine, what)), f"{verb}_{what}"
        )


@amid("`copy.deepcopy` of a block, inside `gathered()`", refused=OR_RIGHT)
def deepcopy_block(engine: Engine) -> None:
    with engine.gathered():
        block = copy.deepcopy(engine.model.blocks[0])
    engine.record(square(block(torch.ones(2, 64))))


@amid("`torch.save(model.state_dict())`, loaded into a new plain model")
def save_state_dict(engine: Engine) -> None:
    file = io.BytesIO()
    torch.save(engine.model.state_dict(), file)
    file.seek(0)
    model = Mlp()
    model.load_state_dict(torch.load(file))
    engine.record(square(model(torch.ones(2, 8))))


@amid("`optimizer.state_dict()`, taken and loaded again later")
def optimizer_state_dict(engine: Engine) -> None:
    model, state = engine.weights(), copy.deepcopy(engine.optimizer.state_dict())
    engine.train()
    engine.model.load_state_dict(model)
    engine.optimizer.load_state_dict(state)


@amid("`torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)`", refused=OR_RIGHT)
def checkpoint_state_dict(engine: Engine) -> None:
    _, state = get_state_dict(engine.model, engine.optimizer)
    engine.record(len(state["state"]))


@amid(
    "`model.train()`, `eval()`, `requires_grad_(True)`, `to(same)`, `zero_grad()`, `apply()`, `repr` at any time"
)
def harmless(engine: Engine) -> None:
    engine.model.eval()
    engine.model.train().to(torch.float32).cpu().requires_grad_(True)
    engine.model.apply(lambda module: engine.record(len(list(module.children()))))
    engine.optimizer.zero_grad()
    engine.model.zero_grad()
    assert repr(engine.model)
    assert repr(engine.optimizer)


# It assigns `p.data`.
@amid("`vector_to_parameters` inside `gathered()`", refused=OR_RIGHT)
def from_vector(engine: Engine) -> None:
    with engine.gathered():
        vector = nn.utils.parameters_to_vector(engine.model.parameters())
        nn.utils.vector_to_parameters(0.5 * vector.detach(), engine.model.parameters())


STATE = always(usage("optimizer.state", "param_groups"))


@pattern("`optimizer.state[p]`", refused=STATE)
def state_outside(engine: Engine) -> None:
    engine.train()
    engine.record(len(engine.optimizer.state[engine.model.head.weight]))


@pattern("`optimizer.state.pop(p)` to begin a parameter's moments anew", refused=STATE)
def state_popped(engine: Engine) -> None:
    engine.train()
    engine.optimizer.state.pop(engine.model.head.weight, None)


# ---- around it


@pattern("`optimizer.register_step_post_hook`")
def step_hooks(engine: Engine) -> None:
    engine.optimizer.register_step_post_hook(lambda *args: engine.record(7))
    USUAL(engine)


@pattern(
    "`register_step_pre_hook` that clips every `p.grad` of `param_groups`",
    refused=always(usage("clip_grad_norm_()", "gathered_gradients()")),
)
def step_hooks_over_gradients(engine: Engine) -> None:
    def clip(optimizer: Any, *args: Any) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1e-3)

    engine.optimizer.register_step_pre_hook(clip)
    engine.train()


@pattern("a function that builds the optimizer, trains, and returns the model, which is evaluated")
def optimizer_gone(engine: Engine) -> None:
    for _ in range(STEPS):
        engine.zero_grad()
        engine.backward(engine.loss())
        engine.step()
    engine.optimizer = None
    gc.collect()
    if engine.setting.stage < 3:  # parameters are torch's own again
        weight = engine.model.head.weight
        weight.grad = torch.ones_like(weight)
        assert weight.grad.sum() == weight.numel()
    engine.model.eval()
    engine.evaluate(engine.data())


@pattern("weights carried to a new model with an optimizer of its own")
def built_anew(engine: Engine) -> None:
    USUAL(engine)
    model = Mlp()
    model.load_state_dict(engine.weights())
    USUAL(engine.another(model))
