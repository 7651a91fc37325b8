"""The contents of a DCP checkpoint's `.metadata`: tensors with their places, and values.

    DIR/.metadata        a pickle: names to chunks with offsets and sizes, and chunks to bytes of files
    DIR/__R_I.distcp     complete `torch.save` files, one a chunk, one after the other

See torch/distributed/checkpoint/metadata.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.disk import opened, read_whole
from zerokit.checkpoint.formats.checks import require
from zerokit.checkpoint.formats.description import StoredStream
from zerokit.checkpoint.formats.pickles import Name, Record, parse_pickle
from zerokit.checkpoint.formats.torchfile import Blob, StoredTensor, read_torch_file, row_major
from zerokit.checkpoint.safetensors import ELEMENT_BYTES
from zerokit.checkpoint.source import Stretch
from zerokit.errors import CheckpointError
from zerokit.layout import Interval

METADATA = ".metadata"
_MOST_OPEN = 128
"""Files that stay open while tensors are looked up: there may be one for each of a thousand ranks."""

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
                self._read(folder, stack)

    def _read(self, folder: Path, stack: ExitStack) -> None:
        """Add a folder's contents; most of its files stay open as long as `stack`."""
        where = folder / METADATA
        content = read_whole(where)
        self.identity = crc32(content, self.identity)
        metadata = parse_pickle(content, str(where))
        if not isinstance(metadata, Record) or not metadata.name.endswith(".Metadata"):
            raise CheckpointError(f"{where}: no metadata of torch.distributed.checkpoint")
        places: dict[tuple[str, tuple[int, ...] | None], Mapping[str, Any]] = {}
        for index, place in metadata.fields["storage_data"].items():
            offset = index.fields.get("offset")
            places[index.fields["fqn"], None if offset is None else tuple(offset)] = place.fields
        open_files: dict[str, tuple[int, int | None]] = {}

        @cache  # names may share a chunk
        def read(file: str, offset: int, length: int) -> tuple[int, Any]:
            require("/" not in file and file[:2] != "..", where, f"names the file {file[:200]!r}, outside it")
            if file not in open_files:
                few = len(open_files) < _MOST_OPEN
                kept = stack.enter_context(opened(folder / file)) if few else None
                open_files[file] = len(self.files), kept
                self.files.append(folder / file)
            number, fd = open_files[file]
            with opened(folder / file) if fd is None else nullcontext(fd) as held:
                return number, read_torch_file(folder / file, held, offset, length)

        def chunk(name: str, offsets: tuple[int, ...] | None) -> tuple[int, Any]:
            """The file's number and the value of one chunk."""
            what = "it" if offsets is None else f"the chunk at {list(offsets)}"
            require((name, offsets) in places, folder, f"{name}: no file has {what}")
            place = places[name, offsets]
            plain = not place.get("transform_descriptors")
            require(plain, folder / place["relative_path"], "compressed by an extension: save it without one")
            return read(place["relative_path"], place["offset"], place["length"])

        paths: Mapping[str, tuple[Any, ...]] = metadata.fields.get("planner_data") or {}
        for name, entry in metadata.fields["state_dict_metadata"].items():
            path, kind = tuple(paths.get(name) or (name,)), entry.name.rpartition(".")[2]
            known = name in self.tensors or name in self.values
            require(not known, self.path, f"{name} is in both of its folders")
            if kind == "BytesStorageMetadata":
                self.values[name] = path, chunk(name, None)[1]
            else:
                require(
                    kind == "TensorStorageMetadata",
                    self.path,
                    f"{name} is a {entry.name}, which zerokit does not read",
                )
                self.tensors[name] = self._tensor(name, path, entry.fields, chunk)

    def _tensor(
        self,
        name: str,
        path: tuple[Any, ...],
        fields: Mapping[str, Any],
        read: Callable[..., tuple[int, Any]],
    ) -> StoredItem:
        shape = tuple(fields["size"])
        properties = fields["properties"]
        dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.fields["dtype"]
        kind = dtype.text.removeprefix("torch.") if isinstance(dtype, Name) else str(dtype)
        unread = f"{name} has elements of {kind[:60]}, which zerokit does not read"
        require(kind in ELEMENT_BYTES, self.path, unread)
        stretches: list[Stretch] = []
        crcs = []
        chunks = sorted(
            (tuple(chunk.fields["offsets"]), tuple(chunk.fields["sizes"])) for chunk in fields["chunks"]
        )
        for offsets, sizes in chunks:
            if not math.prod(sizes):
                continue
            number, tensor = read(name, offsets)
            held = tensor if isinstance(tensor, StoredTensor) else None
            found = f"{held.dtype} {list(held.shape)}" if held else type(tensor).__name__
            expected = f"{kind} {list(sizes)}"
            file, what = self.files[number], f"{name} at {list(offsets)} is {found}, expected {expected}"
            require(found == expected, file, what)
            require(tensor.contiguous, file, f"{name} is not contiguous: save it contiguous")
            self.blobs.setdefault(number, []).append(tensor.blob)
            crcs.append(tensor.blob.crc)
            stretches.extend(
                Stretch(number, interval, tensor.offset + start * ELEMENT_BYTES[kind])
                for interval, start in rows(shape, offsets, sizes, f"{self.path}: {name}")
            )
        stretches.sort(key=lambda stretch: stretch.interval.start)
        return StoredItem(path, kind, shape, tuple(stretches), tuple(crcs), len(chunks))


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
    length, count = math.prod(sizes[inner:]), math.prod(sizes[:inner])
    if count > _MOST_ROWS:
        raise CheckpointError(
            f"{where}: a chunk of {list(sizes)} has {count} stretches, {_MOST_ROWS} are read"
        )
    strides = row_major(shape)
    corner = sum(start * stride for start, stride in zip(offsets, strides, strict=True))
    for number, indices in enumerate(product(*map(range, sizes[:inner]))):
        start = corner + sum(index * stride for index, stride in zip(indices, strides, strict=False))
        yield Interval(start, start + length), number * length
