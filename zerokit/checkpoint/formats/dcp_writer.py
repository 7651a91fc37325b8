"""Writes a checkpoint for torch.distributed.checkpoint: `dcp.load` reads it into an FSDP2 model of any world size.

Names are those of torch's own tutorial: `model.NAME`, `optim.state.NAME.KIND` and `optim.param_groups.I.OPTION`, so
that `{"model": …, "optim": …}` of `get_state_dict` loads it. Every tensor is cut along its first dimension as FSDP2
cuts it, rank by rank; tied names share their bytes.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerokit.checkpoint.copying import Options, converting
from zerokit.checkpoint.disk import despite_damage, explained, opened, write_file
from zerokit.checkpoint.extra import GENERATOR_PREFIX, LOCAL_STEPS
from zerokit.checkpoint.formats import torchwriter
from zerokit.checkpoint.formats.dcp_items import METADATA
from zerokit.checkpoint.formats.description import plain_value
from zerokit.checkpoint.formats.pickles import Name, Record, Size, to_pickle
from zerokit.checkpoint.formats.torchfile import row_major
from zerokit.checkpoint.manifest import BUFFER_PREFIX, WEIGHT_KINDS
from zerokit.checkpoint.prune import foreign_to
from zerokit.checkpoint.safetensors import ELEMENT_BYTES
from zerokit.checkpoint.source import Source
from zerokit.checkpoint.uncut import read_uncut
from zerokit.errors import UsageError, ZerokitWarning
from zerokit.layout import Interval

_FILE = re.compile(r"\.metadata|__\d+_\d+\.distcp")
_MODULE = "torch.distributed.checkpoint"
_BEGIN = b"\x80\x02c" + _MODULE.encode() + b".metadata\nMetadata\n"
"""How zerokit's metadata begins. torch pickles it with a newer protocol."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Rank `rank`'s part of a tensor, whose first element is at `offsets` in it; or a value."""

    content: Any
    rank: int = 0
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor, or a value where there is no `dtype`, at `paths` in the state dict."""

    paths: Sequence[tuple[Any, ...]]
    chunks: Sequence[_Chunk]
    dtype: str = ""
    shape: tuple[int, ...] = ()

    def described(self) -> Record:
        if not self.dtype:
            return _new("metadata.BytesStorageMetadata", {})
        properties = (
            Name(f"torch.{self.dtype}"),
            Record("torch.serialization._get_layout", ("torch.strided",)),
            False,
            Record(f"{_MODULE}.metadata._MEM_FORMAT_ENCODING", (0,)),
            False,
        )
        places = [(Size(chunk.offsets), Size(chunk.content.shape)) for chunk in self.chunks]
        fields = {
            "properties": Record(f"{_MODULE}.metadata.TensorProperties", (), properties, new=True),
            "size": Size(self.shape),
            "chunks": [
                _new("metadata.ChunkStorageMetadata", {"offsets": at, "sizes": sizes}) for at, sizes in places
            ],
        }
        return _new("metadata.TensorStorageMetadata", fields)


def _new(name: str, state: dict[str, Any]) -> Record:
    return Record(f"{_MODULE}.{name}", (), state, new=True)


def write_dcp(source: Source, world: int, target: Path, options: Options) -> None:
    """Write `source` for `world` ranks as the directory `target`. Raises as `convert` does, and for states in fp8."""
    if any(stream.block > 1 for stream in source.streams):
        raise UsageError(
            f"{source.path} has states in fp8, which DCP has no form for: load it into a run with states='device', "
            "save that, and convert the result"
        )
    with converting(source, target, options, _foreign) as work:
        _write(source, world, work, options)


def _foreign(folder: Path) -> str:
    with despite_damage(), opened(folder / METADATA) as fd, explained(folder / METADATA, "read"):
        if os.pread(fd, len(_BEGIN), 0) != _BEGIN:
            return "a checkpoint of torch's own"
    return foreign_to(folder, _FILE, "no file of DCP's")


def _write(source: Source, world: int, work: Path, options: Options) -> None:
    state: dict[str, Record] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    storage: dict[Record, Record] = {}
    dropped: list[str] = []
    files: list[list[torchwriter.TorchFile]] = [[] for _ in range(world)]
    ends = [0] * world
    for item in _items(source, world, dropped):
        places = []
        for chunk in item.chunks:
            file = torchwriter.plan_torch_file(chunk.content, "archive", ends[chunk.rank])
            files[chunk.rank].append(file)
            ends[chunk.rank] = file.base + file.size
            place = {"relative_path": f"__{chunk.rank}_0.distcp", "offset": file.base, "length": file.size}
            places.append(_new("filesystem._StorageInfo", place))
        for path in item.paths:
            name = ".".join(map(str, path))
            paths[name], state[name] = path, item.described()
            for number, (chunk, stored) in enumerate(zip(item.chunks, places, strict=True)):
                part = {"offset": Size(chunk.offsets), "index": number} if item.dtype else {}
                storage[_new("metadata.MetadataIndex", {"fqn": name, **part})] = stored
    with options.copying(source) as copier:
        for rank, parts in enumerate(files):
            torchwriter.write_torch_files(source, copier, work / f"__{rank}_0.distcp", parts)
    fields = {
        "state_dict_metadata": state,
        "planner_data": paths,
        "storage_data": storage,
        "storage_meta": None,
        "version": "1.0.0",
    }
    write_file(work / METADATA, to_pickle(_new("metadata.Metadata", fields)))
    if dropped:
        text = f"{source.path}: DCP has no place for {', '.join(dropped)}: not carried over"
        warnings.warn(text, ZerokitWarning, stacklevel=2)


def _items(source: Source, world: int, dropped: list[str]) -> Iterator[_Item]:
    """All that is written; what is left out is added to `dropped`."""
    line = source.layout.parameters
    for number, stream in enumerate(source.streams):
        for position in stream.parameters:
            parameter = line[position]
            paths: list[tuple[Any, ...]] = [("optim", "state", parameter.name, stream.kind)]
            if stream.kind in WEIGHT_KINDS:
                paths = [("model", name) for name in (parameter.name, *parameter.aliases)]
            chunks = tuple(_chunks(number, stream.dtype, parameter.name, parameter.shape, world))
            yield _Item(paths, chunks, stream.dtype, parameter.shape)
    for name in source.buffers:
        dtype, shape, content = source.common_tensor(BUFFER_PREFIX + name)
        yield _small(("model", name), dtype, shape, bytes(content))
    extra = source.extra()
    if not source.weights_only:
        yield from _states(source, extra, dropped)
    own = plain_value(extra["user"], "extra", dropped)
    if source.format == "dcp":
        yield from _values(own, ())
        if "step" in own:
            return
    elif isinstance(own, dict) and own:
        yield _value(("extra",), own)
    elif own is not None and own != {} and "extra" not in dropped:
        dropped.append("extra")
    yield _value(("step",), source.step)


def _values(value: Any, path: tuple[str | int, ...]) -> Iterator[_Item]:
    """A program's own values under the names that they had: mappings are divided, and lists with mappings in them."""
    if not _is_divided(value):
        yield _value(path, value)
        return
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        yield from _values(part, (*path, key))


def _is_divided(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(map(_is_divided, value)))


def _states(source: Source, extra: Mapping[str, Any], dropped: list[str]) -> Iterator[_Item]:
    line = source.layout.parameters
    dropped += [key for key in ("scaler", LOCAL_STEPS) if extra.get(key)]
    if any(name.startswith(GENERATOR_PREFIX) for name in source.common_forms):
        dropped.append("random number generators")
    for scalar in source.manifest.scalars:
        dtype, _, content = source.common_tensor(f"optimizer/{scalar.kind}")
        size = math.prod(scalar.shape) * ELEMENT_BYTES[dtype]
        for row, position in enumerate(scalar.parameters):
            path = ("optim", "state", line[position].name, scalar.kind)
            yield _small(path, dtype, scalar.shape, bytes(content[row * size : (row + 1) * size]))
    for place in source.manifest.uncut:
        parameter = line[place.position]
        if parameter.shape and place.rows != (0, parameter.shape[0]):
            dropped.append(
                f"{', '.join(place.kinds)} of rows {place.start} to {place.stop} of {parameter.name}"
            )
            continue
        for kind, value in read_uncut(source.place(place.name), place, _Stored).items():
            yield from _uncut(value, ("optim", "state", parameter.name, kind))
    for kind, by_name in plain_value(extra["values"], "state", dropped).items():
        for name, value in by_name.items():
            yield _value(("optim", "state", name, kind), value)
    for number, options in enumerate(extra["groups"]):
        members = [p.name for p in line if p.trainable and p.group == number]
        plain = plain_value(options, f"option of group {number}", dropped)
        for option, value in (plain | {"params": members}).items():
            yield _value(("optim", "param_groups", number, option), value)


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor that is not cut."""

    content: bytearray
    dtype: str
    shape: tuple[int, ...]


def _uncut(value: Any, path: tuple[Any, ...]) -> Iterator[_Item]:
    """A state that is not cut. Lists with tensors are divided, as torch does it."""
    if isinstance(value, _Stored):
        yield _small(path, value.dtype, value.shape, bytes(value.content))
    elif isinstance(value, list | tuple | dict):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _uncut(part, (*path, key))
    else:
        yield _value(path, value)


def _value(path: tuple[Any, ...], value: Any) -> _Item:
    return _Item([path], [_Chunk(value)])


def _small(path: tuple[Any, ...], dtype: str, shape: tuple[int, ...], content: bytes) -> _Item:
    """A tensor that rank 0 has whole."""
    tensor = torchwriter.whole(dtype, shape, content)
    return _Item([path], [_Chunk(tensor, 0, (0,) * len(shape))], dtype, shape)


def _chunks(stream: int, dtype: str, name: str, shape: tuple[int, ...], world: int) -> Iterator[_Chunk]:
    """Each rank's rows of a parameter: as many as fit on all, the last ranks fewer or none, as `torch.chunk` cuts."""
    rows = shape[0] if shape else 1
    row = math.prod(shape[1:])
    each = max(1, -(-rows // world))
    for rank in range(max(1, -(-rows // each))):
        start, stop = rank * each, min(rows, (rank + 1) * each)
        interval = Interval(start * row, stop * row)
        sizes = (stop - start, *shape[1:]) if shape else ()
        parts = [torchwriter.Part(stream, name, interval, 0)] if interval.numel else []
        storage = torchwriter.NewStorage(dtype, interval.numel * ELEMENT_BYTES[dtype], parts)
        offsets = (start,) + (0,) * (len(shape) - 1) if shape else ()
        yield _Chunk(torchwriter.NewTensor(storage, sizes, row_major(sizes)), rank, offsets)
