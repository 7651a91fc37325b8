"""Folders of Hugging Face's: weights in safetensors, in one file or several with an index, whole or sharded by DCP.

    DIR/model.safetensors
    DIR/model-00001-of-00003.safetensors …  DIR/model.safetensors.index.json
    DIR/shard-00001-model-00001-of-00001.safetensors …    DCP's HuggingFaceStorageWriter: pieces of tensors a rank

The format has no checksums: what is read cannot be verified.
"""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.disk import opened, read_whole
from zerokit.checkpoint.extents import ELEMENT_BYTES
from zerokit.checkpoint.formats.dcp import rows
from zerokit.checkpoint.formats.foreign import (
    PARAM,
    Description,
    ForeignCheckpoint,
    StoredParameter,
    StoredStream,
    reading,
    whole,
)
from zerokit.checkpoint.header import Header, Tensor
from zerokit.checkpoint.manifest import NAME
from zerokit.checkpoint.reader import read_header
from zerokit.checkpoint.source import StoredBuffer, Stretch
from zerokit.checkpoint.strict import parse_json
from zerokit.errors import CheckpointError
from zerokit.layout import Parameter

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_SHARD = re.compile(r"shard-(\d+)-.*\.safetensors")
_SHARDING = "DCP_SHARDING_INFO"


def recognises(path: Path) -> bool:
    """Whether `path` is such a folder, or a single file of weights."""
    if path.is_file():
        return path.suffix == ".safetensors"
    return path.is_dir() and not (path / NAME).exists() and bool(_files(path))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if (path / INDEX).is_file():
        named: Any = parse_json(read_whole(path / INDEX)).get("weight_map", {})
        names = sorted(set(named.values()))
        if any(not isinstance(name, str) or "/" in name for name in names):
            raise CheckpointError(f"{path / INDEX}: names a file outside the folder")
        return [path / name for name in names]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    return sorted(entry for entry in path.iterdir() if _SHARD.fullmatch(entry.name))


def read(path: Path) -> ForeignCheckpoint:
    """The weights at `path`. Raises `CheckpointError` for what is damaged or missing."""
    with reading(path):
        files = _files(path)
        headers = [_header(file) for file in files]
        sharded = any(_SHARDING in header.metadata for header in headers)
        stored = _sharded(path, headers) if sharded else _whole(path, headers)
    parameters, buffers = [], {}
    for name, (dtype, shape, stretches) in stored.items():
        if dtype.startswith(("float", "bfloat")) or not stretches:
            parameter = Parameter(name, shape, dtype, trainable=False)
            parameters.append(StoredParameter(parameter, {PARAM: StoredStream(dtype, stretches)}))
        else:
            size = math.prod(shape) * ELEMENT_BYTES[dtype]
            place = stretches[0]
            buffers[name] = StoredBuffer(dtype, shape, files[place.file], place.offset, size)
    identity = 0
    for file, header in zip(files, headers, strict=True):
        identity = crc32(repr((file.name, header)).encode(), identity)
    return ForeignCheckpoint(
        Description(
            format="huggingface",
            path=path,
            step=0,
            world=1,
            files=files,
            parameters=parameters,
            buffers=buffers,
            groups=None,
            identity=identity,
        )
    )


def _header(file: Path) -> Header:
    with opened(file) as fd:
        return read_header(fd, os.fstat(fd).st_size, file)


_Stored = tuple[str, tuple[int, ...], tuple[Stretch, ...]]


def _whole(path: Path, headers: list[Header]) -> dict[str, _Stored]:
    """Tensors that are whole, in the order of their data."""
    stored: dict[str, _Stored] = {}
    for number, header in enumerate(headers):
        for name, tensor in header.tensors.items():
            if name in stored:
                raise CheckpointError(f"{path}: {name} is in two files")
            stretches = whole(math.prod(tensor.shape), number, tensor.offset)
            stored[name] = tensor.dtype, tensor.shape, stretches
    return stored


def _sharded(path: Path, headers: list[Header]) -> dict[str, _Stored]:
    """Tensors of which each file has a piece."""
    pieces: dict[str, list[tuple[tuple[int, ...], int, Tensor]]] = {}
    for number, header in enumerate(headers):
        placed = parse_json(header.metadata[_SHARDING].encode())
        for name, tensor in header.tensors.items():
            offsets = tuple(placed[name]["saved_offsets"])
            if len(offsets) != len(tensor.shape) or not all(type(n) is int and n >= 0 for n in offsets):
                raise CheckpointError(f"{path}: {name} is placed at {str(offsets)[:60]}")
            pieces.setdefault(name, []).append((offsets, number, tensor))
    stored: dict[str, _Stored] = {}
    for name, held in pieces.items():
        shape = tuple(
            max(offsets[i] + tensor.shape[i] for offsets, _, tensor in held) for i in range(len(held[0][0]))
        )
        stretches: dict[int, Stretch] = {}
        for offsets, number, tensor in held:
            if not math.prod(tensor.shape):
                continue
            width = ELEMENT_BYTES[tensor.dtype]
            for interval, start in rows(shape, offsets, tensor.shape, f"{path}: {name}"):
                # A replicated tensor is written by several ranks: one of them is enough.
                stretches.setdefault(interval.start, Stretch(number, interval, tensor.offset + start * width))
        ordered = tuple(stretches[start] for start in sorted(stretches))
        stored[name] = held[0][2].dtype, shape, ordered
    return stored
