# mypy: disable-error-code="no-any-return, no-untyped-call"
"""Models and optimizers as objects: construction, copies, state dicts."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import get_state_dict

import zerokit
from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import USUAL, Refused, Subject, always, usage
from tests.runtime.patterns.models import Block, Mlp, square

pattern = Subject(__name__)

OR_RIGHT = always(usage(or_right=True))


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


@amid(
    "`torch.distributed.checkpoint.state_dict.get_state_dict(model, optimizer)`",
    refused=always(usage("get_optimizer_state_dict", or_right=True)),
)
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


def _sum(value: Any) -> float:
    """Everything that a state holds, as one number."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sum((index + 1) * _sum(inner) for index, inner in enumerate(value))
    if isinstance(value, numpy.ndarray):
        value = torch.from_numpy(value)
    return float(value.detach().double().abs().sum()) if isinstance(value, Tensor) else 0.0


def _saved(engine: Engine) -> None:
    engine.train()
    state = engine.model.state_dict()
    engine.record(_sum(state))
    engine.record(sum(map(len, state)))


def _checkpointed() -> nn.Module:
    model = Mlp()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules())
    return model


def _rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for key in list(state):
        if key.startswith(prefix):
            state[f"{prefix}inner_{key[len(prefix) :]}"] = state.pop(key)


def _derive(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}merged"] = state[f"{prefix}inner.weight"] @ state[f"{prefix}inner.weight"]


def _hooked(hook: Callable[..., None], part: str) -> nn.Module:
    model = Mlp()
    model.get_submodule(part).register_state_dict_post_hook(hook)
    return model


class Transposed(nn.Linear):
    """Saves its weight as it is stored elsewhere."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}kernel"] = self.weight.detach().t()
        destination[f"{prefix}parts"] = [self.bias.detach(), (self.weight.data[:3], 7)]


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {
            "norms": self.weight.detach().norm(dim=0),
            "raw": self.weight.detach()[:2],
            "numpy": self.bias.detach().numpy(),
        }

    def set_extra_state(self, state: Any) -> None:
        pass


class Overridden(Mlp):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return OrderedDict((f"module.{name}", value) for name, value in state.items())


def _with(layer: type[nn.Linear]) -> nn.Module:
    model = Mlp()
    for block in model.blocks:
        block.inner = layer(64, 64)
    return model


SHAPED: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "wrapped": ("`apply_activation_checkpointing`, whose wrapper renames keys", _checkpointed),
    "renamed": ("a state-dict hook that renames keys", partial(_hooked, _rename, "blocks.1")),
    "derived": ("a state-dict hook that adds a product of weights", partial(_hooked, _derive, "blocks.1")),
    "transposed": (
        "`_save_to_state_dict` that writes other keys, views and lists",
        partial(_with, Transposed),
    ),
    "extra": ("`get_extra_state` with norms, views and arrays of weights", partial(_with, Extra)),
    "overridden": ("`state_dict` overridden to put a prefix before all names", Overridden),
}
for key, (name, build) in SHAPED.items():
    pattern.each_step(name, build)(_saved, key)


@pattern.each_step("a state dict of a module around the model")
def around(engine: Engine) -> None:
    engine.train()
    engine.record(_sum(nn.ModuleDict({"model": engine.model}).state_dict()))


@pattern.each_step("a part's `load_state_dict()` inside `gathered()`")
def part_loaded(engine: Engine) -> None:
    engine.train()
    with engine.gathered():
        blocks = engine.model.blocks
        blocks[0].load_state_dict({name: value.clone() for name, value in blocks[1].state_dict().items()})


@pattern.each_step("a part's `load_state_dict()`", refused={3: Refused("UsageError", ("gathered()",))})
def part_loaded_outside(engine: Engine) -> None:
    engine.train()
    ones = {name: torch.ones_like(value) for name, value in Block().state_dict().items()}
    engine.model.blocks[0].load_state_dict(ones)


@pattern.each_step("a `load_state_dict()` that fails, or is broken off by an exception, caught")
def failed_load(engine: Engine) -> None:
    hook = engine.model.head.register_load_state_dict_pre_hook(lambda *args: 1 / 0)
    with contextlib.suppress(ZeroDivisionError):
        engine.model.load_state_dict(engine.weights())
    hook.remove()
    engine.record(not engine.plain and engine.optimizer.runtime.engine.is_open)
    try:
        engine.model.load_state_dict({"first.weight": torch.zeros(3, 3)})
    except RuntimeError as error:
        engine.record("first.weight" in str(error) and "Missing key" in str(error))
    engine.train()


@pattern.each_step("`state_dict(keep_vars=True)`")
def with_parameters(engine: Engine) -> None:
    engine.train()
    state = engine.model.state_dict(keep_vars=True)
    assert all(state[name] is parameter for name, parameter in engine.model.named_parameters())
    with engine.gathered():
        engine.record(_sum(state))


class Pretrained(Mlp):
    """Has the method that transformers, PEFT and diffusers save by, and asks a part for its state."""

    def save_pretrained(self, state_dict: Any = None) -> float:
        return _sum(self.head.state_dict()) + _sum(state_dict or self.state_dict())


@pattern.each_step(
    "`save_pretrained()` that asks parts for their states, also on one rank with a `state_dict=`", Pretrained
)
def pretrained(engine: Engine) -> None:
    engine.train()
    engine.record(engine.model.save_pretrained())
    state = engine.model.state_dict()
    engine.record(engine.model.save_pretrained(state_dict=state) if engine.rank else 0.0)
