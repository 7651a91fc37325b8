"""The pickle reader: plain data comes back, classes become inert records, and nothing is ever run."""

from __future__ import annotations

import collections
import contextlib
import os
import pickle
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zerokit.checkpoint.formats.pickles import (
    Name,
    Ordered,
    Persistent,
    Record,
    Size,
    parse_pickle,
    to_pickle,
)
from zerokit.errors import CheckpointError

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 80), 1 << 80)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
KEYS = st.text() | st.integers(-9, 1 << 40) | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner) | st.tuples(),
    max_leaves=20,
)


@given(VALUES, st.integers(2, 5))
def test_what_python_pickles_is_read(value: Any, protocol: int) -> None:
    assert parse_pickle(pickle.dumps(value, protocol), "x") == value


@given(VALUES)
def test_what_is_written_python_and_we_read(value: Any) -> None:
    content = to_pickle(value)
    assert pickle.loads(content) == value
    assert parse_pickle(content, "x") == value


def test_torchs_own_types_are_written_as_they_were() -> None:
    value = Ordered({"a": Size((3, 4)), "b": Name("torch.float32")})
    content = to_pickle(value)
    loaded = pickle.loads(content)
    assert loaded == {"a": torch.Size([3, 4]), "b": torch.float32}
    assert type(loaded) is collections.OrderedDict
    assert type(loaded["a"]) is torch.Size
    again = parse_pickle(content, "x")
    assert again == value
    assert (type(again), type(again["a"])) == (Ordered, Size)


class Harmful:
    """Runs a command when it is unpickled."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.made = function, args

    def __reduce__(self) -> Any:
        return self.made


def _touch(path: str) -> list[bytes]:
    """Ways to run something while a pickle is read."""
    plain = [
        Harmful(os.system, f"touch {path}"),
        Harmful(eval, f"open({path!r}, 'w').close()"),
        Harmful(exec, f"open({path!r}, 'w').close()"),
        Harmful(open, path, "w"),
        Harmful(os.mkdir, path),
        Harmful(getattr, "text", "upper"),
        {"weights": [Harmful(os.system, f"touch {path}")]},
        Harmful(__import__, "antigravity"),
    ]
    by_hand = [
        # INST and OBJ, of the first protocols; EXT1, which looks a class up in the running program's registry
        b"\x80\x02(S'touch " + path.encode() + b"'\nios\nsystem\n.",
        b"\x80\x02(cos\nsystem\nX\x05\x00\x00\x00touch" + b"o.",
        b"\x80\x02\x82\x01.",
        # a callable that is no name: the result of another call, called
        b"\x80\x02cbuiltins\ngetattr\ncos\nsystem\nX\x04\x00\x00\x00name\x86R\x8c\x05touch\x85R.",
        # BUILD on a class, which would set its attributes
        b"\x80\x02cos\nsystem\n}X\x01\x00\x00\x00aK\x01sb.",
    ]
    return [pickle.dumps(value, protocol) for value in plain for protocol in (2, 4)] + by_hand


def test_nothing_runs(tmp_path: Any) -> None:
    path = tmp_path / "ran"
    for content in _touch(str(path)):
        try:
            value = parse_pickle(content, "x")
        except CheckpointError:
            pass
        else:
            assert isinstance(value, (Record, Name, dict))
        assert not path.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x02",
        b"\x80\x06N.",
        b"\x80\x02.",
        b"\x80\x02R.",
        b"\x80\x02t.",
        b"\x80\x02h\x05.",
        b"\x80\x02]}e.",
        b"\x80\x02K\x01K\x02s.",
        b"\x80\x02}(]Nu.",
        b"\x80\x02}((((ttttNu.",
        b"\x80\x02K",
        b"\x80\x02}q\x00h\x00h\x00s.",
        b"\x80\x02c.",
        pytest.param(b"\x80\x02B\xff\xff\xff\xffab.", id="claims 4 GiB"),
        pytest.param(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 60) + b"ab.", id="claims an exabyte"),
        pytest.param(b"\x80\x04\x95" + struct.pack("<Q", 1 << 60), id="a frame of an exabyte"),
        pytest.param(b"\x80\x02r\xff\xff\xff\xff.", id="memo of nothing"),
    ],
)
def test_damaged_pickles_are_errors(content: bytes) -> None:
    with pytest.raises(CheckpointError, match="not a pickle that zerokit reads"):
        parse_pickle(content, "x")


def test_shared_parts_take_no_more_room_than_in_the_pickle() -> None:
    """A "billion laughs": each list holds the one before ten times."""
    content = bytearray(b"\x80\x02]q\x00")
    for index in range(1, 60):
        content += b"](" + bytes([ord("h"), index - 1]) * 10 + b"eq" + bytes([index])
    value = parse_pickle(bytes(content + b"."), "x")
    assert len(value) == 10
    assert value[0] is value[9]


@given(st.binary(max_size=200))
def test_random_bytes_are_data_or_an_error(content: bytes) -> None:
    for start in (b"", b"\x80\x02", b"\x80\x04"):
        with contextlib.suppress(CheckpointError):
            parse_pickle(start + content, "x")


def test_persistent_objects_keep_what_names_them() -> None:
    value = Persistent(("storage", Name("torch.FloatStorage"), "0", "cpu", 4))
    assert parse_pickle(to_pickle(value), "x") == value
