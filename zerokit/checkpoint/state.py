"""The state of a live `ZeroOptimizer` as streams: which tensors hold which slices of which parameters.

Kinds are discovered: any tensor of an optimizer's state with the shape of the flat parameter it belongs to is a
stream, any other is a scalar of each parameter in it. (Shapes are compared, never sizes: a step count would match a
parameter of one element.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerokit.checkpoint.extents import ELEMENT_BYTES, Stream
from zerokit.checkpoint.extra import encode
from zerokit.checkpoint.manifest import Scalars
from zerokit.errors import CheckpointError
from zerokit.layout import Interval, Layout, Slice
from zerokit.runtime.build import Parts
from zerokit.runtime.storage import MasterSlice, UnitState

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MASTER, PARAM = "master", "param"


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's slice of one parameter in one stream: `tensor` [part.interval], flat."""

    kind: str
    position: int
    part: Slice
    tensor: Tensor


@dataclass(frozen=True, slots=True, repr=False)
class Encoded:
    """A state that is no tensor, as it was when it was taken; by name dtype, shape and bytes of the tensors in it."""

    plain: Any
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]]

    def __repr__(self) -> str:
        return repr(self.plain)


@dataclass
class Description:
    """What one rank holds, by position in the line."""

    kinds: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """By kind and dtype."""
    scalars: dict[tuple[str, str, tuple[int, ...]], dict[int, bytes]] = field(default_factory=dict)
    """By kind, dtype and shape."""
    values: dict[str, dict[int, Encoded]] = field(default_factory=dict)
    """States that are no tensors."""


def dtype_name(tensor: Tensor) -> str:
    """Raises `CheckpointError` for a dtype that safetensors has no name for."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ELEMENT_BYTES:
        raise CheckpointError(f"tensors of {name} cannot be saved: safetensors has no such dtype")
    return name


def host_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes; no copy for a contiguous one in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(array)


def tensor_of(data: ReadableBuffer, dtype: str, shape: Sequence[int]) -> Tensor:
    """A new tensor of these bytes: the reverse of `host_bytes`."""
    content = data if isinstance(data, bytearray) else bytearray(data)
    kind = getattr(torch, dtype)
    # frombuffer refuses a buffer of no bytes.
    return (torch.frombuffer(content, dtype=kind) if content else torch.empty(0, dtype=kind)).reshape(shape)


def flats(parts: Parts) -> Iterator[tuple[UnitState, MasterSlice, dict[str, Any]]]:
    """Every flat parameter of the optimizer with its state."""
    for storage in parts.storages:
        for flat in storage.flats:
            yield storage, flat, parts.inner.state.get(flat.tensor, {})


def within(flat: MasterSlice, tensor: Tensor, part: Slice) -> Tensor:
    """The elements of `part` in `tensor`, which has the shape of the flat parameter."""
    start = part.offset - flat.interval.start
    return tensor[start : start + part.interval.numel]


def own_slices(parts: Parts, rank: int, *, weights_only: bool = False) -> Iterator[Held]:
    """What this rank writes: its piece of every unit, in every stream, or in those of parameters."""
    positions = parts.layout.positions
    for storage in parts.storages:
        unit = storage.unit
        if not unit.trainable:
            for part in unit.owned(rank):
                tensor = storage.slice_of(part.memory)
                yield Held(PARAM, positions[part.parameter.name], part, tensor)
    for storage, flat, state in flats(parts):
        piece = flat.interval.intersection(storage.unit.shard(rank))
        for part in _members(storage, flat, piece):
            position = positions[part.parameter.name]
            yield Held(MASTER, position, part, within(flat, flat.tensor.detach(), part))
            for kind, value in () if weights_only else state.items():
                if _elementwise(value, flat):
                    yield Held(kind, position, part, within(flat, value, part))


def members(storage: UnitState, flat: MasterSlice) -> Iterator[Slice]:
    """The slices of parameters that a flat parameter holds, padding left out."""
    return _members(storage, flat, flat.interval)


def _members(storage: UnitState, flat: MasterSlice, piece: Interval) -> Iterator[Slice]:
    for part in storage.unit.slices_within(piece):
        if part.parameter.group == flat.group:
            yield part


def _elementwise(value: object, flat: MasterSlice) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.tensor.shape


def describe(parts: Parts, rank: int, *, weights_only: bool = False) -> Description:
    """What this rank holds, or of it the parameters.

    Raises `CheckpointError` for kinds that no stream can be called by.
    """
    held_here = Description()
    for held in own_slices(parts, rank, weights_only=weights_only):
        held_here.kinds.setdefault((held.kind, dtype_name(held.tensor)), []).append(held.position)
    if weights_only:
        return held_here
    positions = parts.layout.positions
    for storage, flat, state in flats(parts):
        for kind, value in state.items():
            elementwise = _elementwise(value, flat)
            _require_name(kind, elementwise=elementwise)
            if elementwise:
                continue
            # The host waits for a device here, so it asks once a flat tensor and not once a parameter.
            data = bytes(host_bytes(value)) if isinstance(value, Tensor) else b""
            for part in members(storage, flat):
                position = positions[part.parameter.name]
                if isinstance(value, Tensor):
                    key = (kind, dtype_name(value), tuple(value.shape))
                    held_here.scalars.setdefault(key, {})[position] = data
                else:
                    held_here.values.setdefault(kind, {})[position] = _encoded(
                        value, f"values/{kind}/{part.parameter.name}"
                    )
    return held_here


def _require_name(kind: object, *, elementwise: bool) -> None:
    if not isinstance(kind, str):
        raise CheckpointError(f"optimizer state {kind!r} cannot be saved: its name must be text")
    if kind in (MASTER, PARAM):
        raise CheckpointError(f"optimizer state {kind!r} cannot be saved: that name is the checkpoint's own")
    if elementwise and ("/" in kind or not kind):
        raise CheckpointError(f"optimizer state {kind!r} cannot be saved: rename it without '/'")


def _encoded(value: Any, path: str) -> Encoded:
    plain, found = encode(value, path)
    tensors = {name: torch.as_tensor(tensor) for name, tensor in found.items()}
    return Encoded(
        plain, {name: (dtype_name(t), tuple(t.shape), bytes(host_bytes(t))) for name, t in tensors.items()}
    )


def merge(
    layout: Layout, by_rank: Sequence[Description]
) -> tuple[tuple[Stream, ...], dict[Scalars, bytes], dict[str, dict[str, Encoded]]]:
    """The streams of all ranks together, the scalars with their bytes, and the values that are no tensors.

    Raises `CheckpointError` where ranks that share a parameter disagree.
    """
    kinds: dict[tuple[str, str], set[int]] = {}
    for description in by_rank:
        for key, held in description.kinds.items():
            kinds.setdefault(key, set()).update(held)
    line = list(layout.parameters)
    _require_one_dtype(layout, kinds, by_rank)
    for position, parameter in enumerate(line):
        if not parameter.numel:
            # No rank owns a slice of it: it belongs to the streams that all its group's parameters belong to.
            for key in _shared_kinds(layout, kinds, position):
                kinds.setdefault(key, set()).add(position)
    streams = sorted(
        (Stream(kind, dtype, tuple(sorted(held))) for (kind, dtype), held in kinds.items()),
        key=lambda s: s.order,
    )
    scalars: dict[tuple[str, str, tuple[int, ...]], dict[int, bytes]] = {}
    values: dict[str, dict[int, Encoded]] = {}
    for rank, description in enumerate(by_rank):
        for form, held_bytes in description.scalars.items():
            _join(scalars.setdefault(form, {}), held_bytes, line, form[0], rank)
        for kind, held_values in description.values.items():
            _join(values.setdefault(kind, {}), held_values, line, kind, rank)
    stacked = {
        Scalars(kind, dtype, shape, tuple(sorted(held))): b"".join(held[index] for index in sorted(held))
        for (kind, dtype, shape), held in sorted(scalars.items())
    }
    names = [scalar.kind for scalar in stacked]
    for name in names:
        if names.count(name) > 1:
            raise CheckpointError(
                f"optimizer state {name!r} has another dtype or shape from parameter to parameter"
            )
    return (
        tuple(streams),
        stacked,
        {kind: {line[index].name: held[index] for index in sorted(held)} for kind, held in values.items()},
    )


def _require_one_dtype(
    layout: Layout, kinds: Mapping[tuple[str, str], set[int]], by_rank: Sequence[Description]
) -> None:
    line = list(layout.parameters)
    dtypes: dict[tuple[str, int], str] = {}
    for (kind, dtype), held in kinds.items():
        for position in held:
            if dtypes.setdefault((kind, position), dtype) != dtype:
                raise CheckpointError(
                    f"{kind} of {line[position].name} is {dtype} on one rank and {dtypes[kind, position]} on another"
                )
    for kind, position in dtypes:
        for rank in layout.owners(line[position].name):
            if not any(position in held for (name, _), held in by_rank[rank].kinds.items() if name == kind):
                raise CheckpointError(
                    f"{kind} of {line[position].name} is missing on rank {rank}, which others have"
                )


def _shared_kinds(
    layout: Layout, kinds: Mapping[tuple[str, str], set[int]], position: int
) -> list[tuple[str, str]]:
    line = list(layout.parameters)
    wanted = line[position]
    peers = {
        other
        for other, parameter in enumerate(line)
        if parameter.numel
        and (parameter.trainable, parameter.group) == (wanted.trainable, wanted.group)
        and (wanted.trainable or parameter.dtype == wanted.dtype)
    }
    shared = [key for key, held in kinds.items() if peers and peers <= held]
    own = MASTER if wanted.trainable else PARAM
    if any(kind == own for kind, _ in shared):
        return shared
    return [*shared, (own, "float32" if wanted.trainable else wanted.dtype)]


def _join(target: dict[int, Any], held: Mapping[int, Any], line: Sequence[Any], kind: str, rank: int) -> None:
    for position, value in held.items():
        if target.setdefault(position, value) != value:
            raise CheckpointError(
                f"{kind} of {line[position].name} on rank {rank} differs from another rank's: "
                f"{target[position]!r}, {value!r}"
            )
