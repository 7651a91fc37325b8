"""Files of a model's weights in the names of accelerate, from a state dict whose values may come later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from accelerate.utils import SAFE_WEIGHTS_PATTERN_NAME
from huggingface_hub import save_torch_state_dict
from torch import Tensor


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
