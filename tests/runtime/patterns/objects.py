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

import zerokit
from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import USUAL, Refused, Subject, always, usage
from tests.runtime.patterns.models import Mlp, square

pattern = Subject(__name__)

REFUSED = always(usage())


def _amid(does: Callable[[Engine], Any]) -> Callable[[Engine], None]:
    """A step, then something that plain torch allows, then more steps."""

    @wraps(does)
    def train(engine: Engine) -> None:
        engine.update(square(engine.model(engine.data(4, 8))))
        does(engine)
        USUAL(engine)

    return train


def _zero(engine: Engine, model: Any, **options: Any) -> zerokit.ZeroOptimizer:
    return zerokit.ZeroOptimizer(
        model, torch.optim.SGD, **{"stage": engine.setting.stage, "precision": "fp32", "lr": 0.1, **options}
    )


@pattern("two optimizers over models that share a layer", Mlp, refused=always(usage("already")))
def shared_layer(engine: Engine) -> None:
    other = Mlp()
    other.blocks[0] = engine.model.blocks[0]
    if not engine.plain:
        _zero(engine, other)
    engine.record(0)


@pattern("two optimizers over one model", Mlp, refused=always(usage("already")))
def same_model(engine: Engine) -> None:
    if not engine.plain:
        _zero(engine, engine.model)
    engine.record(0)


@pattern("`ZeroOptimizer(model.parameters(), …)`", Mlp, refused=always(usage("pass the model")))
def parameters_given(engine: Engine) -> None:
    if not engine.plain:
        _zero(engine, Mlp().parameters())
    engine.record(0)


pattern("`copy.deepcopy(model)`", Mlp, refused=REFUSED)(
    _amid(lambda engine: copy.deepcopy(engine.model)), "deepcopy_model"
)
pattern("`copy.deepcopy(optimizer)`", Mlp, refused=REFUSED)(
    _amid(lambda engine: copy.deepcopy(engine.optimizer)), "deepcopy_optimizer"
)
pattern("`torch.save(model)`", Mlp, refused=REFUSED)(
    _amid(lambda engine: torch.save(engine.model, io.BytesIO())), "save_model"
)
pattern("`torch.save(optimizer)`", Mlp, refused=REFUSED)(
    _amid(lambda engine: torch.save(engine.optimizer, io.BytesIO())), "save_optimizer"
)
pattern("`pickle.dumps(model)`", Mlp, refused=REFUSED)(
    _amid(lambda engine: pickle.dumps(engine.model)), "pickle_model"
)
pattern("`pickle.dumps(optimizer)`", Mlp, refused=REFUSED)(
    _amid(lambda engine: pickle.dumps(engine.optimizer)), "pickle_optimizer"
)


@pattern("`copy.deepcopy` of a block, inside `gathered()`", Mlp, refused=always(usage(or_right=True)))
@_amid
def deepcopy_block(engine: Engine) -> None:
    with engine.gathered():
        block = copy.deepcopy(engine.model.blocks[0])
    engine.record(square(block(torch.ones(2, 64))))


@pattern("`torch.save(model.state_dict())`, loaded into a new plain model", Mlp)
@_amid
def save_state_dict(engine: Engine) -> None:
    file = io.BytesIO()
    torch.save(engine.model.state_dict(), file)
    file.seek(0)
    model = Mlp()
    model.load_state_dict(torch.load(file))
    engine.record(square(model(torch.ones(2, 8))))


@pattern("`optimizer.state_dict()`, taken and loaded again later", Mlp)
@_amid
def optimizer_state_dict(engine: Engine) -> None:
    model, state = engine.weights(), copy.deepcopy(engine.optimizer.state_dict())
    engine.update(square(engine.model(engine.data(4, 8))))
    engine.model.load_state_dict(model)
    engine.optimizer.load_state_dict(state)


@pattern(
    "`torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)`",
    Mlp,
    refused=always(usage(or_right=True)),
)
@_amid
def get_state_dict(engine: Engine) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    _, state = get_state_dict(engine.model, engine.optimizer)
    engine.record(len(state["state"]))


@pattern(
    "a weight decay of a group that differs by rank",
    Mlp,
    refused=always(Refused("LayoutMismatch", ("rank 1", "weight_decay"))),
)
def weight_decays(engine: Engine) -> None:
    if not engine.plain:
        model = Mlp()
        groups = [
            {"params": model.head.parameters(), "weight_decay": 0.1 * engine.rank},
            {"params": [*model.first.parameters(), *model.blocks.parameters()]},
        ]
        _zero(engine, model, params=groups)
    engine.record(0)


@pattern(
    "`model.train()`, `eval()`, `requires_grad_(True)`, `to(same)`, `zero_grad()`, `repr` at any time", Mlp
)
@_amid
def harmless(engine: Engine) -> None:
    engine.model.eval()
    engine.model.train().to(torch.float32).cpu().requires_grad_(True)
    engine.optimizer.zero_grad()
    engine.model.zero_grad()
    assert repr(engine.model)
    assert repr(engine.optimizer)


@pattern("`model.apply(fn)` that looks at modules", Mlp)
@_amid
def apply(engine: Engine) -> None:
    engine.model.apply(lambda module: engine.record(len(list(module.children()))))


@pattern("`nn.utils.parameters_to_vector` inside `gathered()`", Mlp)
@_amid
def to_vector(engine: Engine) -> None:
    with engine.gathered():
        vector = nn.utils.parameters_to_vector(engine.model.parameters())
        engine.record(vector.double().norm())


# It assigns `p.data`.
@pattern("`vector_to_parameters` inside `gathered()`", Mlp, refused=always(usage(or_right=True)))
@_amid
def from_vector(engine: Engine) -> None:
    with engine.gathered():
        vector = nn.utils.parameters_to_vector(engine.model.parameters())
        nn.utils.vector_to_parameters(0.5 * vector.detach(), engine.model.parameters())


@pattern("`optimizer.register_step_post_hook`", Mlp)
def step_hooks(engine: Engine) -> None:
    engine.optimizer.register_step_post_hook(lambda *args: engine.record(7))
    USUAL(engine)


@pattern("a function that builds the optimizer, trains, and returns the model, which is evaluated", Mlp)
def optimizer_gone(engine: Engine) -> None:
    for _ in range(STEPS):
        engine.zero_grad()
        engine.backward(square(engine.model(engine.data(4, 8))))
        engine.step()
    engine.optimizer = None
    gc.collect()
    if engine.setting.stage < 3:  # parameters are torch's own again
        weight = engine.model.head.weight
        weight.grad = torch.ones_like(weight)
        assert weight.grad.sum() == weight.numel()
    engine.model.eval()
    with torch.no_grad():
        engine.record(square(engine.model(engine.data(4, 8))))


@pattern("weights carried to a new model with an optimizer of its own", Mlp)
def built_anew(engine: Engine) -> None:
    USUAL(engine)
    weights = engine.weights()
    model = Mlp()
    model.load_state_dict(weights)
    USUAL(engine.another(model))


STATE = always(usage("optimizer.state", "param_groups"))


@pattern("`optimizer.state[p]`", Mlp, refused=STATE)
def state_outside(engine: Engine) -> None:
    engine.update(square(engine.model(engine.data(4, 8))))
    engine.record(len(engine.optimizer.state[engine.model.head.weight]))


@pattern("`optimizer.state.pop(p)` to begin a parameter's moments anew", Mlp, refused=STATE)
def state_popped(engine: Engine) -> None:
    engine.update(square(engine.model(engine.data(4, 8))))
    engine.optimizer.state.pop(engine.model.head.weight, None)


@pattern(
    "`register_step_pre_hook` that clips every `p.grad` of `param_groups`",
    Mlp,
    refused=always(usage("clip_grad_norm_()", "gathered_gradients()")),
)
def step_hooks_over_gradients(engine: Engine) -> None:
    def clip(optimizer: Any, *args: Any) -> None:
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1e-3)

    engine.optimizer.register_step_pre_hook(clip)
    engine.update(square(engine.model(engine.data(4, 8))))
