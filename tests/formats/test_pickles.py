"""Pickles and files of torch.save, read without torch: nothing is ever run; what is written torch reads."""

from __future__ import annotations

import collections
import contextlib
import enum
import os
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zerokit.checkpoint.copying import Copier
from zerokit.checkpoint.disk import opened
from zerokit.checkpoint.formats.description import plain_value
from zerokit.checkpoint.formats.pickles import (
    Name,
    Ordered,
    Persistent,
    Record,
    Size,
    parse_pickle,
    to_pickle,
)
from zerokit.checkpoint.formats.torchfile import StoredTensor, read_torch_file
from zerokit.checkpoint.formats.torchwriter import plan_torch_file, whole, write_torch_files
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
def test_python_and_we_read_each_others_pickles(value: Any, protocol: int) -> None:
    assert parse_pickle(pickle.dumps(value, protocol), "x") == value
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


MODULE = "deepspeed.runtime.zero.config"
ENUMS: dict[bytes, Name | tuple[str, Any]] = {
    # A member by its value, as all Pythons write it but 3.11.0 to 3.11.3, in protocols 2 and 4
    b"c%b\nZeroStageEnum\nK\x02\x85R.": (f"{MODULE}.ZeroStageEnum", (2,)),
    b"\x8c\x1d%b\x8c\rZeroStageEnum\x93K\x02\x85R.": (f"{MODULE}.ZeroStageEnum", (2,)),
    # by its name, as these three do
    b"c__builtin__\ngetattr\nc%b\nZeroStageEnum\nX\x09\x00\x00\x00gradients\x86R.": Name(
        f"{MODULE}.ZeroStageEnum.gradients", 2
    ),
    b"\x8c\x08builtins\x8c\x07getattr\x93\x8c\x1d%b\x8c\rZeroStageEnum\x93\x8c\tgradients\x86R.": Name(
        f"{MODULE}.ZeroStageEnum.gradients", 2
    ),
    # of an enum in a class
    b"c__builtin__\ngetattr\nc%b\nOuter\nX\x05\x00\x00\x00Stage\x86RK\x02\x85R.": (
        f"{MODULE}.Outer.Stage",
        (2,),
    ),
    b"\x8c\x1d%b\x8c\x0bOuter.Stage\x93K\x02\x85R.": (f"{MODULE}.Outer.Stage", (2,)),
    # of several flags together
    b"c_operator\nor_\nc__builtin__\ngetattr\nc%b\nF\nX\x01\x00\x00\x00A\x86RK\x08\x86R.": (
        "_operator.or_",
        (Name(f"{MODULE}.F.A", 2), 8),
    ),
}


@pytest.mark.parametrize("content", ENUMS)
def test_every_python_s_enums_are_names_or_records_and_written_so(content: bytes) -> None:
    expected = ENUMS[content]
    found = parse_pickle(b"\x80\x04" + content.replace(b"%b", MODULE.encode()), "x")
    for value in (found, parse_pickle(to_pickle(found), "x")):
        assert value == expected or (value.name, value.args) == expected


class Stage(enum.IntEnum):
    ONE = 1


class Outer:
    class Inner:
        class Deep(enum.Enum):
            A = "a"


def test_python_reads_names_in_names_as_they_are_written() -> None:
    for protocol in range(2, 6):
        for value in (Stage.ONE, Outer.Inner.Deep.A, Outer.Inner.Deep):
            again = to_pickle(parse_pickle(pickle.dumps(value, protocol), "x"))
            assert pickle.loads(again) is value
    named = to_pickle(Name(f"{__name__}.Stage.ONE", 2))
    assert pickle.loads(named) is Stage.ONE


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
    again = parse_pickle(to_pickle(value), "x")
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
    with pytest.raises(CheckpointError, match="nested too deep to be written"):
        to_pickle(value)
    with pytest.raises(CheckpointError, match="nested over 100 deep"):
        plain_value(value, "client_state", [])


@given(st.binary(max_size=200))
def test_random_bytes_are_data_or_an_error(content: bytes) -> None:
    for start in (b"", b"\x80\x02", b"\x80\x04"):
        with contextlib.suppress(CheckpointError):
            parse_pickle(start + content, "x")


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8, torch.bool]


def _read(path: Path) -> Any:
    with opened(path) as fd:
        return read_torch_file(path, fd)


def _bytes(path: Path, tensor: StoredTensor) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.pread(fd, tensor.numel * tensor.element_bytes, tensor.offset)
    finally:
        os.close(fd)


def _raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_tensors_are_found_where_torch_put_them(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    value = {
        **{str(dtype): torch.arange(6).to(dtype).reshape(2, 3) for dtype in DTYPES},
        "view": base[6:12].view(2, 3),
        "whole": base,
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "ordered": OrderedDict(a=torch.ones(3), b=[torch.zeros(2), (1, "text")]),
    }
    torch.save(value, tmp_path / "file.pt")
    read = _read(tmp_path / "file.pt")
    for name, tensor in value.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        found = read[name]
        assert (found.dtype, found.shape) == (str(tensor.dtype)[6:], tuple(tensor.shape))
        assert found.contiguous
        assert _bytes(tmp_path / "file.pt", found) == _raw(tensor.detach())
    assert read["view"].blob == read["whole"].blob
    assert read["ordered"]["b"][1] == (1, "text")
    torch.save({"t": base.view(4, 6).t()}, tmp_path / "strided.pt")
    assert not _read(tmp_path / "strided.pt")["t"].contiguous


REFUSED = {
    "compressed": "is compressed",
    "big-endian": "big-endian",
    "without data": "is missing",
    "short data": "reaches to element",
    "twice": "is there twice",
    "unchecked": "saved without checksums",
}


@pytest.mark.filterwarnings("ignore:Duplicate name:UserWarning")
@pytest.mark.parametrize("how", REFUSED)
def test_what_torch_never_writes_is_refused(tmp_path: Path, how: str) -> None:
    torch.save({"a": torch.ones(100)}, tmp_path / "good.pt")
    with zipfile.ZipFile(tmp_path / "good.pt") as old, zipfile.ZipFile(tmp_path / "bad.pt", "w") as new:
        for entry in old.infolist():
            name, content = entry.filename, old.read(entry)
            if how == "big-endian" and name.endswith("byteorder"):
                content = b"big"
            if how == "short data" and "/data/" in name:
                content = content[:-4]
            for _ in range(0 if how == "without data" and "/data/" in name else 2 if how == "twice" else 1):
                new.writestr(name, content, zipfile.ZIP_DEFLATED if how == "compressed" else None)
            if how == "unchecked":
                new.filelist[-1].CRC = 0  # as torch.serialization.set_crc32_options(False) has them
    with pytest.raises(CheckpointError, match=REFUSED[how]):
        _read(tmp_path / "bad.pt")


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_changed_file_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("changed")
    torch.save({"a": torch.ones(3), "b": [1, 2]}, folder / "file.pt")
    content = bytearray((folder / "file.pt").read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.none() | st.integers(0, len(content)))
    (folder / "file.pt").write_bytes(content[:cut])
    try:
        value = _read(folder / "file.pt")
    except CheckpointError:
        return
    assert value is not None


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(6).to(dtype).reshape(2, 3) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    plain = {"step": 3, "betas": (0.9, 0.999), "names": ["a", "b"], "none": None, "large": 1 << 40}
    new = {name: whole(str(t.dtype)[6:], tuple(t.shape), _raw(t)) for name, t in tensors.items()}
    with Copier(jobs=1) as copier:
        file = plan_torch_file({**new, **plain}, "archive")
        write_torch_files(None, copier, tmp_path / "file.pt", [file])  # type: ignore[arg-type]
    for in_place in (False, True):
        loaded = torch.load(tmp_path / "file.pt", weights_only=True, mmap=in_place)
        for name, tensor in tensors.items():
            assert loaded[name].dtype == tensor.dtype
            assert torch.equal(loaded[name], tensor), name
        assert {name: loaded[name] for name in plain} == plain
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        assert archive.testzip() is None
    assert all(
        entry.contiguous and entry.offset % 64 == 0
        for entry in _read(tmp_path / "file.pt").values()
        if isinstance(entry, StoredTensor)
    )
