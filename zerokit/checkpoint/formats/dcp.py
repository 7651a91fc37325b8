"""Checkpoints of torch.distributed.checkpoint (DCP), as FSDP2, accelerate and torchtitan write them.

    DIR/.metadata        a pickle: names to chunks with offsets and sizes, and chunks to bytes of files
    DIR/__R_I.distcp     complete `torch.save` files, one a chunk, one after the other

accelerate keeps two of them in one folder, `pytorch_model_fsdp_0` and `optimizer_0`. A model and an optimizer's state
are found by their shape, whatever the program called them: `X.state.NAME.KIND` beside `X.param_groups` is an
optimizer's, and what its names end is the model's. See torch/distributed/checkpoint/metadata.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.disk import opened, read_exactly, read_whole
from zerokit.checkpoint.extents import ELEMENT_BYTES
from zerokit.checkpoint.formats.foreign import (
    MASTER,
    PARAM,
    Description,
    ForeignCheckpoint,
    StoredParameter,
    StoredScalar,
    StoredStream,
    plain_value,
    reading,
)
from zerokit.checkpoint.formats.pickles import Name, Record, parse_pickle
from zerokit.checkpoint.formats.torchfile import Blob, StoredTensor, read_torch_file
from zerokit.checkpoint.source import StoredBuffer, Stretch
from zerokit.errors import CheckpointError
from zerokit.layout import Interval, Parameter

METADATA = ".metadata"

_MODEL_FOLDER = re.compile(r"pytorch_model_fsdp_\d+")
_OPTIMIZER_FOLDER = re.compile(r"optimizer_\d+")
_PARAM_GROUPS = re.compile(r"^(?:(.+?)\.)?param_groups\.")
_RANK = re.compile(r"__(\d+)_\d+\.distcp")
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


def recognises(path: Path) -> bool:
    """Whether `path` is a DCP checkpoint, or a folder of accelerate's with two of them."""
    return bool(_folders(path))


def _folders(path: Path) -> list[Path]:
    if (path / METADATA).is_file():
        return [path]
    if not path.is_dir():
        return []
    return [
        entry
        for pattern in (_MODEL_FOLDER, _OPTIMIZER_FOLDER)
        for entry in sorted(path.iterdir())
        if pattern.fullmatch(entry.name) and (entry / METADATA).is_file()
    ]


def read(path: Path) -> ForeignCheckpoint:
    """The checkpoint at `path`. Raises `CheckpointError` for what is damaged, missing or not supported."""
    with reading(path):
        return ForeignCheckpoint(_Reader(path).describe())


class _Reader:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: list[Path] = []
        self.numbers: dict[Path, int] = {}
        self.blobs: dict[int, list[Blob]] = {}
        self.tensors: dict[str, StoredItem] = {}
        self.values: dict[str, tuple[tuple[Any, ...], Any]] = {}
        self.dropped: list[str] = []
        self.identity = 0
        for folder in _folders(path):
            self._read_folder(folder)

    def _read_folder(self, folder: Path) -> None:
        content = read_whole(folder / METADATA)
        self.identity = crc32(content, self.identity)
        metadata = parse_pickle(content, str(folder / METADATA))
        if not isinstance(metadata, Record) or not metadata.name.endswith(".Metadata"):
            raise CheckpointError(f"{folder / METADATA}: no metadata of torch.distributed.checkpoint")
        fields = metadata.fields
        paths: Mapping[str, tuple[Any, ...]] = fields.get("planner_data") or {}
        places: dict[str, dict[tuple[int, ...] | None, Any]] = {}
        for index, place in fields["storage_data"].items():
            offset = index.fields.get("offset")
            places.setdefault(index.fields["fqn"], {})[offset] = place.fields
        with ExitStack() as stack:
            descriptors: dict[Path, int] = {}

            def stored(place: Mapping[str, Any]) -> tuple[int, Any]:
                relative = place["relative_path"]
                file = folder / relative
                if "/" in relative or relative.startswith(".."):
                    raise CheckpointError(
                        f"{folder / METADATA}: names the file {relative[:200]!r}, outside it"
                    )
                if place.get("transform_descriptors"):
                    raise CheckpointError(f"{file}: compressed by an extension: save it without one")
                if file not in descriptors:
                    descriptors[file] = stack.enter_context(opened(file))
                if file not in self.numbers:
                    self.numbers[file] = len(self.files)
                    self.files.append(file)
                value = read_torch_file(file, descriptors[file], place["offset"], place["length"])
                return self.numbers[file], value

            for name, entry in fields["state_dict_metadata"].items():
                path = tuple(paths.get(name) or (name,))
                if name in self.tensors or name in self.values:
                    raise CheckpointError(f"{self.path}: {name} is in both of its folders")
                if entry.name.endswith(".BytesStorageMetadata"):
                    place = places[name][None]
                    self.values[name] = path, stored(place)[1]
                elif entry.name.endswith(".TensorStorageMetadata"):
                    held = places.get(name, {})
                    self.tensors[name] = self._item(name, path, entry.fields, held, stored)
                else:
                    raise CheckpointError(
                        f"{self.path}: {name} is a {entry.name}, which zerokit does not read"
                    )

    def _item(
        self,
        name: str,
        path: tuple[Any, ...],
        fields: Mapping[str, Any],
        places: Mapping[Any, Any],
        stored: Any,
    ) -> StoredItem:
        shape = tuple(fields["size"])
        properties = fields["properties"]
        dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.fields["dtype"]
        kind = dtype.text.removeprefix("torch.") if isinstance(dtype, Name) else str(dtype)
        if kind not in ELEMENT_BYTES:
            raise CheckpointError(f"{self.path}: {name} is of {kind}, which zerokit cannot hold")
        stretches: list[Stretch] = []
        crcs = []
        chunks = [
            (tuple(chunk.fields["offsets"]), tuple(chunk.fields["sizes"])) for chunk in fields["chunks"]
        ]
        for offsets, sizes in sorted(chunks):
            if not math.prod(sizes):
                continue
            if offsets not in places:
                raise CheckpointError(f"{self.path}: {name}: no file has the chunk at {list(offsets)}")
            file, tensor = stored(places[offsets])
            if not isinstance(tensor, StoredTensor) or tensor.shape != sizes or tensor.dtype != kind:
                expected = f"expected {kind} {list(sizes)}"
                raise CheckpointError(
                    f"{self.files[file]}: {name} at {list(offsets)} is {_described(tensor)}, {expected}"
                )
            if not tensor.contiguous:
                raise CheckpointError(f"{self.files[file]}: {name} is not contiguous: save it contiguous")
            self.blobs.setdefault(file, []).append(tensor.blob)
            crcs.append(tensor.blob.crc)
            width = ELEMENT_BYTES[kind]
            for interval, start in rows(shape, offsets, sizes, f"{self.path}: {name}"):
                stretches.append(Stretch(file, interval, tensor.offset + start * width))
        stretches.sort(key=lambda stretch: stretch.interval.start)
        return StoredItem(path, kind, shape, tuple(stretches), tuple(crcs), len(chunks))

    def describe(self) -> Description:
        optimizer = self._optimizer_prefix()
        options = self._options(optimizer)
        trained = {name: number for number, (_, names) in enumerate(options) for name in names}
        states = self._states(optimizer, trained)
        model = self._model_prefix(optimizer, trained)
        parameters, buffers = [], {}
        weights = {
            key.removeprefix(model): item
            for key, item in self.tensors.items()
            if key.startswith(model) and not _within(key, optimizer) and (model or len(item.path) == 1)
        }
        if missing := [name for name in trained if name not in weights]:
            raise CheckpointError(
                f"{self.path}: the optimizer has {missing[0]}, of which there are no weights"
            )
        aliases = _tied(weights, trained)
        tied = {alias for names in aliases.values() for alias in names}
        divided = any(item.chunks > 1 for item in weights.values())
        for name, item in weights.items():
            if name in tied:
                continue
            if name not in trained and len(item.stretches) == 1 and _is_buffer(name, item, divided=divided):
                place = item.stretches[0]
                size = item.numel * ELEMENT_BYTES[item.dtype]
                buffers[name] = StoredBuffer(
                    item.dtype, item.shape, self.files[place.file], place.offset, size
                )
                continue
            kind = MASTER if name in trained else PARAM
            streams, scalars = states.get(name, ({}, {}))
            streams = {kind: StoredStream(item.dtype, item.stretches), **streams}
            parameter = Parameter(
                name,
                item.shape,
                item.dtype,
                trained.get(name, 0),
                name in trained,
                tuple(aliases.get(name, ())),
            )
            parameters.append(StoredParameter(parameter, streams, scalars))
        user, step = self._user(model, optimizer)
        return Description(
            format="dcp",
            path=self.path,
            step=step,
            world=self._world(),
            files=self.files,
            parameters=parameters,
            buffers=buffers,
            groups=[group for group, _ in options] if options else None,
            identity=self.identity,
            user=user,
            blobs=self.blobs,
            dropped=self.dropped,
        )

    def _world(self) -> int:
        """The number of ranks, by the names of their files."""
        ranks = [int(match[1]) for file in self.files if (match := _RANK.fullmatch(file.name))]
        return max(ranks, default=0) + 1

    def _optimizer_prefix(self) -> str | None:
        """What every key of the optimizer's state begins with; None where there is none."""
        prefixes = {
            f"{match[1]}." if match[1] else "" for key in self.values if (match := _PARAM_GROUPS.match(key))
        }
        if len(prefixes) > 1:
            raise CheckpointError(
                f"{self.path}: several optimizers ({', '.join(sorted(prefixes))}): zerokit reads one"
            )
        return prefixes.pop() if prefixes else None

    def _options(self, optimizer: str | None) -> list[tuple[dict[str, Any], list[str]]]:
        """Each group's options and the names of its parameters."""
        if optimizer is None:
            return []
        by_number: dict[int, dict[str, Any]] = {}
        by_name: dict[str, dict[str, Any]] = {}
        start = f"{optimizer}param_groups."
        for key, (path, value) in self.values.items():
            if not key.startswith(start):
                continue
            if len(path) > 1 and isinstance(path[-2], int):
                by_number.setdefault(path[-2], {})[str(path[-1])] = value
            else:
                name, _, option = key.removeprefix(start).rpartition(".")
                by_name.setdefault(name, {})[option] = value
        groups = [(options, list(options.pop("params"))) for _, options in sorted(by_number.items())]
        for name, options in by_name.items():  # flattened: options stand at each parameter
            for known, names in groups:
                if known == options:
                    names.append(name)
                    break
            else:
                groups.append((options, [name]))
        return [
            (
                plain_value(
                    {k: v for k, v in options.items() if k != "param_names"}, "param_groups", self.dropped
                ),
                names,
            )
            for options, names in groups
        ]

    def _states(
        self, optimizer: str | None, trained: Mapping[str, int]
    ) -> dict[str, tuple[dict[str, StoredStream], dict[str, StoredScalar]]]:
        if optimizer is None:
            return {}
        states: dict[str, tuple[dict[str, StoredStream], dict[str, StoredScalar]]] = {}
        start = f"{optimizer}state."
        for key, item in self.tensors.items():
            if not key.startswith(start):
                continue
            name, _, kind = key.removeprefix(start).rpartition(".")
            if name not in trained:
                raise CheckpointError(f"{self.path}: {key} is of a parameter that is in no group")
            streams, scalars = states.setdefault(name, ({}, {}))
            if item.shape and kind != "step":
                streams[kind] = StoredStream(item.dtype, item.stretches)
            else:
                scalars[kind] = StoredScalar(item.dtype, item.shape, self._content(item))
        for key, (_, value) in self.values.items():
            if key.startswith(start) and not isinstance(value, dict):
                self.dropped.append(key)
        return states

    def _content(self, item: StoredItem) -> bytes:
        """A small tensor's bytes, verified."""
        (place,) = item.stretches
        content = bytearray(min(item.numel, 1 << 16) * ELEMENT_BYTES[item.dtype])
        path = self.files[place.file]
        with opened(path) as fd:
            read_exactly(fd, [content], place.offset, path)
        if crc32(content) != item.crcs[0]:
            raise CheckpointError(
                f"{path}: damaged (CRC-32 {crc32(content):08x}, expected {item.crcs[0]:08x})"
            )
        return bytes(content)

    def _model_prefix(self, optimizer: str | None, trained: Mapping[str, int]) -> str:
        """What the model's keys begin with, such as "model."."""
        outside = [key for key in self.tensors if not _within(key, optimizer)]
        if trained:
            name = max(trained, key=len)
            found = [key.removesuffix(name) for key in outside if key == name or key.endswith(f".{name}")]
        else:
            found = [
                f"{self.tensors[key].path[0]}." if len(self.tensors[key].path) > 1 else "" for key in outside
            ]
        if not found:
            raise CheckpointError(
                f"{self.path}: no model's weights: expected such as 'model.{next(iter(trained), '')}'"
            )
        return "" if "" in found else max(sorted(set(found)), key=found.count)

    def _user(self, model: str, optimizer: str | None) -> tuple[dict[str, Any], int]:
        """What the program saved beside model and optimizer, and the step that it was."""
        own: dict[str, Any] = {}
        for key, (path, value) in self.values.items():
            if _within(key, optimizer) or (model and key.startswith(model)):
                continue
            place = own
            for part in path[:-1]:
                place = place.setdefault(part, {})
            place[path[-1]] = value
        carried = plain_value(own, "", self.dropped)
        step = next(
            (int(value) for value in _named(carried, ("step", "global_step")) if type(value) is int), None
        )
        for key, item in self.tensors.items():
            if key in ("step", "train_state.step", "global_step") and item.numel == 1:
                content = self._content(item)
                step = int.from_bytes(content, "little") if item.dtype.startswith("int") else step
            elif not key.startswith(model) and not _within(key, optimizer):
                self.dropped.append(key)
        if step is None:
            match = re.search(r"(\d+)$", self.path.name)
            step = int(match[1]) if match else 0
        return carried, step


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


def _within(key: str, optimizer: str | None) -> bool:
    """Whether a key belongs to the optimizer's state."""
    return optimizer is not None and key.startswith((f"{optimizer}state.", f"{optimizer}param_groups."))


def _tied(weights: Mapping[str, StoredItem], trained: Mapping[str, int]) -> dict[str, list[str]]:
    """Other names of matrices that are stored twice, by the trained name: equal bytes, and no state of their own."""
    known = {
        (weights[name].shape, weights[name].crcs): name for name in trained if len(weights[name].shape) > 1
    }
    aliases: dict[str, list[str]] = {}
    for name, item in weights.items():
        owner = known.get((item.shape, item.crcs))
        if owner is not None and name not in trained:
            aliases.setdefault(owner, []).append(name)
    return aliases


def _is_buffer(name: str, item: StoredItem, *, divided: bool) -> bool:
    """Whether a tensor that is not trained looks like a buffer: of integers, batch statistics, or the only whole one
    among `divided` ones. DCP does not say; `ForeignCheckpoint.fitted` corrects this where the model is known.
    """
    if not item.dtype.startswith(("float", "bfloat")):
        return True
    return (divided and item.chunks == 1) or name.rpartition(".")[2] in (
        "running_mean",
        "running_var",
        "inv_freq",
    )


def _named(value: Any, names: Sequence[str]) -> Iterator[Any]:
    if isinstance(value, dict):
        for key, part in value.items():
            if key in names:
                yield part
            yield from _named(part, names)


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, StoredTensor) else type(value).__name__
