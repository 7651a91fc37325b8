# mypy: disable-error-code="no-untyped-call"
"""State dicts that the model's own code shapes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

from tests.runtime.patterns.engines import Engine
from tests.runtime.patterns.harness import Refused, Subject, usage
from tests.runtime.patterns.models import Block, Mlp

pattern = Subject(__name__)


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


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Boxed(Extra):
    def get_extra_state(self) -> Any:
        return Box(self.weight.detach())


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
pattern.each_step(
    "`get_extra_state` with an object that holds a view of a weight",
    partial(_with, Boxed),
    refused={3: usage("keeps views", "gathered()")},
)(_saved, "boxed")


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


@pattern.each_step("a part's `load_state_dict()`", refused={3: Refused("RuntimeError", ("gathered()",))})
def part_loaded_outside(engine: Engine) -> None:
    engine.train()
    ones = {name: torch.ones_like(value) for name, value in Block().state_dict().items()}
    engine.model.blocks[0].load_state_dict(ones)


@pattern.each_step("a `load_state_dict()` that fails, caught")
def failed_load(engine: Engine) -> None:
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

    def save_pretrained(self) -> float:
        return _sum(self.head.state_dict()) + _sum(self.state_dict())


@pattern.each_step("`save_pretrained()` that asks parts of the model for their states", Pretrained)
def pretrained(engine: Engine) -> None:
    engine.train()
    engine.record(engine.model.save_pretrained())
