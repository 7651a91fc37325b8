"""`extra.json`: each typed value comes back as it was, or is refused by its place; every member is checked by name."""

from __future__ import annotations

import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.checkpoints import (
    example_content,
    example_extra,
    example_layout,
    weights_of,
    write_checkpoint,
)
from tests.support.mutations import JSON
from zerokit.checkpoint.extra import MAX_DEPTH, decode, encode
from zerokit.checkpoint.reader import Checkpoint
from zerokit.checkpoint.strict import parse_json
from zerokit.checkpoint.verify import verify
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
    places = ("a/0", "a/1", "a/2", "a/3", "a/0~2", "1", "3")
    assert set(tensors) == {f"extra/user/{place}" for place in places}
    assert same(decode(plain, tensors), value)
    read = {name: torch.as_tensor(array) for name, array in tensors.items()}
    assert same(decode(plain, read), value)
    assert "torch" not in json.dumps(plain).replace('"torch"', "")


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
        (torch.ones(2, dtype=torch.complex128), "tensor of complex128"),
        (np.array(["a"]), "numpy's <U1 cannot be written: convert it"),
        (np.ones(2, complex), "numpy's complex128 cannot be written"),
    ],
)
def test_what_cannot_come_back_is_refused_by_its_place(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode(value)


def test_the_deepest_value_comes_back_and_one_that_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(CheckpointError, match=f"nested more than {MAX_DEPTH} deep, or it contains itself"):
        encode(endless)
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


RNG = {"world": 1, "seed": 0, "step": 100}
SCALER = {"value": "0x1p+16", "good_steps": 3}


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


GOOD: dict[str, dict[str, Any]] = {
    "a scaler": {"scaler": SCALER},
    "values": {"values": {"rule": {"gain": "x", "tok.weight": {"$": "tuple", "items": []}}}},
    "another member": {"more": nested(150)},
    "the largest seed": {"rng": RNG | {"seed": 2**64 - 1}},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a fractional step": ({"step": 100.0}, "'step' is '100.0', expected int"),
    "another step": ({"step": 99}, "'step' is 99, but the manifest's is 100"),
    "a group too few": ({"groups": [{}]}, "'groups' has 1 elements, expected one for each of 2 groups"),
    "a group that is a tuple": (
        {"groups": [{}, {"$": "tuple", "items": []}]},
        r"'groups'\[1\] is .*, expected a mapping",
    ),
    "a group with an odd key": (
        {"groups": [{}, {"$": "dict", "items": [[1, 2]]}]},
        r"'groups'\[1\] has a key that is not text",
    ),
    "a group's parameters": (
        {"groups": [{}, {"lr": 0.1, "params": []}]},
        r"'groups'\[1\] has the member 'params', which only the running program may set",
    ),
    "a group's names": ({"groups": [{"param_names": []}, {}]}, "has the member 'param_names'"),
    "a stranger's value": ({"values": {"rule": {"x": 1}}}, "belongs to 'x', which is not a parameter"),
    "a value where there is a stream": (
        {"values": {"exp_avg": {"tok.weight": 1}}},
        r"'values'\['exp_avg'\] is of parameter 0, which also has tensors",
    ),
    "a scaler without a value": ({"scaler": {"good_steps": 1}}, "'scaler': 'value' is missing"),
    "a negative scaler": ({"scaler": SCALER | {"value": "-0x1p+1"}}, "expected a hexadecimal number over 0"),
    "no ranks": ({"rng": RNG | {"world": 0}}, "'rng': 'world' is 0, expected 1 to"),
    "a seed that is too large": ({"rng": RNG | {"seed": 2**64}}, "'rng': 'seed' is 18446744073709551616"),
    "too deep": ({"user": nested(250)}, "values are nested more than 64 deep"),
}


def write(path: Path, extra: object, *, weights_only: bool = False) -> Path:
    content = example_content(example_layout(2))
    content = weights_of(content) if weights_only else content
    write_checkpoint(path, example_layout(2), replace(content, extra=extra))
    return path


@pytest.mark.parametrize("case", GOOD)
def test_what_the_format_allows_is_read(tmp_path: Path, case: str) -> None:
    step = write(tmp_path / "step", example_extra() | GOOD[case])
    assert Checkpoint(step).extra_plain()["step"] == 100
    assert verify(step).intact or case == "another member"


@pytest.mark.parametrize("case", REFUSED)
def test_a_member_of_another_kind_is_refused_by_name(tmp_path: Path, case: str) -> None:
    change, message = REFUSED[case]
    step = write(tmp_path / "step", example_extra() | change)
    with pytest.raises(CheckpointError, match=message) as caught:
        Checkpoint(step).extra_plain()
    assert str(caught.value).startswith(f"{step / 'extra.json'}: not valid: ")
    assert len(str(caught.value)) < 500
    (finding,) = verify(step).findings
    assert finding.file == "extra.json"


def test_a_missing_member_is_refused_by_name(tmp_path: Path) -> None:
    """Beside weights only two members matter."""
    assert verify(write(tmp_path / "a", {"step": 100, "user": 1, "rng": 7}, weights_only=True)).intact
    for name in example_extra():
        extra = {key: value for key, value in example_extra().items() if key != name}
        for weights_only in (False, True) if name in ("step", "user") else (False,):
            step = write(tmp_path / f"{name}-{weights_only}", extra, weights_only=weights_only)
            with pytest.raises(CheckpointError, match=f"extra.json: not valid: '{name}' is missing"):
                Checkpoint(step).extra_plain()


@pytest.mark.parametrize(
    ("dtype", "shape"), [("uint8", (2, 4)), ("uint8", (4,)), ("int8", (1, 4)), ("uint8", (1, 2, 4))]
)
def test_states_of_generators_have_a_row_a_rank(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    content = example_content(example_layout(2))
    size = 4 if shape in ((4,), (1, 4)) else 8
    strange = replace(content, common=(*content.common, ("rng/torch", dtype, shape, bytes(size))))
    write_checkpoint(tmp_path / "step", example_layout(2), strange)
    checkpoint = Checkpoint(tmp_path / "step")
    message = r"common.safetensors: not valid: 'rng/torch' is u?int8 \[.*\], expected uint8 \[1, bytes\]"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.check_generators(checkpoint.extra_plain())
    (finding,) = verify(tmp_path / "step").findings
    assert finding.file == "common.safetensors"
