"""`diff`: the differences between two checkpoints of any world sizes, from their manifests.

The CRC-32 of a whole parameter combines from those of its slices, however it is cut, so no stream is read. Weights that
an export has rounded are read on the wider side, and rounded alike.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial

from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.formats import WEIGHTS_ALONE, of_newest
from zerokit.checkpoint.formats.description import ModelNames
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.manifest import BUFFER_PREFIX, WEIGHT_KINDS
from zerokit.checkpoint.requests import Memory, read, requests_for
from zerokit.checkpoint.safetensors import ELEMENT_BYTES, Stream
from zerokit.checkpoint.source import Source, from_array, to_array
from zerokit.checkpoint.strict import canonical
from zerokit.errors import CheckpointError
from zerokit.layout import Interval

_PART_NUMEL = 1 << 22
"""Elements that are rounded at a time: a parameter may be larger than memory."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference: `a` and `b` describe both sides, None if a side lacks the item.

    `stream` is a kind of state, "parameter" for a parameter's own description, "uncut" for the states of a parameter
    that are not cut, "common" for a tensor that is stored whole, "extra" for a member of `extra.json`, "checkpoint" for
    the step and the content: a whole state or weights. Where weights alone are compared it is "weights".
    """

    stream: str
    name: str
    a: str | None
    b: str | None

    @property
    def change(self) -> str:
        """ "added", "removed" or "changed", from `a` to `b`."""
        return "added" if self.a is None else "removed" if self.b is None else "changed"

    def plain(self) -> dict[str, object]:
        return asdict(self) | {"change": self.change}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `diff`: `equal` counts the parameters of streams that are equal by CRC-32, dtype and shape.

    `layout` lists how the cut differs (world size, units), which does not change the state.
    `notes`: why a step of a run was compared that its `latest` does not name.
    `weights`: weights and buffers alone were compared. `rounded` counts those of `equal` that are so in the narrower of
    their two dtypes.
    """

    equal: int
    differences: tuple[Difference, ...]
    layout: tuple[str, ...]
    notes: tuple[str, ...] = ()
    weights: bool = False
    rounded: int = 0

    @property
    def same(self) -> bool:
        return not self.differences


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str], *, weights: bool = False) -> Comparison:
    """Compare the states of two checkpoints; each path is a step's, or a run's, whose `latest` is followed.

    Streams are compared parameter by parameter, by their checksums; `common` and `extra.json`, which are small, are
    read if their checksums differ. Checkpoints of other frameworks state no checksums of parameters, and are read. If
    only one side has an optimizer's state, that counts as one difference, and parameters, buffers and `extra` are
    compared.

    With `weights`, and always where a side is a Hugging Face folder or a file of `torch.save`, weights and buffers
    alone are compared: by any of their names, and in the narrower dtype where one side is rounded, such as an export
    in bfloat16 of fp32 masters.

    Raises `MissingPath` for a path that does not exist, and `CheckpointError` for one that holds no checkpoint, or a
    damaged one.
    """
    return of_newest(partial(_comparison, weights=weights), a, b)


def _comparison(left: Source, right: Source, *, weights: bool) -> Comparison:
    if weights or {left.format, right.format} & {*WEIGHTS_ALONE}:
        return _compare_weights(left, right)
    changes: list[Difference] = []
    if left.step != right.step:
        changes.append(Difference("checkpoint", "step", str(left.step), str(right.step)))
    mixed = left.weights_only != right.weights_only
    if mixed:
        contents = ("weights only" if side.weights_only else "a whole state" for side in (left, right))
        changes.append(Difference("checkpoint", "content", *contents))
    changes += _compare("parameter", _parameters(left), _parameters(right))
    equal = 0
    for kind in dict.fromkeys(stream.kind for side in (left, right) for stream in side.streams):
        if not mixed or kind in WEIGHT_KINDS:
            ours, theirs = _elements(left, kind), _elements(right, kind)
            equal += sum(theirs.get(name) == value for name, value in ours.items())
            changes += _compare(kind, ours, theirs)
    if not mixed:
        ours, theirs = _uncut(left), _uncut(right)
        equal += sum(theirs.get(name) == value for name, value in ours.items())
        changes += _compare("uncut", ours, theirs)
    readers = ("common", _common), ("extra", _extra)
    files = left.whole_files(), right.whole_files()
    for (stream, contents_of), (our_file, _), (their_file, _) in zip(readers, *files, strict=False):
        if (our_file.crc, our_file.size) != (their_file.crc, their_file.size):
            # Nothing, if only the order of members differs.
            changes += _compare(stream, contents_of(left, weights=mixed), contents_of(right, weights=mixed))
    notes = [*left.notes, *right.notes]
    if changes and left.format != right.format:
        notes.append(
            f"{left.path} and {right.path} have different formats: --weights compares their weights alone"
        )
    return Comparison(equal, tuple(changes), tuple(_layouts(left, right)), tuple(notes))


def _compare_weights(left: Source, right: Source) -> Comparison:
    left, right = _under_names_of(left, right), _under_names_of(right, left)
    tied = right if isinstance(left, ForeignCheckpoint) else left
    first = {alias: p.name for p in tied.layout.parameters for alias in p.aliases}
    ours, theirs = _Weights(left, first), _Weights(right, first)
    changes: list[Difference] = []
    equal = rounded = 0
    for name in dict.fromkeys([*ours.forms, *theirs.forms]):
        one, other = ours.forms.get(name), theirs.forms.get(name)
        if one is None or other is None or one[1] != other[1]:
            sides = (None if form is None else f"{form[0]} {list(form[1])}" for form in (one, other))
            changes.append(Difference("weights", name, *sides))
            continue
        if any(
            ours.crc(name, dtype) == theirs.crc(name, dtype) for dtype in _common_dtypes(one[0], other[0])
        ):
            equal += 1
            rounded += one[0] != other[0]
            continue
        sides = (
            f"{dtype} {list(shape)} {side.crc(name, dtype):08x}"
            for side, (dtype, shape) in ((ours, one), (theirs, other))
        )
        changes.append(Difference("weights", name, *sides))
    notes = *left.notes, *right.notes
    return Comparison(equal, tuple(changes), (), notes, weights=True, rounded=rounded)


def _under_names_of(source: Source, other: Source) -> Source:
    """Another framework's checkpoint under the names of the run that it is compared with, tied as there."""
    if not isinstance(source, ForeignCheckpoint) or isinstance(other, ForeignCheckpoint):
        return source
    return source.fitted(
        ModelNames({p.name: p.aliases for p in other.layout.parameters}, other.buffers.keys())
    )


def _common_dtypes(one: str, other: str) -> tuple[str, ...]:
    """The dtypes in which two tensors can be compared: the narrower of two floating-point ones, or either."""
    if one == other:
        return (one,)
    if not {one, other} <= {"float64", "float32", "float16", "bfloat16"}:
        return ()
    width = min(ELEMENT_BYTES[one], ELEMENT_BYTES[other])
    return tuple(dtype for dtype in (one, other) if ELEMENT_BYTES[dtype] == width)


class _Weights:
    """The parameters and buffers of a checkpoint: `forms` has their dtypes and shapes.

    `first` is what tied parameters are called here, by their other names.
    """

    def __init__(self, source: Source, first: Mapping[str, str]) -> None:
        self._source, self._buffers = source, source.buffers
        line = source.layout.parameters
        self._places = {
            first.get(line[position].name, line[position].name): (number, position)
            for (kind, position), number in source.manifest.numbers.items()
            if kind in WEIGHT_KINDS
        }
        self._checksums: dict[int, dict[str, int]] = {}
        self.forms = {
            name: (source.streams[number].dtype, line[position].shape)
            for name, (number, position) in self._places.items()
        } | self._buffers

    def crc(self, name: str, dtype: str) -> int:
        """The CRC-32 of the tensor's elements as `dtype`; −1, which is none, where one is too large for it."""
        try:
            if name in self._buffers:
                own, shape, content = self._source.common_tensor(f"{BUFFER_PREFIX}{name}")
                return crc32(content if own == dtype else from_array(to_array(content, own, shape), dtype))
            number, position = self._places[name]
            if self._source.streams[number].dtype == dtype:
                return self._whole(number, position)
            return self._rounded(number, position, dtype)
        except OverflowError:
            return -1

    def _whole(self, number: int, position: int) -> int:
        if number not in self._checksums:
            self._checksums[number] = {name: piece.crc for name, piece in self._source.checksums(number)}
        return self._checksums[number][self._source.layout.parameters[position].name]

    def _rounded(self, number: int, position: int, dtype: str) -> int:
        """Raises `OverflowError`, and `CheckpointError` where what is read is not what a manifest says."""
        source, parameter = self._source, self._source.layout.parameters[position]
        stream = source.streams[number]
        crc = whole = 0
        for start in range(0, parameter.numel, _PART_NUMEL):
            part = Interval(start, min(start + _PART_NUMEL, parameter.numel))
            memory = Memory(part.numel * stream.element_bytes)
            read(source, requests_for(source, number, position, part, memory, 0))
            whole = crc32(memory.content, whole)
            crc = crc32(from_array(to_array(memory.content, stream.dtype, (-1,)), dtype), crc)
        if not isinstance(source, ForeignCheckpoint) and whole != self._whole(number, position):
            raise CheckpointError(
                f"{source.path}: {stream.kind}/{parameter.name} is damaged: see zerokit verify"
            )
        return crc


def _compare(stream: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[Difference]:
    """The functions below describe what one side has, by name: equal things have equal descriptions."""
    for name in dict.fromkeys([*ours, *theirs]):
        if ours.get(name) != theirs.get(name):
            yield Difference(stream, name, ours.get(name), theirs.get(name))


def _parameters(checkpoint: Source) -> dict[str, str]:
    described = {}
    for parameter in checkpoint.layout.parameters:
        tied = f", tied with {', '.join(parameter.aliases)}" if parameter.aliases else ""
        trained = f"group {parameter.group}" if parameter.trainable else "frozen"
        described[parameter.name] = f"{parameter.dtype} {list(parameter.shape)}, {trained}{tied}"
    return described


def _elements(checkpoint: Source, kind: str) -> dict[str, str]:
    return {
        name: f"{stream.dtype} {_shape(stream, checkpoint.shapes[name])} {piece.crc:08x}"
        for number, stream in enumerate(checkpoint.streams)
        if stream.kind == kind
        for name, piece in checkpoint.checksums(number)
    }


def _shape(stream: Stream, shape: tuple[int, ...]) -> list[int]:
    return list(shape) if stream.block == 1 else [stream.elements(Interval(0, math.prod(shape))).numel]


def _uncut(checkpoint: Source) -> dict[str, str]:
    line, found = checkpoint.layout.parameters, {}
    for one in checkpoint.manifest.uncut:
        parameter = line[one.position]
        whole = not parameter.shape or one.rows == (0, parameter.shape[0])
        part = "" if whole else f", rows {one.start} to {one.stop}"
        found[f"{parameter.name}{part}"] = f"{', '.join(one.kinds)}: {one.size} bytes {one.crc:08x}"
    return found


def _common(checkpoint: Source, *, weights: bool) -> dict[str, str]:
    """With `weights`, only of what a checkpoint of weights has."""
    tensors = {}
    line = [parameter.name for parameter in checkpoint.layout.parameters]
    members = {f"optimizer/{scalar.kind}": scalar.parameters for scalar in checkpoint.manifest.scalars}
    for name in checkpoint.common_forms:
        if not weights or name.startswith(("buffers/", "extra")):
            dtype, shape, content = checkpoint.common_tensor(name)
            if positions := members.get(name):  # by name, because units order the parameters
                size = len(content) // len(positions)
                rows = sorted(range(len(positions)), key=lambda row: line[positions[row]])
                content = bytearray().join(content[row * size : (row + 1) * size] for row in rows)
            tensors[name] = f"{dtype} {list(shape)} {crc32(content):08x}"
    return tensors


def _extra(checkpoint: Source, *, weights: bool) -> dict[str, str]:
    return {
        name: canonical(value)
        for name, value in checkpoint.extra_plain().items()
        if name == "user" or (name != "step" and not weights)
    }


def _layouts(left: Source, right: Source) -> Iterator[str]:
    if left.world != right.world:
        yield f"world size {left.world} and {right.world}"
    ours, theirs = left.layout, right.layout
    if [unit.parameters for unit in ours.units] != [unit.parameters for unit in theirs.units]:
        yield f"{len(ours.units)} and {len(theirs.units)} units, of other parameters"
    if ours.bucket_bytes != theirs.bucket_bytes:
        yield f"buckets of {ours.bucket_bytes} and {theirs.bucket_bytes} bytes"
