"""Tensors are found wherever a module's inputs and outputs hold them."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from zerokit.runtime.hooks import follow, tensors_in

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


@given(st.lists(st.integers(0, len(WRAPPERS) - 1), max_size=4))
def test_a_tensor_is_found_in_whatever_holds_it(wrappers: list[int]) -> None:
    tensor = torch.ones(2)
    value: Any = tensor
    for number in wrappers:
        value = WRAPPERS[number](value)
    assert any(found is tensor for found in tensors_in(value))


def test_modules_and_functions_hold_no_outputs() -> None:
    class Callback:
        def __init__(self) -> None:
            self.tensor = torch.ones(1)

        def __call__(self) -> None:
            pass

    assert list(tensors_in([nn.Linear(2, 2), Callback(), lambda: torch.ones(1)])) == []


def test_an_object_that_holds_itself_ends() -> None:
    one = Plain(torch.ones(1))
    one.self = one  # type: ignore[attr-defined]
    assert len(list(tensors_in(one))) == 1


def test_what_lies_deep_is_a_configuration() -> None:
    value: Any = torch.ones(1)
    for _ in range(5):
        value = Plain(value)
    assert list(tensors_in(value)) == []
    assert len(list(tensors_in(value.value))) == 1


def _numbers() -> Generator[int, None, None]:
    yield 1
    raise KeyError("broken")


@pytest.mark.parametrize("fails", [False, True])
def test_a_generator_that_fails_or_is_closed_early_has_ended(fails: bool) -> None:
    log: list[Any] = []
    generator = follow(_numbers(), log.append, lambda: log.append("end"))
    assert next(generator) == 1
    if fails:
        with pytest.raises(KeyError, match="broken"):
            next(generator)
    generator.close()
    assert log == [1, "end"]
