"""safetensors headers: every malformed one is refused by name."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerokit.checkpoint.safetensors import MAX_BYTES, parse_header
from zerokit.errors import CheckpointError

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "U8", "shape": [], "data_offsets": [24, 25]}


def file_of(header: object, data: int = 25, *, text: bytes | None = None) -> bytes:
    text = json.dumps(header).encode() if text is None else text
    return len(text).to_bytes(8, "little") + text + bytes(data)


def changed(**members: object) -> object:
    return {"a": A | members}


REFUSALS: dict[str, tuple[bytes, str]] = {
    "longer than the file": (file_of({}, 0)[:-1], "truncated: its header takes 10 bytes, the file has 9"),
    "absurd length": (b"\xff" * 8 + b"{}", f"would take {2**64 - 1} bytes, {MAX_BYTES} are allowed"),
    "no object": (file_of([], 0), "expected a JSON object"),
    "a tensor twice": (file_of(None, text=b'{"a":{},"a":{}}'), "duplicate key 'a'"),
    "unknown dtype": (file_of(changed(dtype="F12"), 24), "dtype 'F12' is unknown"),
    "negative size": (file_of(changed(shape=[-2, -3]), 24), "shape .* is impossible"),
    "a million dimensions": (file_of(changed(shape=[2**62] * 10**6), 24), "is impossible"),
    "many digits": (file_of(None, 0, text=b'{"a":' + b"9" * 10**6 + b"}"), "number 9{20}… is too large"),
    "too few bytes": (
        file_of(changed(data_offsets=[0, 23]), 23),
        "23 bytes for float32 of shape .*expected 24",
    ),
    "a hole in front": (file_of(changed(data_offsets=[1, 25])), "a hole between the header and tensor 'a'"),
    "a hole between": (
        file_of({"a": A, "b": B | {"data_offsets": [25, 26]}}, 26),
        "a hole between tensor 'a' and tensor 'b'",
    ),
    "an overlap": (
        file_of({"a": A, "b": B | {"data_offsets": [23, 24]}}, 24),
        "an overlap between tensor 'a' and tensor 'b'",
    ),
    "beyond the file": (file_of({"a": A, "b": B}, 24), "tensors end at byte"),
    "NaN": (file_of(None, 0, text=b'{"a": NaN}'), "NaN is not JSON"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_a_malformed_header_is_refused(case: str) -> None:
    content, message = REFUSALS[case]
    with pytest.raises(CheckpointError, match=message) as caught:
        parse_header(content, len(content), "there/a.safetensors")
    assert str(caught.value).startswith("there/a.safetensors: ")
    assert len(str(caught.value)) < 500


VALID = file_of({"__metadata__": {"format": "pt"}, "a": A, "b": B})


@settings(max_examples=100)
@given(st.data())
def test_a_mutated_header_is_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    """What is accepted tiles the file."""
    content = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content)))
        stop = data.draw(st.integers(place, min(len(content), place + 4)))
        content[place:stop] = data.draw(
            st.one_of(st.binary(max_size=4), st.sampled_from([b'"', b"{", b"]", b"9", b"-", b"null", b"1e9"]))
        )
    try:
        header = parse_header(bytes(content), len(content), "file")
    except CheckpointError:
        return
    ends = [header.size]
    for tensor in header.tensors.values():
        assert tensor.offset == ends[-1]
        ends.append(tensor.offset + tensor.size)
    assert ends[-1] == len(content)
