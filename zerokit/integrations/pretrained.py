"""Whole weights of a checkpoint that ranks have written in pieces, and `from_pretrained` of its directory."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zerokit.checkpoint.manifest import BUFFER_PREFIX
from zerokit.checkpoint.reader import Checkpoint
from zerokit.checkpoint.source import Tensors
from zerokit.checkpoint.state import tensor_of


def whole_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The weights and buffers on the host, by every name: trained ones are the masters, in the dtype of the model."""
    whole: dict[str, Tensor] = {}
    for parameter in checkpoint.layout.parameters:
        stream = "master" if parameter.trainable else "param"
        value = torch.as_tensor(checkpoint.read(stream, parameter.name))
        value = value.to(getattr(torch, parameter.dtype))
        whole.update(dict.fromkeys((parameter.name, *parameter.aliases), value))
    tensors = Tensors(checkpoint, tensor_of)
    return whole | {
        name.removeprefix(BUFFER_PREFIX): tensors[name] for name in tensors if name.startswith(BUFFER_PREFIX)
    }


def read_sharded() -> None:
    """Let `from_pretrained` of transformers' models read the `checkpoint-STEP` of a `ZeroTrainer` in this process.

    transformers has no place to add a format, and a copy of the weights in its own would cost their size again in every
    checkpoint. Other directories and names reach its loader as they are.
    """
    from transformers import GenerationConfig, PreTrainedModel

    plain = PreTrainedModel.from_pretrained.__func__
    if hasattr(plain, "__wrapped__"):
        return

    def from_pretrained(cls: Any, name: Any, *args: Any, config: Any = None, **kwargs: Any) -> Any:
        if name is None or not _is_sharded(Path(name)):
            return plain(cls, name, *args, config=config, **kwargs)
        if config is None:
            config, kwargs = cls.config_class.from_pretrained(name, return_unused_kwargs=True, **kwargs)
        weights = whole_weights(Checkpoint(Path(name)))
        made = plain(cls, None, *args, config=config, state_dict=weights, **kwargs)
        model = made[0] if isinstance(made, tuple) else made  # with output_loading_info=True
        model.config._name_or_path = str(name)
        if model.can_generate() and (Path(name) / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(name)
        return made

    wrapped: Any = functools.wraps(plain)(from_pretrained)
    PreTrainedModel.from_pretrained = classmethod(wrapped)


_LOADED_BY_TRANSFORMERS = ("model*.safetensors", "pytorch_model*.bin", "adapter_config.json")


def _is_sharded(path: Path) -> bool:
    """Whether there is a run of zerokit, and nothing that transformers would load."""
    return (path / "latest").is_file() and not any(
        next(path.glob(pattern), None) for pattern in _LOADED_BY_TRANSFORMERS
    )
