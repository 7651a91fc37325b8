"""The state of a live `ZeroOptimizer` as streams: which tensors hold which slices of which parameters.

Kinds are discovered: any tensor of an optimizer's state with the shape of the flat parameter it belongs to is a
stream, any other is a scalar of each parameter in it. (Shapes are compared, never sizes: a step count would match a
parameter of one element.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor

from zerokit.checkpoint.extra import encode
from zerokit.checkpoint.landing import Landing
from zerokit.checkpoint.manifest import Scalars
from zerokit.checkpoint.requests import Memory
from zerokit.checkpoint.safetensors import ELEMENT_BYTES, Stream
from zerokit.checkpoint.streams import BLOCK, SCALES
from zerokit.errors import CheckpointError
from zerokit.layout import Layout, Slice
from zerokit.runtime.build import Runtime
from zerokit.runtime.homes import Codes, Elements
from zerokit.runtime.masters import Master
from zerokit.runtime.pinning import content_of
from zerokit.runtime.shards import Shards
from zerokit.runtime.unit import UnitState

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

MASTER, PARAM = "master", "param"
OUTER_PREFIX = "outer."
"""Streams of `zerokit.LocalSteps` begin so: what islands last agreed on, and the outer optimizer's states."""


@dataclass(frozen=True, slots=True)
class Held:
    """One rank's slice of one parameter in one stream: `tensor` [part.interval], flat, which may be elsewhere."""

    kind: str
    position: int
    part: Slice
    tensor: Elements
    block: int = 1
    """Elements of the parameter for each element of the tensor: see `Stream`."""


@dataclass(frozen=True, slots=True, repr=False)
class Encoded:
    """A state that is not a tensor, as captured, with dtype, shape and bytes of the tensors in it by name."""

    plain: Any
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]]

    def __repr__(self) -> str:
        return repr(self.plain)


@dataclass
class Description:
    """The state of one rank, by position in the line."""

    kinds: dict[tuple[str, str, int], list[int]] = field(default_factory=dict)
    """By kind, dtype and block."""
    scalars: dict[tuple[str, str, tuple[int, ...]], dict[int, bytes]] = field(default_factory=dict)
    """By kind, dtype and shape."""
    values: dict[str, dict[int, Encoded]] = field(default_factory=dict)
    """States that are no tensors."""


def dtype_name(tensor: Elements, what: str = "a tensor") -> str:
    """The dtype's name in safetensors. Raises `CheckpointError`, naming `what`, if there is none."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ELEMENT_BYTES:
        raise CheckpointError(f"{what} of {name} cannot be saved: safetensors has no such dtype")
    return name


def host_bytes(tensor: Tensor) -> memoryview:
    """The tensor's bytes; no copy for a contiguous one in host memory."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    return memoryview(array)


def tensor_of(data: ReadableBuffer, dtype: str, shape: Sequence[int]) -> Tensor:
    """A new tensor of these bytes: the reverse of `host_bytes`."""
    content = data if isinstance(data, bytearray | memoryview) else bytearray(data)
    kind = getattr(torch, dtype)
    # frombuffer refuses a buffer of no bytes.
    return (torch.frombuffer(content, dtype=kind) if content else torch.empty(0, dtype=kind)).reshape(shape)


class InTensor(Memory):
    """The flat elements of `tensor` in the file's `dtype`; those on a device come there through a `landing`."""

    def __init__(self, tensor: Tensor, dtype: str, landing: Landing | None = None) -> None:
        self.tensor, self.dtype = tensor, dtype
        raw = str(tensor.dtype) == f"torch.{dtype}"
        self._landing = landing if raw and landing and landing.stream.device == tensor.device else None
        self._is_raw = raw and self._landing is None and tensor.device.type == "cpu"
        """Whether bytes can be read into the tensor's own memory unchanged."""
        self._lent: dict[int, Tensor] = {}
        """Memory of the landing that is to be filled, by the byte that it begins with."""

    def _within(self, at: int, size: int) -> Tensor:
        width = ELEMENT_BYTES[self.dtype]
        return self.tensor.detach()[at // width : (at + size) // width]

    def buffer(self, at: int, size: int) -> memoryview:
        if self._is_raw:
            return host_bytes(self._within(at, size))
        lent = None if self._landing is None else self._landing.lend(size)
        if lent is None:
            return memoryview(bytearray(size))
        self._lent[at] = lent
        return content_of(lent)

    def take(self, at: int, content: memoryview) -> None:
        if self._is_raw:
            return
        part = self._within(at, content.nbytes)
        if self._landing is not None and (lent := self._lent.pop(at, None)) is not None:
            self._landing.send(lent, part.view(torch.uint8))
        else:
            part.copy_(tensor_of(content, self.dtype, part.shape))


def own_slices(runtime: Runtime, rank: int, *, weights_only: bool = False) -> Iterator[Held]:
    """The slices that this rank writes: its piece of every unit, in every stream or only in parameters'.

    Those of tensors that are updated whole come from their owners (`owned`).
    """
    positions = runtime.layout.positions
    for unit in runtime.units:
        for part in unit.unit.owned(rank) if not unit.unit.trainable else ():
            yield Held(PARAM, positions[part.parameter.name], part, unit.kept.at(part.memory))
        for master in unit.slices:
            kinds: dict[str, Tensor] = {MASTER: master.tensor}
            if not weights_only:
                kinds |= elementwise_states(runtime, master)
            codes = {kind: runtime.home.coded(tensor) for kind, tensor in kinds.items()}
            held = {kind: runtime.home.elements(unit, tensor) for kind, tensor in kinds.items()}
            start = master.interval.start
            for part in unit.members(master, unit.own):
                place, position = part.memory.shifted(-start), positions[part.parameter.name]
                for kind, elements in held.items():
                    if (coded := codes[kind]) is not None:
                        yield from coded_slices(kind, position, part, coded.at(place.start, place.stop))
                        continue
                    yield Held(kind, position, part, elements[place.start : place.stop])


def coded_slices(kind: str, position: int, part: Slice, codes: Codes) -> Iterator[Held]:
    """A slice of a state in codes: those, and their scales."""
    yield Held(kind, position, part, codes.codes)
    yield Held(kind + SCALES, position, part, codes.scales, BLOCK)


def slices_here(runtime: Runtime, units: Iterable[UnitState], *, weights_only: bool) -> Iterator[Held]:
    """What this rank reads of units that are here: masters with their states, and its shards of frozen parameters.

    Of masters that every rank has whole (stage 0), and of those that it owns, that is all.
    """
    positions = runtime.layout.positions
    for unit in units:
        for part in unit.unit.owned(runtime.collectives.position) if not unit.unit.trainable else ():
            yield Held(PARAM, positions[part.parameter.name], part, unit.kept.at(part.memory))
        for master in unit.masters:
            kinds = {MASTER: master.values.tensor}
            if not weights_only:
                kinds |= elementwise_states(runtime, master)
            for part in unit.members(master):
                for kind, value in kinds.items():
                    yield Held(kind, positions[part.parameter.name], part, master.like(value).at(part.memory))


def elementwise_states(runtime: Runtime, master: Master) -> dict[str, Tensor]:
    """The states of a master that have its shape, by kind."""
    state = runtime.inner.state.get(master.tensor, {})
    return {kind: value for kind, value in state.items() if _elementwise(value, master)}


def kept_slices(runtime: Runtime) -> Iterator[Held]:
    """This rank's shards of tensors that are updated whole, as the model computes with them."""
    for index in runtime.owners.units:
        unit = runtime.units[index]
        whole = {tensor.position for tensor in runtime.owners.of_unit(index)}
        names = {unit.unit.parameters[position].name for position in whole}
        for part in unit.unit.slices_within(unit.own):
            if part.parameter.name in names:
                position = runtime.layout.positions[part.parameter.name]
                yield Held(MASTER, position, part, unit.kept.at(part.memory))


def _elementwise(value: object, master: Master) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.shape == master.tensor.shape


def outer_slices(layout: Layout, rank: int, streams: Mapping[str, Mapping[int, Tensor]]) -> Iterator[Held]:
    """The state of `zerokit.LocalSteps` for this rank's shards: tensors by name and unit."""
    for name, shards in streams.items():
        for index, shard in shards.items():
            unit = layout.units[index]
            held = Shards(unit, shard, unit.shard(rank))
            for part in unit.owned(rank):
                position = layout.positions[part.parameter.name]
                yield Held(OUTER_PREFIX + name, position, part, held.at(part.memory))


def describe(
    runtime: Runtime,
    held_slices: Sequence[Held],
    *,
    weights_only: bool = False,
    apart: Mapping[Master, Collection[str]] = MappingProxyType({}),
) -> Description:
    """This rank's state, or only its parameters; `held_slices` are all its slices.

    Kinds that are `apart`, by master, are in files of their own.

    Raises `CheckpointError` for kinds that no stream can be called by.
    """
    held_here = Description()
    for held in held_slices:
        form = held.kind, dtype_name(held.tensor, held.kind), held.block
        held_here.kinds.setdefault(form, []).append(held.position)
    if weights_only:
        return held_here
    positions = runtime.layout.positions
    for unit, master, state in runtime.masters():
        for kind, value in state.items():
            elementwise = _elementwise(value, master)
            require_name(kind, elementwise=elementwise)
            if elementwise or kind in apart.get(master, ()):
                continue
            # The host waits for a device here, so it asks once a master and not once a parameter.
            data = bytes(host_bytes(value)) if isinstance(value, Tensor) else b""
            for part in unit.members(master):
                position = positions[part.parameter.name]
                if isinstance(value, Tensor):
                    key = (kind, dtype_name(value, kind), tuple(value.shape))
                    held_here.scalars.setdefault(key, {})[position] = data
                    continue
                plain, found = encode(value, f"values/{kind}/{part.parameter.name}")
                tensors = {name: torch.as_tensor(tensor, device="cpu") for name, tensor in found.items()}
                raw = {n: (dtype_name(t), tuple(t.shape), bytes(host_bytes(t))) for n, t in tensors.items()}
                held_here.values.setdefault(kind, {})[position] = Encoded(plain, raw)
    return held_here


def require_name(kind: object, *, elementwise: bool) -> None:
    """Raise `CheckpointError` for a kind that no stream, or no other state, can be called by."""
    reason = ""
    if not isinstance(kind, str):
        reason = "its name must be text"
    elif kind in (MASTER, PARAM):
        reason = "that name is reserved for the checkpoint"
    elif elementwise and ("/" in kind or not kind):
        reason = "rename it without '/'"
    if reason:
        raise CheckpointError(f"optimizer state {kind!r} cannot be saved: {reason}")


def merge(
    layout: Layout, by_rank: Sequence[Description]
) -> tuple[tuple[Stream, ...], dict[Scalars, bytes], dict[str, dict[str, Encoded]]]:
    """The streams of all ranks, the scalars with their bytes, and the values that are not tensors.

    Raises `CheckpointError` where ranks that share a parameter disagree.
    """
    kinds: dict[tuple[str, str, int], set[int]] = {}
    for description in by_rank:
        for key, held in description.kinds.items():
            kinds.setdefault(key, set()).update(held)
    line = list(layout.parameters)
    for position, parameter in enumerate(line):
        if not parameter.numel:  # no rank owns a slice of it
            own = (MASTER, "float32", 1) if parameter.trainable else (PARAM, parameter.dtype, 1)
            kinds.setdefault(own, set()).add(position)
    streams = sorted(
        (Stream(kind, dtype, tuple(sorted(held)), block) for (kind, dtype, block), held in kinds.items()),
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
    for kind, count in Counter(scalar.kind for scalar in stacked).items():
        if count > 1:
            raise CheckpointError(
                f"optimizer state {kind!r} has another dtype or shape from parameter to parameter"
            )
    named = {kind: {line[index].name: held[index] for index in sorted(held)} for kind, held in values.items()}
    return tuple(streams), stacked, named


def _join(target: dict[int, Any], held: Mapping[int, Any], line: Sequence[Any], kind: str, rank: int) -> None:
    for position, value in held.items():
        if target.setdefault(position, value) != value:
            raise CheckpointError(
                f"{kind} of {line[position].name} on rank {rank} differs from another rank's: "
                f"{target[position]!r}, {value!r}"
            )
