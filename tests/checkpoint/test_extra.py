"""Typed values in JSON: each comes back as it was, type for type, or is refused by its place."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from tests.support.mutations import JSON
from zerokit.checkpoint.extra import MAX_DEPTH, decode, encode
from zerokit.checkpoint.strict import parse_json
from zerokit.errors import CheckpointError


def returned(value: Any) -> Any:
    """The value after a way through the file."""
    plain, tensors = encode(value)
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False).encode()
    return decode(parse_json(text), tensors)


def same(a: Any, b: Any) -> bool:
    """Equal, types, order of keys and signs of zero included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return bool(a.hex() == b.hex())
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=False)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(same(x, y) for y in b) for x in a)
    if isinstance(a, torch.Tensor):
        return bool(a.dtype == b.dtype and torch.equal(a, b))
    if isinstance(a, np.ndarray | np.generic):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    return bool(a == b)


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats().filter(lambda value: value == value),
    st.text(),
    st.sampled_from(["$", "items", "tensor", "-0x1"]),
    st.binary(),
)
KEYS: st.SearchStrategy[Any] = st.deferred(
    lambda: st.one_of(LEAVES, LEAVES, st.tuples(KEYS, KEYS), st.frozensets(KEYS, max_size=2))
)
DICTS: st.SearchStrategy[Any] = st.deferred(
    lambda: st.one_of(
        st.dictionaries(KEYS, VALUES, max_size=3),
        st.dictionaries(st.sampled_from(["$", "items", "a", "b/c", "b"]), VALUES, max_size=4),
    )
)
VALUES: st.SearchStrategy[Any] = st.deferred(
    lambda: st.one_of(
        LEAVES,
        LEAVES,
        st.just(math.nan),
        st.lists(VALUES, max_size=3),
        st.lists(VALUES, max_size=3).map(tuple),
        st.sets(KEYS, max_size=3),
        DICTS,
        DICTS.map(OrderedDict),
        DICTS.map(Counter),
    )
)


@settings(max_examples=150)
@given(VALUES)
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    assert same(returned(value), value)


def test_tensors_and_arrays_are_named_by_their_place_and_come_back() -> None:
    value = {
        "a": [torch.arange(3, dtype=torch.bfloat16), np.float64(-0.0), np.int16(3), np.bool_(True)],
        "a/0": torch.tensor(True),
        1: np.arange(6.0)[::-2],
        ("t",): torch.zeros(0, 2, dtype=torch.int64),
    }
    plain, tensors = encode(value, "extra/user")
    assert set(tensors) == {
        "extra/user/a/0",
        "extra/user/a/1",
        "extra/user/a/2",
        "extra/user/a/3",
        "extra/user/a/0~2",
        "extra/user/1",
        "extra/user/3",
    }
    assert same(decode(plain, tensors), value)
    read = {name: torch.as_tensor(array) for name, array in tensors.items()}
    assert same(decode(plain, read), value)
    assert "torch" not in json.dumps(plain).replace('"torch"', "")


SCHEDULERS: list[Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = [
    lambda inner: lr_scheduler.MultiStepLR(inner, [2, 4, 4]),
    lambda inner: lr_scheduler.OneCycleLR(inner, 0.5, total_steps=10),
    lambda inner: lr_scheduler.CyclicLR(inner, 0.1, 0.5),
    lambda inner: lr_scheduler.LambdaLR(inner, lambda step: 0.9**step),
    lambda inner: lr_scheduler.SequentialLR(
        inner, [lr_scheduler.ConstantLR(inner, 0.5, 3), lr_scheduler.StepLR(inner, 2)], milestones=[3]
    ),
]


def test_the_state_of_schedulers_comes_back() -> None:
    for make in SCHEDULERS:
        scheduler = make(torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9))
        state = scheduler.state_dict()
        assert same(returned(state), state), type(scheduler)


class Colour(enum.IntEnum):
    RED = 1


class Text(str):
    pass


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [0, 1, 2, print]}, r"extra/a/3: a builtins.builtin_function_or_method cannot be written"),
        ({"a": Colour.RED}, r"extra/a: a tests.checkpoint.test_extra.Colour"),
        (Text("a"), r"extra: a tests.checkpoint.test_extra.Text"),
        (Point(1, 2), r"extra: a tests.checkpoint.test_extra.Point"),
        (defaultdict(list), r"extra: a collections.defaultdict"),
        (1j, "extra: a builtins.complex"),
        ({(1, print): 0}, r"extra/0.key/1: a builtins.builtin_function_or_method"),
        ("\ud800", "extra: '.ud800' is not valid Unicode"),
        ({"\ud800": 1}, "not valid Unicode"),
        (torch.nn.Parameter(torch.ones(1)), "extra: a torch.nn.parameter.Parameter cannot"),
        (torch.ones(2, 2).to_sparse(), "extra: a sparse_coo tensor of float32 on cpu cannot be written"),
        (torch.ones(2, dtype=torch.complex64), "tensor of complex64"),
        (np.array(["a"]), "numpy's <U1 cannot be written: convert it"),
        (np.ones(2, complex), "numpy's complex128 cannot be written"),
    ],
)
def test_what_cannot_come_back_is_refused_by_its_place(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode(value)


def test_a_value_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match=f"nested more than {MAX_DEPTH} deep, or it contains itself"):
        encode(endless)


def test_the_deepest_value_comes_back() -> None:
    deepest: Any = 0
    for number in range(MAX_DEPTH):
        deepest = ({number: deepest},)[0] if number % 2 else [deepest]
    assert same(returned(deepest), deepest)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"$": "tuple", "items": [], "more": 1}, "expected two members"),
        ({"$": "complex", "value": "1j"}, "type 'complex' is unknown"),
        ({"$": "dict", "items": [[1, 2], [1, 3]]}, "twice"),
        ({"$": "Counter", "items": [[[], 2]]}, "unhashable"),
        ({"$": "set", "items": [1, 1]}, "twice"),
        ({"$": "int", "hex": "0x_1"}, "expected lower-case"),
        ({"$": "int", "hex": 3}, "no text 'hex'"),
        ({"$": "float", "value": "1"}, "expected inf, -inf or nan"),
        ({"$": "bytes", "base64": "a"}, "base64-encoded string"),
        ({"$": "torch", "tensor": "extra/x"}, "no such tensor"),
        ([{"$": "torch"}], r"extra\[0\]: "),
        # A short text could ask for any amount of memory, a long key for a longer message.
        ([{"$": "torch", "tensor": "a"}] * 2, "the same tensor twice"),
        ({"k" * 100_000: [{"$": "?"}]}, r"\[0\]: "),
    ],
)
def test_what_encode_never_writes_is_refused(plain: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        decode(plain, {"a": 1})
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", ["set", "frozenset", "dict", "Counter", "OrderedDict"])
def test_keys_of_one_hash_are_refused(kind: str) -> None:
    """A megabyte of them would take minutes."""
    keys: list[Any] = [{"$": "int", "hex": hex(number * (2**61 - 1) << 1)} for number in range(1, 1200)]
    items = keys if kind in ("set", "frozenset") else [[key, 1] for key in keys]
    with pytest.raises(CheckpointError, match="1199 keys or members have one hash"):
        decode({"$": kind, "items": items}, {})


@settings(max_examples=200)
@given(
    st.recursive(
        st.one_of(JSON, st.text(max_size=4)),
        lambda inner: st.dictionaries(
            st.sampled_from(["$", "items", "hex", "value", "base64", "tensor", "a"]),
            st.one_of(inner, st.sampled_from(["dict", "Counter", "set", "tuple", "int", "bytes", "scalar"])),
            max_size=3,
        ),
        max_leaves=8,
    )
)
def test_any_plain_data_is_decoded_or_refused_and_nothing_else(plain: Any) -> None:
    try:
        value = decode(plain, {"a": np.ones(2)})
    except CheckpointError:
        return
    assert same(returned(value), value)
