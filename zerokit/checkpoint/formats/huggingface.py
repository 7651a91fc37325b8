"""Hugging Face folders: safetensors weights in one file or several with an index, whole or sharded by DCP.

    DIR/model.safetensors
    DIR/model-00001-of-00003.safetensors …  DIR/model.safetensors.index.json
    DIR/shard-00001-model-00001-of-00001.safetensors …    DCP's HuggingFaceStorageWriter: pieces of tensors a rank

The format has no checksums: what is read cannot be verified.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.disk import read_whole
from zerokit.checkpoint.formats import description
from zerokit.checkpoint.formats.dcp_items import rows
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.manifest import NAME
from zerokit.checkpoint.safetensors import ELEMENT_BYTES, Header, Tensor, read_header
from zerokit.checkpoint.source import Stretch
from zerokit.checkpoint.strict import member, parse_json, typed
from zerokit.errors import CheckpointError
from zerokit.layout import Parameter

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_SHARD = re.compile(r"shard-(\d+)-.*\.safetensors")
_UNREAD = {
    "adapter_model.safetensors": "an adapter of PEFT: merge it into its base first, with merge_and_unload()",
    "adapter_model.bin": "an adapter of PEFT: merge it into its base first, with merge_and_unload()",
    "pytorch_model.bin": "weights in a pickle: save them with save_pretrained, as safetensors",
    "pytorch_model.bin.index.json": "weights in pickles: save them with save_pretrained, as safetensors",
}
_SHARDING = "DCP_SHARDING_INFO"


def recognises(path: Path) -> bool:
    """Whether `path` is such a folder, or a single file of weights."""
    if path.is_file():
        return path.suffix == ".safetensors"
    if not path.is_dir() or (path / NAME).exists():
        return False
    known = (INDEX, SINGLE, *_UNREAD)
    return any((path / name).is_file() for name in known) or bool(_shards(path))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    # First, as in transformers, whose save_pretrained leaves an older index beside it.
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if (path / INDEX).is_file():
        names = sorted(set(weight_map(path / INDEX).values()))
        for name in names:
            if "/" in name or not name.endswith(".safetensors"):
                raise CheckpointError(
                    f"{path / INDEX}: names {name[:200]!r}, expected a safetensors file beside it"
                )
        return [path / name for name in names]
    return _shards(path)


def _shards(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if _SHARD.fullmatch(entry.name))


def weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor, by an index. Raises `CheckpointError`."""
    try:
        named = member(typed(parse_json(read_whole(index)), dict, "it"), "weight_map", dict)
        if not named or not all(isinstance(name, str) for name in named.values()):
            raise ValueError("its weight_map names no files")
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{index}: not an index of weights: {error}") from None
    return named


def _check_index(path: Path, files: list[Path], headers: list[Header]) -> None:
    """Raises `CheckpointError` unless every tensor is where the index says, and there is no other."""
    named = weight_map(path / INDEX)
    found = {name: file.name for file, header in zip(files, headers, strict=True) for name in header.tensors}
    for name in sorted(named.keys() | found.keys()):
        if named.get(name) != found.get(name):
            raise CheckpointError(
                f"{path / INDEX}: says that {name[:200]!r} is in {named.get(name, 'no file')}, but it is in "
                f"{found.get(name, 'none of its files')}: files of several saves may be mixed"
            )


def read(path: Path) -> ForeignCheckpoint:
    """Read the weights at `path`. Raises `CheckpointError` for damaged or missing data."""
    with description.reading(path):
        files = _files(path)
        unread = [name for name in _UNREAD if (path / name).is_file()]
        if not files and unread:
            raise CheckpointError(f"{path}: only {unread[0]}, {_UNREAD[unread[0]]}")
        headers = [read_header(file) for file in files]
        if not (path.is_file() or (path / SINGLE).is_file()) and (path / INDEX).is_file():
            _check_index(path, files, headers)
        sharded = any(_SHARDING in header.metadata for header in headers)
        stored = _sharded(path, headers) if sharded else _whole(path, headers)
    parameters, buffers = [], {}
    for name, (dtype, shape, stretches) in stored.items():
        size = math.prod(shape) * ELEMENT_BYTES[dtype]
        stream = description.StoredStream(dtype, stretches)
        # A buffer lies in one place.
        if dtype.startswith(("float", "bfloat")) or len(stretches) != 1 or size > description.LARGEST_BUFFER:
            parameter = Parameter(name, shape, dtype, trainable=False)
            parameters.append(description.StoredParameter(parameter, {description.PARAM: stream}))
        else:
            buffers[name] = description.as_buffer(stream, shape, files)
    identity = 0
    for file, header in zip(files, headers, strict=True):
        identity = crc32(repr((file.name, header)).encode(), identity)
    return ForeignCheckpoint(
        description.Description(
            format="huggingface",
            path=path,
            step=0,
            world=1,
            files=files,
            parameters=parameters,
            buffers=buffers,
            groups=None,
            identity=identity,
            dropped=description.beside(path) if path.is_dir() else [],
        )
    )


_Stored = tuple[str, tuple[int, ...], tuple[Stretch, ...]]


def _whole(path: Path, headers: list[Header]) -> dict[str, _Stored]:
    stored: dict[str, _Stored] = {}
    for number, header in enumerate(headers):
        for name, tensor in header.tensors.items():
            if name in stored:
                raise CheckpointError(f"{path}: {name} is in two files")
            stretches = description.whole(math.prod(tensor.shape), number, tensor.offset)
            stored[name] = tensor.dtype, tensor.shape, stretches
    return stored


def _sharded(path: Path, headers: list[Header]) -> dict[str, _Stored]:
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
            if tensor.dtype != held[0][2].dtype:
                raise CheckpointError(
                    f"{path}: {name} is {held[0][2].dtype} in one file, {tensor.dtype} in another"
                )
            if not math.prod(tensor.shape):
                continue
            width = ELEMENT_BYTES[tensor.dtype]
            for interval, start in rows(shape, offsets, tensor.shape, f"{path}: {name}"):
                # A replicated tensor is written by several ranks: one of them is enough.
                stretches.setdefault(interval.start, Stretch(number, interval, tensor.offset + start * width))
        ordered = tuple(stretches[start] for start in sorted(stretches))
        stored[name] = held[0][2].dtype, shape, ordered
    return stored
