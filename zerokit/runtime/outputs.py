"""The tensors inside whatever a module takes and returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


_DEPTH = 4
"""Objects within objects: outputs are no deeper, and what lies deeper (a configuration, say) holds no outputs."""


def tensors_in(value: Any) -> Iterable[Tensor]:
    """Every tensor in nested containers, dataclasses and plain objects."""
    if isinstance(value, Tensor):  # what most modules take and return
        return (value,)
    if type(value) is tuple and all(isinstance(one, Tensor) for one in value):
        return value
    return _search(value, set(), _DEPTH)


def _search(value: Any, seen: set[int], depth: int) -> Iterator[Tensor]:
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif not isinstance(leaf, (*_PLAIN, type, nn.Module)) and id(leaf) not in seen and depth:
            seen.add(id(leaf))
            for inner in _members(leaf):
                yield from _search(inner, seen, depth - 1)


def _members(value: Any) -> list[Any]:
    """What an object that pytree does not know holds: fields, attributes, slots."""
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if callable(value):
        return []
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    members = [getattr(value, name, None) for name in slots if isinstance(name, str)]
    return members + list(getattr(value, "__dict__", {}).values())


def origin(tensor: Tensor) -> tuple[object, int]:
    """What made `tensor`: equal for all tensors that autograd takes for the same."""
    return (id(tensor), 0) if tensor.grad_fn is None else (tensor.grad_fn, tensor.output_nr)


def follow(
    generator: Generator[Any, Any, Any], watch: Callable[[Any], None], end: Callable[[], None]
) -> Generator[Any, Any, Any]:
    """The generator that a model's forward returned, with each value shown to `watch` first, and `end` called."""
    sent: Any = None
    try:
        while True:
            try:
                value = generator.send(sent)
            except StopIteration as stop:
                return stop.value
            watch(value)
            sent = yield value
    finally:
        end()
