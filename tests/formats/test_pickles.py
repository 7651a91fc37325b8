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

from zerokit.checkpoint.formats.description import plain_value
from zerokit.checkpoint.formats.pickle_writer import to_pickle
from zerokit.checkpoint.formats.pickles import Name, Ordered, Persistent, Record, Size, mapped, parse_pickle
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
    storage = Persistent(("storage", Name("torch.FloatStorage"), "0", "cpu", 4))
    assert parse_pickle(to_pickle(storage), "x") == storage


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


LONG_TEXT = b"\x80\x02X" + struct.pack("<I", 100_000) + b"a" * 100_000 + b"q\x00"
"""Remembered as number 0."""
ONE_HASH = (b"\x8a\x0a" + (number * (2**61 - 1)).to_bytes(10, "little") + b"N" for number in range(1, 9000))


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
        pytest.param(LONG_TEXT + b"c_codecs\nencode\nh\x00h\x00\x86R" * 2000 + b".", id="copies of one text"),
        pytest.param(b"\x80\x02(" + b"N" * 100 + b"tq\x00}h\x00Ns.", id="a key of a hundred parts"),
        pytest.param(b"\x80\x02}(" + b"".join(ONE_HASH) + b"u.", id="keys with one hash"),
    ],
)
def test_damaged_pickles_and_bombs_are_errors(content: bytes) -> None:
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


def test_shared_parts_are_written_once() -> None:
    """The same, on its way into a file of DeepSpeed's; a list that holds itself, too."""
    value: Any = ["end"]
    for _ in range(60):
        value = [value] * 10
    assert len(to_pickle(value)) < 10_000
    again = parse_pickle(to_pickle(mapped(value, lambda part: part)), "x")
    assert again[0] is again[9]
    value = []
    value.append(value)
    again = parse_pickle(to_pickle(value), "x")
    assert again[0] is again
    with pytest.raises(CheckpointError, match="over 16777216 values, or nested over 100"):
        plain_value(value, "client_state", [])


def test_what_leads_back_to_itself_is_written_as_it_is() -> None:
    record = Record("module.Class")
    record.pairs[record, record] = []  # a tuple that contains itself by way of a record
    content = to_pickle([record, []])
    again = parse_pickle(content, "x")
    (key,) = again[0].pairs
    assert key == (again[0], again[0])
    assert (again[0].pairs[key], again[1]) == ([], [])
    assert to_pickle(again) == content
    own: list[Any] = []
    own.append(Record("module.Class", (own,)))
    again = parse_pickle(to_pickle([own[0], [], own]), "x")
    assert again[0].args[0] is again[2]
    assert again[2] == [again[0]]
    assert again[1] == []


class Keywords:
    """Pickled with NEWOBJ_EX: `__new__` with keywords."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Keywords:
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> Any:
        return (1,), {"size": 2}


def test_objects_with_keywords_are_records_and_never_made() -> None:
    value = parse_pickle(pickle.dumps([Keywords()], 4), "x")
    assert isinstance(value[0], Record)
    assert (value[0].name.rpartition(".")[2], value[0].args) == ("Keywords", (1, 2))
    for content in (
        b"\x80\x04K\x01)}\x92.",
        b"\x80\x04cos\nsystem\nK\x01}\x92.",
        b"\x80\x04cos\nsystem\n)K\x01\x92.",
    ):
        with pytest.raises(CheckpointError, match="not a pickle that zerokit reads"):
            parse_pickle(content, "x")


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
        b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",
        b"\x80\x02N" + b"\x85" * 100_000 + b".",
    ],
)
def test_deep_nesting_is_an_error_of_what_looks_into_it(content: bytes) -> None:
    """No recursion: reading it is harmless, and what goes down in it says how deep it may be."""
    value = parse_pickle(content, "x")
    with pytest.raises(ValueError, match="nested more than 100 deep"):
        mapped(value, lambda part: part)
    with pytest.raises(CheckpointError, match="nested over 100 deep"):
        plain_value(value, "client_state", [])


@given(st.binary(max_size=200))
def test_random_bytes_are_data_or_an_error(content: bytes) -> None:
    for start in (b"", b"\x80\x02", b"\x80\x04"):
        with contextlib.suppress(CheckpointError):
            parse_pickle(start + content, "x")
