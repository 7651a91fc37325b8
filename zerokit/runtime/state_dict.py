"""The model's own `state_dict` and `load_state_dict`, and the whole-parameter view behind both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zerokit.runtime.gathering import Gathering
from zerokit.runtime.storage import FlatUnit


@contextmanager
def gathered(storages: Sequence[FlatUnit], gathering: Gathering) -> Iterator[None]:
    """All parameters whole; on leaving, what was changed in place goes to shards and masters.

    A change shows in the parameter's version counter, so masters of unchanged parameters keep their precision.
    """
    _gather_all(storages, gathering)
    before = [[parameter._version for parameter in storage.parameters] for storage in storages]
    try:
        yield
    finally:
        for storage, versions in zip(storages, before, strict=True):
            if [parameter._version for parameter in storage.parameters] != versions:
                storage.read_in()
        gathering.free_all()


def _gather_all(storages: Sequence[FlatUnit], gathering: Gathering) -> None:
    gathering.free_all()
    for storage in storages:
        if not storage.resident:
            storage.gather()
        storage.ready()
    gathering.settle()


def install_state_dict_hooks(model: nn.Module, storages: Sequence[FlatUnit], gathering: Gathering) -> None:
    """Make `model.state_dict()` give whole, current tensors and `model.load_state_dict()` reach the masters.

    Both are collective: all ranks must call them. At stage 3 `state_dict` copies, unit by unit, because the gathered
    memory goes again; loading needs the whole model in memory at once.
    """
    aliases = {
        id(parameter): [layout.name, *layout.aliases]
        for storage in storages
        for parameter, layout in zip(storage.parameters, storage.unit.parameters, strict=True)
    }

    def before_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        gathering.free_all()

    def after_save(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        for storage in storages:
            if not storage.sharded:
                continue
            storage.gather()
            storage.ready()
            for parameter in storage.parameters:
                for name in aliases[id(parameter)]:
                    if prefix + name in state:
                        state[prefix + name] = parameter.detach().clone()
            storage.free()
        gathering.settle()

    def before_load(module: nn.Module, state: Mapping[str, Tensor], prefix: str, *rest: Any) -> None:
        _gather_all(storages, gathering)

    def after_load(module: nn.Module, incompatible: Any) -> None:
        with torch.no_grad():
            for storage in storages:
                storage.read_in()
        gathering.free_all()

    model.register_state_dict_pre_hook(before_save)
    model.register_state_dict_post_hook(after_save)
    model.register_load_state_dict_pre_hook(before_load)
    model.register_load_state_dict_post_hook(after_load)
