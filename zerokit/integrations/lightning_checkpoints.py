"""A zerokit checkpoint for Lightning: whether training can continue from it, and its weights."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from zerokit.checkpoint.manifest import BUFFER_PREFIX
from zerokit.checkpoint.reader import Checkpoint
from zerokit.checkpoint.source import Tensors
from zerokit.checkpoint.state import tensor_of
from zerokit.errors import CheckpointError


def require_whole(path: Path) -> None:
    """Raise `CheckpointError` if `fit` cannot continue from the checkpoint."""
    if Checkpoint(path).weights_only:
        raise CheckpointError(
            f"{path}: has weights only (ModelCheckpoint's save_weights_only=True) and no optimizer state: "
            f'leave ckpt_path out, and write zerokit.load("{path}", trainer.strategy.zero_optimizer, '
            "weights_only=True) in on_fit_start, or give a whole checkpoint"
        )


def weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The weights and buffers of a checkpoint, whole, by every name."""
    whole = {}
    for parameter in checkpoint.layout.parameters:
        stream = "master" if parameter.trainable else "param"
        value = torch.as_tensor(checkpoint.read(stream, parameter.name))
        whole.update(dict.fromkeys((parameter.name, *parameter.aliases), value))
    tensors = Tensors(checkpoint, tensor_of)
    return whole | {
        name.removeprefix(BUFFER_PREFIX): tensors[name] for name in tensors if name.startswith(BUFFER_PREFIX)
    }
