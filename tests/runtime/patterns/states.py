# mypy: disable-error-code="no-untyped-call"
"""State dicts that the model's own code shapes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
)

from tests.runtime.patterns.engines import STEPS, Engine
from tests.runtime.patterns.harness import Refused, Subject, usage
from tests.runtime.patterns.models import Block, Mlp, square

pattern = Subject(__name__)


def _sum(value: Any) -> float:
    """Everything that a state holds, as one number."""
    if isinstance(value, dict):
        return sum((index + 1) * _sum(inner) for index, inner in enumerate(value.values()))
    if isinstance(value, list | tuple):
        return sum((index + 1) * _sum(inner) for index, inner in enumerate(value))
    if isinstance(value, Tensor):
        return float(value.detach().double().abs().sum())
    if isinstance(value, numpy.ndarray):
        return float(numpy.abs(value.astype("float64")).sum())
    return 0.0


def _saved(engine: Engine) -> None:
    """Train; what a state holds is looked at when later steps have gone on."""
    for _ in range(STEPS):
        engine.update(square(engine.model(engine.data(4, 8))))
        state = engine.model.state_dict()
        engine.record(_sum(state))
        engine.record(sum(map(len, state)))


def _checkpointed() -> nn.Module:
    model = Mlp()
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    assert any(isinstance(module, CheckpointWrapper) for module in model.modules())
    return model


pattern("`apply_activation_checkpointing`, whose wrapper renames keys", _checkpointed)(_saved, "wrapped")


def _renamed() -> nn.Module:
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key in list(state):
            if key.startswith(prefix):
                state[f"{prefix}inner_{key[len(prefix) :]}"] = state.pop(key)

    model = Mlp()
    for block in model.blocks:
        block.register_state_dict_post_hook(rename)
    return model


pattern("a state-dict hook that renames keys", _renamed)(_saved, "renamed")


def _cast() -> nn.Module:
    def cast(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for key, value in state.items():
            state[key] = value.to(torch.float16)

    model = Mlp()
    model.register_state_dict_post_hook(cast)
    return model


pattern("a state-dict hook that casts to half precision", _cast)(_saved, "cast")


def _derived() -> nn.Module:
    def derive(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[f"{prefix}merged"] = state[f"{prefix}0.weight"] @ state[f"{prefix}1.weight"]

    block = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    block.register_state_dict_post_hook(derive)
    return nn.Sequential(nn.Linear(8, 64), block, nn.Linear(64, 8))


pattern("a state-dict hook that adds a product of weights", _derived)(_saved, "derived")


class Transposed(nn.Linear):
    """Saves its weight as it is stored elsewhere."""

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}kernel"] = self.weight.detach().t()
        destination[f"{prefix}parts"] = [self.bias.detach(), (self.weight.data[:3], 7)]


def _with(layer: type[nn.Linear]) -> nn.Module:
    model = Mlp()
    for block in model.blocks:
        block.inner = layer(64, 64)
    return model


pattern("`_save_to_state_dict` that writes other keys, views and lists", lambda: _with(Transposed))(
    _saved, "transposed"
)


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {
            "norms": self.weight.detach().norm(dim=0),
            "raw": self.weight.detach()[:2],
            "numpy": self.bias.detach().numpy(),
        }

    def set_extra_state(self, state: Any) -> None:
        pass


pattern("`get_extra_state` with norms, views and arrays of weights", lambda: _with(Extra))(_saved, "extra")


class Overridden(Mlp):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return OrderedDict((f"module.{name}", value) for name, value in state.items())


@pattern.each_step("`state_dict` overridden to put a prefix before all names", Overridden)
def overridden(engine: Engine) -> None:
    engine.update(square(engine.model(engine.data(4, 8))))
    engine.record(_sum(engine.model.state_dict()))


@pattern("a state dict of a module around the model", Mlp)
def around(engine: Engine) -> None:
    outer = nn.ModuleDict({"model": engine.model})
    for _ in range(STEPS):
        engine.update(square(engine.model(engine.data(4, 8))))
        engine.record(_sum(outer.state_dict()))


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxed(nn.Linear):
    def get_extra_state(self) -> Any:
        return Box(self.weight.detach())

    def set_extra_state(self, state: Any) -> None:
        pass


HIDDEN = {3: usage("keeps views", "gathered()")}


@pattern(
    "`get_extra_state` with an object that holds a view of a weight", lambda: _with(Boxed), refused=HIDDEN
)
def boxed(engine: Engine) -> None:
    _saved(engine)


@pattern.each_step("a part's `load_state_dict()` inside `gathered()`", Mlp)
def part_loaded(engine: Engine) -> None:
    engine.update(square(engine.model(engine.data(4, 8))))
    with engine.gathered():
        blocks = engine.model.blocks
        blocks[0].load_state_dict({name: value.clone() for name, value in blocks[1].state_dict().items()})


@pattern("a part's `load_state_dict()`", Mlp, refused={3: Refused("RuntimeError", ("gathered()",))})
def part_loaded_outside(engine: Engine) -> None:
    engine.update(square(engine.model(engine.data(4, 8))))
    blocks = engine.model.blocks
    blocks[0].load_state_dict({name: torch.ones_like(value) for name, value in Block().state_dict().items()})
    engine.update(square(engine.model(engine.data(4, 8))))


@pattern.each_step("a `load_state_dict()` that fails, caught", Mlp)
def failed_load(engine: Engine) -> None:
    try:
        engine.model.load_state_dict({"first.weight": torch.zeros(3, 3)})
    except RuntimeError as error:
        engine.record("first.weight" in str(error) and "Missing key" in str(error))
    engine.update(square(engine.model(engine.data(4, 8))))


@pattern.each_step("`state_dict(keep_vars=True)`", Mlp)
def with_parameters(engine: Engine) -> None:
    engine.update(square(engine.model(engine.data(4, 8))))
    state = engine.model.state_dict(keep_vars=True)
    assert all(state[name] is parameter for name, parameter in engine.model.named_parameters())
    with engine.gathered():
        engine.record(_sum(state))


class Pretrained(Mlp):
    """Has the method that transformers, PEFT and diffusers save by, and asks a part for its state."""

    def save_pretrained(self) -> float:
        return _sum(self.head.state_dict()) + _sum(self.state_dict())


@pattern.each_step("`save_pretrained()` that asks parts of the model for their states", Pretrained)
def pretrained(engine: Engine) -> None:
    engine.update(square(engine.model(engine.data(4, 8))))
    engine.record(engine.model.save_pretrained())
