"""`extra.json`: every member that is missing or of another kind is refused by name, by all that read it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import (
    example_content,
    example_extra,
    example_layout,
    weights_of,
    write_checkpoint,
)
from zerokit.checkpoint.reader import Checkpoint
from zerokit.checkpoint.verify import verify
from zerokit.errors import CheckpointError

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
