"""A checkpoint's weights as a folder for Hugging Face's loaders: whole tensors in `model*.safetensors`.

Trainable parameters come from their masters, frozen ones and buffers as they are. Where the dtype stays the same,
bytes are copied; where it changes, they pass through numpy, one buffer at a time. All that is read is verified.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path

from zerokit.checkpoint.copying import Copier, Options, converting
from zerokit.checkpoint.disk import (
    despite_damage,
    entries_of,
    is_kind,
    make_directory,
    read_whole,
    sync_directory,
    write_exactly,
    write_file,
)
from zerokit.checkpoint.formats.checks import require
from zerokit.checkpoint.formats.huggingface import INDEX, files_like, require_no_adapter
from zerokit.checkpoint.manifest import BUFFER_PREFIX
from zerokit.checkpoint.prune import named
from zerokit.checkpoint.requests import Conversion, Request, requests_for
from zerokit.checkpoint.safetensors import ELEMENT_BYTES, METADATA, lay_out, read_header
from zerokit.checkpoint.source import Source, to_array
from zerokit.checkpoint.staging import require_apart
from zerokit.errors import CheckpointError, UsageError
from zerokit.files import path_of
from zerokit.layout import Interval

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DEFAULT_SHARD_SIZE = "5GB"

_PRODUCER = "zerokit"
"""The member "producer" in the metadata of consolidated weights."""

_OWN = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
_FLOATING = ("float64", "float32", "bfloat16", "float16")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?B?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the output. `stream` is the number of the one that it comes from; buffers come from `common`."""

    name: str
    shape: tuple[int, ...]
    source_dtype: str
    dtype: str
    stream: int | None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        return self.numel * ELEMENT_BYTES[self.dtype]


def write_weights(
    source: Source,
    target: Path,
    options: Options,
    dtype: str | None,
    stream: str,
    max_shard_size: int | str,
    like: str | os.PathLike[str] | None,
) -> tuple[str, ...]:
    """Write the weights of any source; arguments and errors are those of `convert`.

    Returns the dtypes of the floating-point tensors, the one with the most elements first.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
    limit = parse_size(max_shard_size)
    model = None if like is None else path_of(like)
    tensors = list(_tensors(source, DTYPES.get(dtype or ""), stream))
    beside: dict[str, Path] = {}
    if model is not None:
        require_apart(model, target)
        beside = files_like(model)
        require_no_adapter(tensor.name for tensor in tensors)
    with converting(source, target, options, partial(_foreign, renewed=beside)) as work:
        folders = {(work / name).parent for name in beside} - {work}
        for folder in folders:
            make_directory(folder)
        for name, path in beside.items():
            write_file(work / name, read_whole(path))
        for folder in folders:
            sync_directory(folder)
        _write(source, list(_shards(tensors, limit)), work, options)
    elements = Counter[str]()
    for tensor in tensors:
        if tensor.dtype in _FLOATING:
            elements[tensor.dtype] += tensor.numel
    return tuple(name for name, _ in elements.most_common())


def parse_size(size: int | str) -> int:
    """Bytes of 1000, "300MB", "5GB" (10^9) or "5GiB" (2^30). Raises `UsageError` for anything else, or less than 1."""
    match = _SIZE.fullmatch(str(size))
    number = 0
    if match is not None:
        base = 1024 if match[3] else 1000
        number = int(Decimal(match[1]) * base ** (" KMGT".index((match[2] or " ").upper())))
    if number < 1:
        raise UsageError(f"size {size!r}: expected a number of bytes, or such as 300MB, 5GB or 5GiB")
    return number


def _tensors(checkpoint: Source, dtype: str | None, weights: str) -> Iterator[_Tensor]:
    """Every parameter once, in the order of the line, then the buffers; trainable ones from the stream `weights`."""
    seen = {METADATA}
    numbers = checkpoint.manifest.numbers
    held = {position: number for (kind, position), number in numbers.items() if kind in (weights, "param")}
    absent = [p.name for position, p in enumerate(checkpoint.layout.parameters) if position not in held]
    if absent:
        kinds = ", ".join(sorted({stream.kind for stream in checkpoint.streams} - {"param"}))
        raise UsageError(
            f"{checkpoint.path}: stream {weights!r} has no {absent[0]}: expected one of {kinds}; an average "
            "exists only if zerokit.Ema kept one"
        )
    coded = [p for p, number in held.items() if checkpoint.manifest.scales(number, p) is not None]
    if coded or any(checkpoint.streams[number].block > 1 for number in held.values()):
        raise UsageError(
            f"{checkpoint.path}: stream {weights!r} is codes of a state, or scales: expected weights or an average"
        )
    parameters = (
        (p.name, p.shape, checkpoint.streams[held[position]].dtype, p.dtype, held[position])
        for position, p in enumerate(checkpoint.layout.parameters)
    )
    buffers = ((name, shape, kind, kind, None) for name, (kind, shape) in checkpoint.buffers.items())
    for name, shape, source, own, stream in (*parameters, *buffers):
        wanted = dtype if dtype is not None and source in _FLOATING else own
        change = f"{name} is stored as {source} and cannot be written as {wanted}, its dtype in the model"
        floating = wanted in _FLOATING and source in _FLOATING
        require(wanted == source or floating, checkpoint.path, f"{change}: choose a dtype")
        taken = f"no tensor can be written as {name!r}: that name is taken"
        require(name not in seen, checkpoint.path, taken)
        seen.add(name)
        yield _Tensor(name, shape, source, wanted, stream)


def _shards(tensors: Iterable[_Tensor], limit: int) -> Iterator[list[_Tensor]]:
    """Neighbours together while they fit; at least one shard."""
    shard: list[_Tensor] = []
    size = 0
    for tensor in tensors:
        if shard and size + tensor.size > limit:
            yield shard
            shard, size = [], 0
        shard.append(tensor)
        size += tensor.size
    yield shard


def _write(source: Source, shards: Sequence[Sequence[_Tensor]], work: Path, options: Options) -> None:
    names = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    total = sum(tensor.numel * ELEMENT_BYTES[tensor.source_dtype] for shard in shards for tensor in shard)
    with options.copying(source, total) as copier:
        for name, shard in zip(names, shards, strict=True):
            _write_shard(source, copier, work / name, shard)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.size for shard in shards for tensor in shard)},
            "weight_map": {
                tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
            },
        }
        text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False)
        write_file(work / INDEX, f"{text}\n".encode())


def _write_shard(source: Source, copier: Copier, path: Path, shard: Iterable[_Tensor]) -> None:
    # Wide elements first, so that each tensor starts at a multiple of its element size.
    ordered = sorted(shard, key=lambda tensor: -ELEMENT_BYTES[tensor.dtype])
    header, offsets = lay_out(
        ((tensor.name, tensor.dtype, tensor.shape) for tensor in ordered),
        # transformers refuses a file without the format; the producer marks an output of zerokit's.
        {"format": "pt", "producer": _PRODUCER},
    )
    target = copier.target(path, offsets[-1])
    write_exactly(target.fd, [header], 0, path)

    def requests() -> Iterator[Request]:
        for tensor, at in zip(ordered, offsets, strict=False):
            conversion = _conversion(tensor)
            if tensor.stream is None:
                file, offset = source.common_place(BUFFER_PREFIX + tensor.name)
                size = tensor.numel * ELEMENT_BYTES[tensor.source_dtype]
                yield Request(BUFFER_PREFIX + tensor.name, file, offset, size, target, at, conversion)
            else:
                position, every = source.layout.positions[tensor.name], Interval(0, tensor.numel)
                yield from requests_for(source, tensor.stream, position, every, target, at, conversion)

    copier.copy(source, requests())
    copier.release(target)


def _conversion(tensor: _Tensor) -> Conversion | None:
    if tensor.dtype == tensor.source_dtype:
        return None

    def convert(view: memoryview) -> memoryview:
        from zerokit.checkpoint.source import from_array

        try:
            return from_array(to_array(view, tensor.source_dtype, (-1,)), tensor.dtype)
        except OverflowError as error:
            raise CheckpointError(f"{tensor.name}: {error}: choose a wider dtype") from None

    return Conversion(convert, ELEMENT_BYTES[tensor.source_dtype], ELEMENT_BYTES[tensor.dtype])


def _foreign(folder: Path, renewed: Collection[str]) -> str:
    """Beside consolidated weights and what the new output will have as well: paths in the folder."""
    folders = {path.split("/")[0] for path in renewed if "/" in path}
    weights = False
    for entry in entries_of(folder):
        if _OWN.fullmatch(entry.name):
            weights = True
            if not _consolidated(Path(entry.path)):
                return f"{named(entry)} of another program"
        elif entry.name in folders and is_kind(entry, stat.S_ISDIR):
            for inner in entries_of(Path(entry.path)):
                if f"{entry.name}/{inner.name}" not in renewed:
                    return f"{named(inner)} in {entry.name}"
        elif entry.name != INDEX and entry.name not in renewed:
            return named(entry)
    return "" if weights else "no weights of zerokit's"


def _consolidated(path: Path) -> bool:
    with despite_damage():
        return read_header(path).metadata.get("producer") == _PRODUCER
    return False
