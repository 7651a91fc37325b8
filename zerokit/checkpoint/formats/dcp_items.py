"""The contents of a DCP checkpoint's `.metadata`: tensors with their places, and values.

    DIR/.metadata        a pickle: names to chunks with offsets and sizes, and chunks to bytes of files
    DIR/__R_I.distcp     complete `torch.save` files, one a chunk, one after the other

See torch/distributed/checkpoint/metadata.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.disk import opened, read_whole
from zerokit.checkpoint.formats.description import StoredStream
from zerokit.checkpoint.formats.pickles import Name, Record, parse_pickle
from zerokit.checkpoint.formats.torchfile import Blob, StoredTensor, read_torch_file
from zerokit.checkpoint.safetensors import ELEMENT_BYTES
from zerokit.checkpoint.source import Stretch
from zerokit.errors import CheckpointError
from zerokit.layout import Interval

METADATA = ".metadata"
_MOST_ROWS = 1 << 20
"""Stretches of one chunk. Only chunks that are cut along a later dimension have more than one."""


@dataclass(frozen=True, slots=True)
class StoredItem:
    """A tensor: its chunks in order, each as a stretch of a file; `crcs` are those of the chunks."""

    path: tuple[Any, ...]
    dtype: str
    shape: tuple[int, ...]
    stretches: tuple[Stretch, ...]
    crcs: tuple[int, ...]
    chunks: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stream(self) -> StoredStream:
        return StoredStream(self.dtype, self.stretches)


class Items:
    """The contents of one or several DCP folders, by name.

    `values` are not tensors: each is its path in the state dict and the value, with tensors in it unread.
    """

    def __init__(self, path: Path, folders: Sequence[Path]) -> None:
        """Raises `CheckpointError` for what is damaged, missing or not supported; `path` is named in errors."""
        self.path = path
        self.files: list[Path] = []
        self.blobs: dict[int, list[Blob]] = {}
        self.tensors: dict[str, StoredItem] = {}
        self.values: dict[str, tuple[tuple[Any, ...], Any]] = {}
        self.identity = 0
        for folder in folders:
            with ExitStack() as stack:
                self._read(folder, _Places(folder, self.files, stack))

    def _read(self, folder: Path, places: _Places) -> None:
        content = read_whole(folder / METADATA)
        self.identity = crc32(content, self.identity)
        metadata = parse_pickle(content, str(folder / METADATA))
        if not isinstance(metadata, Record) or not metadata.name.endswith(".Metadata"):
            raise CheckpointError(f"{folder / METADATA}: no metadata of torch.distributed.checkpoint")
        fields = metadata.fields
        paths: Mapping[str, tuple[Any, ...]] = fields.get("planner_data") or {}
        for index, place in fields["storage_data"].items():
            places.add(index.fields["fqn"], index.fields.get("offset"), place.fields)
        for name, entry in fields["state_dict_metadata"].items():
            path = tuple(paths.get(name) or (name,))
            if name in self.tensors or name in self.values:
                raise CheckpointError(f"{self.path}: {name} is in both of its folders")
            if entry.name.endswith(".BytesStorageMetadata"):
                self.values[name] = path, places.read(name, None)[1]
            elif entry.name.endswith(".TensorStorageMetadata"):
                self.tensors[name] = self._tensor(name, path, entry.fields, places)
            else:
                raise CheckpointError(f"{self.path}: {name} is a {entry.name}, which zerokit does not read")

    def _tensor(
        self, name: str, path: tuple[Any, ...], fields: Mapping[str, Any], places: _Places
    ) -> StoredItem:
        shape = tuple(fields["size"])
        properties = fields["properties"]
        dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.fields["dtype"]
        kind = dtype.text.removeprefix("torch.") if isinstance(dtype, Name) else str(dtype)
        if kind not in ELEMENT_BYTES:
            raise CheckpointError(
                f"{self.path}: {name} has elements of {kind[:60]}, which zerokit does not read"
            )
        width = ELEMENT_BYTES[kind]
        stretches: list[Stretch] = []
        crcs = []
        chunks = sorted(
            (tuple(chunk.fields["offsets"]), tuple(chunk.fields["sizes"])) for chunk in fields["chunks"]
        )
        for offsets, sizes in chunks:
            if not math.prod(sizes):
                continue
            number, tensor = places.read(name, offsets)
            if not isinstance(tensor, StoredTensor) or tensor.shape != sizes or tensor.dtype != kind:
                found = (
                    f"{tensor.dtype} {list(tensor.shape)}"
                    if isinstance(tensor, StoredTensor)
                    else type(tensor).__name__
                )
                raise CheckpointError(
                    f"{self.files[number]}: {name} at {list(offsets)} is {found}, expected {kind} {list(sizes)}"
                )
            if not tensor.contiguous:
                raise CheckpointError(f"{self.files[number]}: {name} is not contiguous: save it contiguous")
            self.blobs.setdefault(number, []).append(tensor.blob)
            crcs.append(tensor.blob.crc)
            stretches.extend(
                Stretch(number, interval, tensor.offset + start * width)
                for interval, start in rows(shape, offsets, sizes, f"{self.path}: {name}")
            )
        stretches.sort(key=lambda stretch: stretch.interval.start)
        return StoredItem(path, kind, shape, tuple(stretches), tuple(crcs), len(chunks))


class _Places:
    """Which bytes of a folder's files hold each chunk, and what lies there."""

    def __init__(self, folder: Path, files: list[Path], stack: ExitStack) -> None:
        """Files that are read are added to `files`; they stay open as long as `stack`."""
        self._folder, self._files, self._stack = folder, files, stack
        self._places: dict[tuple[str, Any], Mapping[str, Any]] = {}
        self._open: dict[str, tuple[int, int]] = {}
        self._seen: dict[tuple[str, int, int], Any] = {}

    def add(self, name: str, offsets: tuple[int, ...] | None, place: Mapping[str, Any]) -> None:
        self._places[name, None if offsets is None else tuple(offsets)] = place

    def read(self, name: str, offsets: tuple[int, ...] | None) -> tuple[int, Any]:
        """The file's number and the value of one chunk. Names may share it, so it is read once."""
        place = self._places.get((name, offsets))
        if place is None:
            where = "it" if offsets is None else f"the chunk at {list(offsets)}"
            raise CheckpointError(f"{self._folder}: {name}: no file has {where}")
        relative = place["relative_path"]
        path = self._folder / relative
        if "/" in relative or relative.startswith(".."):
            raise CheckpointError(f"{self._folder / METADATA}: names the file {relative[:200]!r}, outside it")
        if place.get("transform_descriptors"):
            raise CheckpointError(f"{path}: compressed by an extension: save it without one")
        if relative not in self._open:
            self._open[relative] = len(self._files), self._stack.enter_context(opened(path))
            self._files.append(path)
        number, fd = self._open[relative]
        where_in_file = relative, place["offset"], place["length"]
        if where_in_file not in self._seen:
            self._seen[where_in_file] = read_torch_file(path, fd, *where_in_file[1:])
        return number, self._seen[where_in_file]


def rows(
    shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], where: str
) -> Iterator[tuple[Interval, int]]:
    """The stretches of a row-major tensor that a chunk covers, each with its first element's place in the chunk.

    Raises `CheckpointError` for a chunk that does not lie in the tensor, or has too many stretches.
    """
    if not len(shape) == len(offsets) == len(sizes) or any(
        not 0 <= start <= start + size <= whole
        for whole, start, size in zip(shape, offsets, sizes, strict=True)
    ):
        raise CheckpointError(
            f"{where}: a chunk of {list(sizes)} at {list(offsets)} does not lie in {list(shape)}"
        )
    # Trailing dimensions that are whole belong to one stretch, and so does the one before them.
    inner = len(shape)
    while inner > 0 and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(inner - 1, 0)
    length = math.prod(sizes[inner:])
    count = math.prod(sizes[:inner])
    if count > _MOST_ROWS:
        raise CheckpointError(
            f"{where}: a chunk of {list(sizes)} has {count} stretches, {_MOST_ROWS} are read"
        )
    for number in range(count):
        rest, start = number, 0
        stride = math.prod(shape[inner:])
        for dimension in range(inner - 1, -1, -1):
            rest, index = divmod(rest, sizes[dimension])
            start += (offsets[dimension] + index) * stride
            stride *= shape[dimension]
        if inner < len(shape):
            start += offsets[inner] * math.prod(shape[inner + 1 :])
        yield Interval(start, start + length), number * length
