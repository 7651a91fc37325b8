"""The state dict that accelerate hands out, and files of one whose values may come later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.utils import SAFE_WEIGHTS_PATTERN_NAME
from huggingface_hub import save_torch_state_dict
from torch import Tensor, nn


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The state of a sharded model, each tensor in memory of its own; tied names share one. Collective."""
    state: dict[str, Any] = model.state_dict()
    tensors = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    for name, value in state.items():
        original = first.setdefault(id(tensors.get(name, value)), name)
        if original != name:
            state[name] = state[original]
        elif isinstance(value, Tensor) and name in tensors and _same_memory(value, tensors[name]):
            state[name] = value.clone()  # training would go on in it
    return state


def write_weights(
    state: Mapping[str, Tensor], directory: str | os.PathLike[str], max_shard_size: int | str
) -> None:
    """Write `state`, each tensor under its first name, in files of at most `max_shard_size` and with an index.

    accelerate's own function takes all tensors on meta for one that is tied.
    """
    first = {id(value): name for name, value in reversed(list(state.items()))}
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    save_torch_state_dict(
        {name: value for name, value in state.items() if first[id(value)] == name},
        path,
        filename_pattern=SAFE_WEIGHTS_PATTERN_NAME,
        max_shard_size=max_shard_size,
    )


def _same_memory(value: Tensor, parameter: Tensor) -> bool:
    return not value.is_meta and value.data_ptr() == parameter.data_ptr() and value.numel() > 0
