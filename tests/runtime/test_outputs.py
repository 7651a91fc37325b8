"""Tensors are found wherever a module's inputs and outputs hold them."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from zerokit.runtime.hooks import tensors_in

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    logits: Tensor
    hidden: tuple[Tensor, ...] = ()
    extra: Any = None
    labels: list[str] = field(default_factory=list)


class Plain:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("empty", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Inherited(Slotted):
    __slots__ = ("more",)

    def __init__(self, value: Any, more: Any) -> None:
        super().__init__(value)
        self.more = more


WRAPPERS: list[Callable[[Any], Any]] = [
    lambda value: [value, 1],
    lambda value: (value, None),
    lambda value: {"a": value, "b": "text"},
    lambda value: OrderedDict(a=value),
    lambda value: Pair(value, 2.0),
    Plain,
    Slotted,
    lambda value: Inherited(0, value),
    lambda value: Output(torch.zeros(1), extra=value),
]


@given(st.lists(st.sampled_from(WRAPPERS), max_size=4))
def test_a_tensor_is_found_in_whatever_holds_it(wrappers: list[Callable[[Any], Any]]) -> None:
    tensor = torch.ones(2)
    value: Any = tensor
    for wrapper in wrappers:
        value = wrapper(value)
    assert any(found is tensor for found in tensors_in(value))


def test_what_holds_no_outputs_is_not_searched_and_a_search_ends() -> None:
    class Callback(Plain):
        def __call__(self) -> None:
            pass

    assert list(tensors_in([nn.Linear(2, 2), Callback(torch.ones(1)), lambda: torch.ones(1)])) == []
    itself = Plain(torch.ones(1))
    itself.self = itself  # type: ignore[attr-defined]
    assert len(list(tensors_in(itself))) == 1
    deep: Any = torch.ones(1)
    for _ in range(5):
        deep = Plain(deep)
    assert list(tensors_in(deep)) == []  # a configuration
    assert len(list(tensors_in(deep.value))) == 1
