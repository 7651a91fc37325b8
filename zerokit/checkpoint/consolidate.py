"""A checkpoint's weights as a folder that Hugging Face's loaders take: whole tensors in `model*.safetensors`.

Trainable parameters come from their masters, frozen ones and buffers as they are. Where the dtype stays the same,
bytes are copied; where it changes, they pass through numpy, one buffer at a time. All that is read is verified.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from pathlib import Path

from zerokit import __version__
from zerokit.checkpoint.conversion import Work, converting
from zerokit.checkpoint.copying import Conversion, Copier, Progress
from zerokit.checkpoint.disk import opened, write_exactly, write_file
from zerokit.checkpoint.extents import ELEMENT_BYTES, SAFETENSORS_NAMES, encode_header
from zerokit.checkpoint.formats import open_source
from zerokit.checkpoint.header import METADATA
from zerokit.checkpoint.journal import Request
from zerokit.checkpoint.like import check_like, copied_names, copy_like, require_like
from zerokit.checkpoint.manifest import BUFFER_PREFIX
from zerokit.checkpoint.plan import Key
from zerokit.checkpoint.recognise import PRODUCER, foreign_to_weights
from zerokit.checkpoint.slices import Want, check_copied, copy_elements
from zerokit.checkpoint.source import Source
from zerokit.checkpoint.staging import require_apart
from zerokit.errors import CheckpointError, UsageError
from zerokit.layout import Interval

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
DEFAULT_SHARD_SIZE = "5GB"

_FLOATING = ("float64", "float32", "bfloat16", "float16")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?B?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the output. `stream` is the number of the one that it comes from; buffers come from `common`."""

    name: str
    shape: tuple[int, ...]
    numel: int
    source_dtype: str
    dtype: str
    stream: int | None

    @property
    def source_size(self) -> int:
        return self.numel * ELEMENT_BYTES[self.source_dtype]

    @property
    def size(self) -> int:
        """Bytes in the output."""
        return self.numel * ELEMENT_BYTES[self.dtype]


def consolidate(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    stream: str = "master",
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    like: str | os.PathLike[str] | None = None,
    force: bool = False,
    resume: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Path:
    """Write the weights and buffers of `source` as `model.safetensors`, or as several with an index.

    Of tied parameters only the first name is written, as `save_pretrained` does: loaders tie them again.

    Args:
        source: the directory of a step, or of a run, whose newest step is taken.
        output: a directory that does not exist yet.
        dtype: "bf16", "fp16" or "fp32" for everything that is floating-point; by default each parameter's own dtype in
            the model that was saved, and the buffers' own.
        stream: what is taken as the trainable parameters: "master", or "ema" for the average that `zerokit.Ema` kept.
        max_shard_size: largest size of the tensors in one file, in bytes or such as "5GB" (10^9) or "5GiB" (2^30);
            a single tensor that is larger has a file of its own.
        like: a folder that `from_pretrained` takes, such as the one that the training began with: its configuration,
            tokenizer and similar files are copied, so that `from_pretrained(output)` works. Where it has weights
            or their index, names and shapes must be those of `source`.
        force: replace an existing output.
        resume: take over the files that a killed one of the same output, source and arguments has finished. Without it
            such a one stays where it is, and a `ZerokitWarning` names it, until one to the same output succeeds.
        jobs: threads that copy; up to four by default.
        progress: called with the bytes copied and the bytes in all, often; what it raises ends the work.

    Returns the output. Raises `UsageError` for an unknown dtype or size or a stream that is not there, and
    `CheckpointError` if the source is damaged or no checkpoint, `like` is of another model, a value does not fit the
    dtype, or the output cannot be written; there is no output then, or it is as before.
    """
    return write_weights(
        open_source(source),
        output,
        dtype=dtype,
        stream=stream,
        max_shard_size=max_shard_size,
        like=like,
        force=force,
        resume=resume,
        jobs=jobs,
        progress=progress,
    )


def write_weights(
    checkpoint: Source,
    output: str | os.PathLike[str],
    *,
    dtype: str | None,
    stream: str,
    max_shard_size: int | str,
    like: str | os.PathLike[str] | None,
    force: bool,
    resume: bool,
    jobs: int | None,
    progress: Progress | None,
) -> Path:
    """Write the weights of any source. Arguments and errors as of `consolidate`."""
    if dtype is not None and dtype not in DTYPES:
        raise UsageError(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
    limit = parse_size(max_shard_size)
    checkpoint.warn()
    target = Path(output)
    model = None if like is None else Path(like)
    for other in (checkpoint.path, *([] if model is None else [model])):
        require_apart(other, target)
    tensors = list(_tensors(checkpoint, DTYPES.get(dtype or ""), stream))
    if model is not None:
        require_like(model)
        check_like(
            model,
            {tensor.name: tensor.shape for tensor in tensors},
            {
                alias: parameter.name
                for parameter in checkpoint.layout.parameters
                for alias in parameter.aliases
            },
        )
    renewed = set() if model is None else copied_names(model)
    request = Request(
        target.name,
        checkpoint.manifest_crc,
        {
            "command": "consolidate",
            "zerokit": __version__,
            "dtype": dtype,
            "stream": stream,
            "max_shard_size": limit,
            "like": None if model is None else str(model.resolve()),
        },
    )
    foreign = partial(foreign_to_weights, renewed=renewed)
    with converting(target, request, resume=resume, force=force, foreign=foreign) as work:
        if model is not None:
            copy_like(model, work.path)
        _write(checkpoint, list(_shards(tensors, limit)), work, jobs, progress)
    return target


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
    held = {
        position: number
        for number, stream in enumerate(checkpoint.streams)
        if stream.kind in (weights, "param")
        for position in stream.parameters
    }
    absent = [p.name for position, p in enumerate(checkpoint.layout.parameters) if position not in held]
    if absent:
        kinds = ", ".join(sorted({stream.kind for stream in checkpoint.streams} - {"param"}))
        raise UsageError(
            f"{checkpoint.path}: stream {weights!r} has no {absent[0]}: expected one of {kinds}; an average is there "
            "only if zerokit.Ema kept one"
        )

    def tensor(name: str, shape: tuple[int, ...], source: str, own: str, stream: int | None) -> _Tensor:
        wanted = dtype if dtype is not None and source in _FLOATING else own
        if wanted != source and not (wanted in _FLOATING and source in _FLOATING):
            raise CheckpointError(
                f"{checkpoint.path}: {name} is stored as {source} and cannot be written as {wanted}, its dtype in the "
                "model: choose a dtype"
            )
        if name in seen:
            raise CheckpointError(
                f"{checkpoint.path}: no tensor can be written as {name!r}: that name is taken"
            )
        seen.add(name)
        return _Tensor(name, shape, math.prod(shape), source, wanted, stream)

    for position, parameter in enumerate(checkpoint.layout.parameters):
        number = held[position]
        yield tensor(
            parameter.name, parameter.shape, checkpoint.streams[number].dtype, parameter.dtype, number
        )
    for name, buffer in checkpoint.buffers.items():
        yield tensor(name, buffer.shape, buffer.dtype, buffer.dtype, None)


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


def _write(
    source: Source,
    shards: Sequence[Sequence[_Tensor]],
    work: Work,
    jobs: int | None,
    progress: Progress | None,
) -> None:
    names = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    total = sum(tensor.source_size for shard in shards for tensor in shard)
    with Copier[Key](jobs=jobs, total=total, progress=progress, synced=work.journal.note) as copier:
        copier.take_over(work.pieces)
        for name, shard in zip(names, shards, strict=True):
            _write_shard(source, copier, work, work.path / name, shard)
    check_copied(source, copier.pieces)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.size for shard in shards for tensor in shard)},
            "weight_map": {
                tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard
            },
        }
        text = json.dumps(index, indent=2, sort_keys=True, ensure_ascii=False)
        write_file(work.path / "model.safetensors.index.json", f"{text}\n".encode())


def _write_shard(
    source: Source, copier: Copier[Key], work: Work, path: Path, shard: Iterable[_Tensor]
) -> None:
    # Wide elements first, so that each tensor starts at a multiple of its element size.
    ordered = sorted(shard, key=lambda tensor: -ELEMENT_BYTES[tensor.dtype])
    # transformers refuses a file without the format; the producer marks an output of zerokit's.
    entries: dict[str, object] = {METADATA: {"format": "pt", "producer": PRODUCER}}
    position = 0
    for tensor in ordered:
        entries[tensor.name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.size],
        }
        position += tensor.size
    header = encode_header(entries)
    if work.has(path, len(header) + position):
        return
    target = copier.target(path, len(header) + position)
    write_exactly(target.fd, [header], 0, path)
    wants, whole = [], []
    position = len(header)
    for tensor in ordered:
        if tensor.stream is None:
            whole.append((tensor, position))
        else:
            wants.append(
                Want(
                    tensor.stream,
                    source.layout.positions[tensor.name],
                    tensor.name,
                    Interval(0, tensor.numel),
                    position,
                    _conversion(tensor),
                )
            )
        position += tensor.size
    copy_elements(source, copier, wants, target)
    if whole:
        buffers = source.buffers
        for tensor, offset in whole:
            buffer = buffers[tensor.name]
            file = copier.source(buffer.path, opened(buffer.path))
            key = BUFFER_PREFIX + tensor.name
            copier.copy(key, buffer.size, file, buffer.offset, target, offset, _conversion(tensor))
            copier.release(file)
    copier.release(target)


def _conversion(tensor: _Tensor) -> Conversion | None:
    if tensor.dtype == tensor.source_dtype:
        return None

    def convert(view: memoryview) -> memoryview:
        from zerokit.checkpoint.arrays import from_array, to_array

        try:
            return from_array(to_array(view, tensor.source_dtype, (-1,)), tensor.dtype)
        except OverflowError as error:
            raise CheckpointError(f"{tensor.name}: {error}: choose a wider dtype") from None

    return Conversion(convert, ELEMENT_BYTES[tensor.source_dtype], ELEMENT_BYTES[tensor.dtype])
