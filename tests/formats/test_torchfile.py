"""Files of torch.save: read without torch as torch reads them, and written so that torch reads them."""

from __future__ import annotations

import os
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
from zerokit.checkpoint.formats.torchfile import StoredTensor, read_torch_file
from zerokit.checkpoint.formats.torchwriter import NewTensor, plan_torch_file, whole, write_torch_files
from zerokit.errors import CheckpointError

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
    "encrypted": "is encrypted",
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
            if how == "encrypted":
                new.filelist[-1].flag_bits |= 1  # in the directory; the library writes no encrypted ones
    with pytest.raises(CheckpointError, match=REFUSED[how]):
        _read(tmp_path / "bad.pt")


def test_entries_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """A zip bomb: many names of the same bytes."""
    torch.save({"a": torch.ones(100), "b": torch.zeros(100)}, tmp_path / "file.pt")
    content = bytearray((tmp_path / "file.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "file.pt") as archive:
        first, second = (e.header_offset for e in archive.infolist() if "/data/" in e.filename)
    place = content.rindex(second.to_bytes(4, "little"), content.rindex(b"/data/0"))
    content[place : place + 4] = first.to_bytes(4, "little")
    (tmp_path / "file.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="entries overlap"):
        _read(tmp_path / "file.pt")


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


def _write(path: Path, value: Any) -> None:
    with Copier(jobs=1) as copier:
        write_torch_files(None, copier, path, [plan_torch_file(value, "archive")])  # type: ignore[arg-type]


def _new(tensor: torch.Tensor) -> NewTensor:
    return whole(str(tensor.dtype)[6:], tuple(tensor.shape), _raw(tensor))


def test_torch_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(6).to(dtype).reshape(2, 3) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3)}
    plain = {"step": 3, "betas": (0.9, 0.999), "names": ["a", "b"], "none": None, "large": 1 << 40}
    _write(tmp_path / "file.pt", {**{name: _new(tensor) for name, tensor in tensors.items()}, **plain})
    for mapped in (False, True):
        loaded = torch.load(tmp_path / "file.pt", weights_only=True, mmap=mapped)
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
