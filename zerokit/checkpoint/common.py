"""`common.safetensors`: tensors that are stored whole, written and read with the safetensors library.

The live half only. Byte ranges, which the library does not copy, are in `extents` and `header`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from zerokit.checkpoint.reader import Checkpoint
from zerokit.checkpoint.state import dtype_name


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

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._names = checkpoint.common_names
        self._path = checkpoint.path / checkpoint.manifest.common.name

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        with safe_open(self._path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor.clone()  # of the mapped file, which may be removed or replaced

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
