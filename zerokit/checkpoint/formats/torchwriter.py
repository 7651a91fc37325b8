"""Writes files of `torch.save` without torch: a pickle, and storages that are copied, not decoded.

A file's size and every offset follow from its contents, so storages are copied to their places by a `Copier`. Their
checksums are known when that is done, and then the zip's headers and its directory are written around them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerokit.checkpoint.checksum import Piece, combine, crc32, damaged
from zerokit.checkpoint.copying import NOT_WRITTEN, Copier
from zerokit.checkpoint.disk import write_exactly
from zerokit.checkpoint.formats.checks import require
from zerokit.checkpoint.formats.pickles import Name, Persistent, Record, to_pickle
from zerokit.checkpoint.formats.torchfile import PRODUCER, STORAGES, Blob, StoredTensor, row_major
from zerokit.checkpoint.requests import Request, Target, requests_for
from zerokit.checkpoint.safetensors import ELEMENT_BYTES
from zerokit.checkpoint.small_floats import WITHOUT_TORCH
from zerokit.checkpoint.source import Source
from zerokit.errors import CheckpointError
from zerokit.layout import Interval

ALIGNMENT = 64
"""Bytes. Storages begin at multiples of it, as torch writes them."""

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR64 = struct.Struct("<4sIQI")
_MOST_32 = 0xFFFFFFFF
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}
_ZEROS = bytes(1 << 16)


@dataclass(frozen=True, slots=True)
class Part:
    """Elements of one of the source's streams, at byte `offset` of a storage."""

    stream: int
    name: str
    interval: Interval
    offset: int


@dataclass(eq=False, slots=True)
class NewStorage:
    """A storage of `size` bytes: `parts` of streams, bytes of the file `blob` of the source, or `content`.

    What no part fills is zeros.
    """

    dtype: str
    size: int
    parts: Sequence[Part] = ()
    blob: tuple[int, Blob] | None = None
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class NewTensor:
    """A tensor in a file to be written, `start` elements behind its storage's first."""

    storage: NewStorage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int = 0


@dataclass(slots=True)
class _Entry:
    name: str
    storage: NewStorage
    header_offset: int = 0
    data_offset: int = 0

    @property
    def size(self) -> int:
        return self.storage.size


@dataclass(slots=True)
class TorchFile:
    """A file to be written from byte `base` of a file on; `size` in bytes."""

    entries: list[_Entry]
    base: int
    size: int

    def copy(self, source: Source, copier: Copier, target: Target) -> None:
        requests: list[Request] = []
        for entry in self.entries:
            storage, at = entry.storage, entry.data_offset
            if storage.content is not None:
                write_exactly(target.fd, [storage.content], at, target.path)
            elif storage.blob is not None:
                number, blob = storage.blob
                requests.append(Request(_key(number, blob), number, blob.offset, blob.size, target, at))
            else:
                for part in storage.parts:
                    position = source.layout.positions[part.name]
                    requests += requests_for(
                        source, part.stream, position, part.interval, target, at + part.offset
                    )
        copier.copy(source, requests)

    def finish(self, source: Source, target: Target) -> None:
        """Write the zip's headers and its directory, once everything is copied.

        Raises `CheckpointError` where a storage that was copied whole is not what its own checksum says.
        """
        directory = bytearray()
        for entry in self.entries:
            crc = combine(_pieces(entry.storage, source, target)).crc
            local, central = _headers(entry, crc, self.base)
            write_exactly(target.fd, [local], entry.header_offset, target.path)
            directory += central
        start = self.entries[-1].data_offset + self.entries[-1].size
        tail = bytes(directory) + _end(len(self.entries), len(directory), start - self.base)
        write_exactly(target.fd, [tail], start, target.path)


def write_torch_files(source: Source, copier: Copier, path: Path, files: Sequence[TorchFile]) -> None:
    """Write a new file that holds these, one after the other."""
    target = copier.target(path, sum(file.size for file in files))
    for file in files:
        file.copy(source, copier, target)
    copier.drain()
    for file in files:
        file.finish(source, target)
    copier.release(target)


def plan_torch_file(
    value: Any, name: str, base: int = 0, *, source_file: int = 0, marked: bool = False
) -> TorchFile:
    """Lay out a file that holds `value` from byte `base` of a file on.

    Tensors are `NewTensor`s, or `StoredTensor`s of the source's file `source_file`, which stay as they are. `marked`:
    with an entry `PRODUCER`, by which zerokit knows it again; torch passes over it.
    """
    storages: dict[int, tuple[str, NewStorage]] = {}
    copied: dict[Blob, NewStorage] = {}
    written: dict[int, Record] = {}

    def stored(part: Any) -> Any:
        if not isinstance(part, NewTensor | StoredTensor):
            return part
        if id(part) not in written:
            written[id(part)] = rebuilt(part)
        return written[id(part)]

    def rebuilt(part: NewTensor | StoredTensor) -> Record:
        if isinstance(part, StoredTensor):  # tensors that share a storage still share it
            blob = part.blob
            storage = copied.setdefault(blob, NewStorage(part.dtype, blob.size, blob=(source_file, blob)))
            part = NewTensor(storage, part.shape, part.stride, part.start)
        key, storage = storages.setdefault(id(part.storage), (str(len(storages)), part.storage))
        if storage.dtype in WITHOUT_TORCH:
            raise CheckpointError(
                f"a tensor of {storage.dtype} cannot be written: torch has no such dtype; choose format='huggingface' "
                "or 'zerokit'"
            )
        known = _STORAGE_OF.get(storage.dtype)
        kind = Name(f"torch.{known}" if known else "torch.storage.UntypedStorage")
        numel = storage.size // ELEMENT_BYTES[storage.dtype] if known else storage.size
        identity = Persistent(("storage", kind, key, "cpu", numel))
        args = (identity, part.start, part.shape, part.stride, False, Record("collections.OrderedDict"))
        if known:
            return Record("torch._utils._rebuild_tensor_v2", args)
        return Record("torch._utils._rebuild_tensor_v3", (*args, Name(f"torch.{storage.dtype}")))

    pickle = to_pickle(value, stored)
    entries = [
        _Entry(f"{name}/data.pkl", held("uint8", pickle)),
        _Entry(f"{name}/byteorder", held("uint8", b"little")),
        *(_Entry(f"{name}/data/{key}", storage) for key, storage in storages.values()),
        _Entry(f"{name}/version", held("uint8", b"3\n")),
        *([_Entry(f"{name}/{PRODUCER}", held("uint8", b"zerokit"))] if marked else []),
    ]
    position = base
    for entry in entries:
        entry.header_offset = position
        # The extra field without alignment: sizes over 4 GiB have one of their own.
        extra = 4 + (20 if entry.size >= _MOST_32 else 0)
        end = position + _LOCAL.size + len(entry.name) + extra
        entry.data_offset = base + -(-(end - base) // ALIGNMENT) * ALIGNMENT
        position = entry.data_offset + entry.size
    # The directory's size does not depend on checksums.
    directory = sum(len(_headers(entry, 0, base)[1]) for entry in entries)
    return TorchFile(
        entries, base, position + directory + len(_end(len(entries), directory, position - base)) - base
    )


def held(dtype: str, content: bytes) -> NewStorage:
    """A storage of bytes in memory."""
    return NewStorage(dtype, len(content), content=content)


def whole(dtype: str, shape: tuple[int, ...], content: bytes) -> NewTensor:
    """A contiguous tensor of bytes in memory."""
    return NewTensor(held(dtype, content), shape, row_major(shape))


def flat(dtype: str, numel: int, parts: Sequence[Part]) -> NewTensor:
    """A tensor [numel] with a storage of its own."""
    return NewTensor(NewStorage(dtype, numel * ELEMENT_BYTES[dtype], parts), (numel,), (1,))


def _key(number: int, blob: Blob) -> str:
    return f"{number}@{blob.offset}"


def _pieces(storage: NewStorage, source: Source, target: Target) -> Iterator[Piece]:
    """What a storage consists of, in order, zeros between its parts included."""
    if storage.content is not None:
        yield Piece(crc32(storage.content), storage.size)
        return
    if storage.blob is not None and storage.size:
        number, blob = storage.blob
        piece = target.pieces.whole[_key(number, blob)]
        fault = (
            f"bytes {blob.offset} to {blob.offset + blob.size}: {damaged(piece.crc, blob.crc)}{NOT_WRITTEN}"
        )
        require(piece.crc == blob.crc, source.file_path(number), fault)
        yield piece
        return
    end = 0
    for part in sorted(storage.parts, key=lambda part: part.offset):
        yield from _zeros(part.offset - end)
        end = part.offset
        position = source.layout.positions[part.name]
        copied = dict(target.pieces.parts(part.stream, position))
        for stretch in source.locate(part.stream, position, part.interval):
            piece = copied[stretch.interval.start]
            yield piece
            end += piece.size
    yield from _zeros(storage.size - end)


def _zeros(size: int) -> Iterator[Piece]:
    while size > 0:
        part = min(size, len(_ZEROS))
        yield Piece(crc32(memoryview(_ZEROS)[:part]), part)
        size -= part


def _headers(entry: _Entry, crc: int, base: int) -> tuple[bytes, bytes]:
    """An entry's local header, up to its data, and its entry of the directory."""
    name = entry.name.encode()
    large = entry.size >= _MOST_32
    offset = entry.header_offset - base
    size = _MOST_32 if large else entry.size
    extra = struct.pack("<HHQQ", 1, 16, entry.size, entry.size) if large else b""
    room = entry.data_offset - entry.header_offset - _LOCAL.size - len(name) - len(extra)
    padding = b"FB" + struct.pack("<H", room - 4) + b"Z" * (room - 4)  # as torch pads to an alignment
    version = 45 if large else 20
    common = (version, 0, 0, 0, 0x21, crc, size, size, len(name))
    local = _LOCAL.pack(b"PK\x03\x04", *common, len(extra) + len(padding))
    far = offset >= _MOST_32
    numbers = ([entry.size, entry.size] if large else []) + ([offset] if far else [])
    wide = struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
    near = _MOST_32 if far else offset
    central = _CENTRAL.pack(b"PK\x01\x02", version, *common, len(wide), 0, 0, 0, 0, near)
    return local + name + extra + padding, central + name + wide


def _end(count: int, size: int, offset: int) -> bytes:
    """The end of the directory; in its 64-bit form too, which torch's reader takes at any size."""
    end64 = _END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)
    locator = _LOCATOR64.pack(b"PK\x06\x07", 0, offset + size, 1)
    few, small, near = min(count, 0xFFFF), min(size, _MOST_32), min(offset, _MOST_32)
    return end64 + locator + _END.pack(b"PK\x05\x06", 0, 0, few, few, small, near, 0)
