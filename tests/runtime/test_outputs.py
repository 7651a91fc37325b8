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

from zerokit.runtime.hooks import follow, origin, tensors_in

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


def test_every_tensor_is_found_in_order() -> None:
    tensors = [torch.full((1,), float(number)) for number in range(5)]
    value = (tensors[0], {"a": tensors[1]}, Output(tensors[2], (tensors[3],), Plain(tensors[4])))
    assert [float(found) for found in tensors_in(value)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert list(tensors_in(tensors[0])) == [tensors[0]]
    assert list(tensors_in((tensors[0], tensors[1]))) == tensors[:2]


@pytest.mark.parametrize(
    "value", [None, 1, "text", b"", torch.float32, torch.device("cpu"), torch.Size([1]), int]
)
def test_where_there_is_none(value: Any) -> None:
    assert list(tensors_in(value)) == []


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


def test_tensors_of_one_origin() -> None:
    leaf = torch.ones(3, requires_grad=True)
    made = leaf * 2
    first, second = made.split([1, 2])
    assert origin(leaf) != origin(made)
    assert origin(made) == origin(made)
    assert origin(first) != origin(second)
    assert origin(torch.ones(1)) != origin(leaf)


def counting(log: list[Any]) -> Generator[int, str, str]:
    for number in range(2):
        log.append((yield number))
    return "result"


def test_a_generator_is_followed_to_its_end() -> None:
    log: list[Any] = []
    seen: list[int] = []
    generator = follow(counting(log), seen.append, lambda: log.append("end"))
    assert next(generator) == 0
    assert generator.send("a") == 1
    assert seen == [0, 1]
    with pytest.raises(StopIteration) as stop:
        generator.send("b")
    assert stop.value.value == "result"
    assert log == ["a", "b", "end"]


def test_a_generator_that_is_closed_early_has_ended() -> None:
    log: list[Any] = []
    generator = follow(counting([]), lambda value: None, lambda: log.append("end"))
    next(generator)
    generator.close()
    assert log == ["end"]


def test_a_generator_that_fails_has_ended() -> None:
    def failing() -> Generator[int, None, None]:
        yield 1
        raise KeyError("broken")

    log: list[Any] = []
    generator = follow(failing(), lambda value: None, lambda: log.append("end"))
    next(generator)
    with pytest.raises(KeyError, match="broken"):
        next(generator)
    assert log == ["end"]
