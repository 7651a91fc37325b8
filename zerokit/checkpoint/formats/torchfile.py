"""Reads files of `torch.save` without torch: their tensors and places.

A file is an uncompressed zip: `NAME/data.pkl` holds the value, and each storage is an entry of raw little-endian
bytes, `NAME/data/KEY`, so its elements can be copied as they are. Entries carry a CRC-32. See
pytorch.org/docs/stable/notes/serialization.html.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from zerokit.checkpoint.checksum import crc32, damaged
from zerokit.checkpoint.disk import despite_damage, explained, opened, read_exactly, size_of
from zerokit.checkpoint.formats.checks import require
from zerokit.checkpoint.formats.pickles import (
    MAX_PICKLE_BYTES,
    Name,
    Persistent,
    Record,
    parse_pickle,
)
from zerokit.checkpoint.safetensors import ELEMENT_BYTES
from zerokit.errors import CheckpointError

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "UntypedStorage": "uint8",
}
_REBUILT = {
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
}
_LOCAL_HEADER_BYTES = 30
"""Without the entry's name. They end with the lengths of that and of what follows it."""

_UTF_8 = 1 << 11
"""The flag of an entry whose name is not in code page 437."""

_MAX_ENTRIES = 1 << 20
_MAX_DIRECTORY_BYTES = 1 << 26
"""The zip's directory: it is held in memory ten times over."""

_MAX_DIMENSIONS = 64

PRODUCER = "producer"
"""The entry that marks files which zerokit has written."""


class Blob(NamedTuple):
    """Bytes of a file that have a CRC-32 of their own: an entry of a zip."""

    offset: int
    size: int
    crc: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor whose element 0 is element `start` of the bytes `blob` of a file, strides in elements."""

    blob: Blob
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie one after the other in row-major order."""
        strides = zip(self.shape, self.stride, row_major(self.shape), strict=True)
        return not self.numel or all(size == 1 or found == own for size, found, own in strides)

    @property
    def offset(self) -> int:
        return self.blob.offset + self.start * self.element_bytes


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def read_torch_file(
    path: Path,
    fd: int,
    offset: int = 0,
    size: int | None = None,
    *,
    blobs: set[Blob] | None = None,
    names: set[str] | None = None,
) -> Any:
    """The value in the `torch.save` file that lies at bytes `offset` to `offset + size` of an open file.

    Tensors come as `StoredTensor`, their bytes unread and added to `blobs`. The name under which it was saved, without
    ".pt", is added to `names`; it is "archive" where no file had been named. Raises `CheckpointError` for what is no
    such file, has compressed entries, or a tensor outside its storage.
    """
    whole = size_of(fd, path)
    size = whole - offset if size is None else size
    inside = offset >= 0 and 0 <= size <= whole - offset
    require(inside, path, f"truncated: {whole} bytes, at least {offset + size} expected")
    entries = _entries(path, fd, offset, size)
    pickles = [name for name in entries if name.endswith("/data.pkl") or name == "data.pkl"]
    found = f"{len(pickles)} entries called data.pkl, expected 1"
    require(len(pickles) == 1, path, f"not a file of torch.save: {found}")
    unverified = "saved without checksums, by torch.serialization.set_crc32_options(False): save it with them"
    require(entries[pickles[0]].crc, path, unverified)
    prefix = pickles[0].removesuffix("data.pkl")
    if names is not None:
        names.add(prefix.rstrip("/"))
    content = content_of(path, fd, entries[pickles[0]])
    order = entries.get(f"{prefix}byteorder")
    little = order is None or content_of(path, fd, order) == b"little"
    require(little, path, "its numbers are big-endian: save it on a little-endian machine")

    def tensor(record: Record) -> Any:
        if record.name in _REBUILT:
            made = _tensor(record.args, entries, prefix)
            if blobs is not None:
                blobs.add(made.blob)
            return made
        if record.name == "torch._utils._rebuild_parameter" and record.args:
            return record.args[0]
        if record.name == "torch._tensor._rebuild_from_type_v2" and len(record.args) > 2:
            # A tensor subclass, such as DeepSpeed's parameters: function, type, arguments, state.
            return tensor(Record(getattr(record.args[0], "text", ""), record.args[2]))
        return record

    return parse_pickle(content, f"{path}: data.pkl", tensor)


def is_marked(path: Path) -> bool:
    """Whether zerokit has written the file."""
    with despite_damage(), opened(path) as fd:
        return any(name.endswith(f"/{PRODUCER}") for name in _entries(path, fd, 0, size_of(fd, path)))
    return False


def _entries(path: Path, fd: int, offset: int, size: int) -> dict[str, Blob]:
    """Every entry's bytes, by its name. The central directory is the zip library's to read."""
    try:
        with zipfile.ZipFile(_Window(path, fd, offset, size)) as archive:
            listed = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError, OverflowError, OSError) as error:
        raise CheckpointError(f"{path}: not a file of torch.save, or truncated: {error}") from None
    require(len(listed) <= _MAX_ENTRIES, path, f"{len(listed)} entries, more than {_MAX_ENTRIES}")
    entries: dict[str, Blob] = {}
    for entry in listed:
        name, start = f"entry {entry.filename[:200]!r}", entry.header_offset
        own = entry.orig_filename.encode("utf-8" if entry.flag_bits & _UTF_8 else "cp437")
        head = bytearray(_LOCAL_HEADER_BYTES + len(own))
        stored = entry.compress_type == zipfile.ZIP_STORED and entry.file_size == entry.compress_size
        require(stored, path, f"{name} is compressed, as torch.save never writes it")
        require(0 <= start <= size - len(head), path, f"{name} lies outside the file")
        read_exactly(fd, [head], offset + start, path)
        require(head[:4] == b"PK\x03\x04", path, f"{name} has no header of its own")
        lengths = struct.unpack_from("<2H", head, _LOCAL_HEADER_BYTES - 4)
        same = lengths[0] == len(own) and head[_LOCAL_HEADER_BYTES:] == own
        require(same, path, f"{name} has another name in its own header")
        start += _LOCAL_HEADER_BYTES + sum(lengths)
        require(start + entry.file_size <= size, path, f"{name} ends behind the file")
        require(entry.filename not in entries, path, f"{name} is there twice")
        entries[entry.filename] = Blob(offset + start, entry.file_size, entry.CRC)
    return entries


def content_of(path: Path, fd: int, blob: Blob) -> bytes:
    """A small entry's bytes, verified. Raises `CheckpointError`."""
    limit = f"more than the {MAX_PICKLE_BYTES} that are read whole"
    require(blob.size <= MAX_PICKLE_BYTES, path, f"an entry of {blob.size} bytes, {limit}")
    content = bytearray(blob.size)
    read_exactly(fd, [content], blob.offset, path)
    crc = crc32(content)
    require(crc == blob.crc, path, damaged(crc, blob.crc))
    return bytes(content)


def _tensor(args: Sequence[Any], entries: Mapping[str, Blob], prefix: str) -> StoredTensor:
    storage, start, shape, stride = args[:4]
    if not isinstance(storage, Persistent):
        raise ValueError("its storage is not in the file")
    kind, storage_type, key, _, _ = storage.identity
    if kind != "storage" or not isinstance(storage_type, Name):
        raise ValueError(f"its storage is {str(kind)[:60]!r}")
    name = storage_type.text.rpartition(".")[2]
    if name not in STORAGES:
        raise ValueError(f"{name[:60]} is of a dtype that safetensors cannot hold")
    dtype = STORAGES[name]
    if len(args) > 6 and isinstance(args[6], Name):  # of an untyped storage
        dtype = args[6].text.removeprefix("torch.")
        if dtype not in ELEMENT_BYTES:
            raise ValueError(f"{dtype[:60]} is a dtype that safetensors cannot hold")
    blob = entries.get(f"{prefix}data/{key}")
    if blob is None:
        raise ValueError(f"its storage {str(key)[:60]!r} is missing")
    if not isinstance(shape, tuple) or not isinstance(stride, tuple):
        raise ValueError(f"shape {str(shape)[:60]} with strides {str(stride)[:60]}")
    shape, stride = tuple(shape), tuple(stride)
    numbers = all(type(n) is int and 0 <= n < 1 << 62 for n in (start, *shape, *stride))
    if not numbers or not len(shape) == len(stride) <= _MAX_DIMENSIONS:
        raise ValueError(f"shape {str(shape)[:60]} with strides {str(stride)[:60]}")
    last = start + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    if math.prod(shape) and (last + 1) * ELEMENT_BYTES[dtype] > blob.size:
        raise ValueError(f"it reaches to element {last} of a storage of {blob.size} bytes")
    return StoredTensor(blob, dtype, shape, stride, start)


class _Window(io.RawIOBase):
    """Part of a file. Where it cannot be read that is said, which the zip library would take for another format."""

    def __init__(self, path: Path, fd: int, offset: int, size: int) -> None:
        self._path, self._fd, self._offset, self._size, self._position = path, fd, offset, size, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        if wanted > _MAX_DIRECTORY_BYTES:
            raise ValueError(f"a directory of {wanted} bytes, more than {_MAX_DIRECTORY_BYTES}")
        with explained(self._path, "read"):  # zipfile takes an OSError for a file that is no zip
            content = os.pread(self._fd, wanted, self._offset + self._position)
        self._position += len(content)
        return content
