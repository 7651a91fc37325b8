"""`common.safetensors`: tensors that are stored whole, written and read with the safetensors library.

The live half only. Byte ranges, which the library does not copy, are in `extents` and `header`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from zerokit.checkpoint.source import Source
from zerokit.checkpoint.state import dtype_name, tensor_of


def snapshot(value: Any) -> Tensor:
    """A tensor or array as a dense tensor in host memory of its own, which nothing changes any more.

    Raises `CheckpointError` for a dtype that cannot be saved.
    """
    tensor = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value)
    dtype_name(tensor)
    return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """The file of these snapshots; equal tensors give equal bytes, in whatever order they come."""
    return save(dict(tensors), {"format": "zerokit"})


class Tensors(Mapping[str, Tensor]):
    """The tensors of a checkpoint's `common`, read when they are asked for, in memory of their own.

    Raises `CheckpointError` for a file that is damaged, before anything is read from it.
    """

    def __init__(self, checkpoint: Source) -> None:
        self._checkpoint, self._names = checkpoint, checkpoint.common_names

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        dtype, shape, content = self._checkpoint.common_tensor(name)
        return tensor_of(content, dtype, shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
