"""`diff`: the differences between two checkpoints of any world sizes, from their manifests.

The CRC-32 of a whole parameter combines from those of its slices, however it is cut, so no stream is read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.formats import of_newest
from zerokit.checkpoint.manifest import WEIGHT_KINDS
from zerokit.checkpoint.source import Source
from zerokit.checkpoint.strict import canonical


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference: `a` and `b` describe both sides, None if a side lacks the item.

    `stream` is a kind of state, "parameter" for a parameter's own description, "common" for a tensor that is stored
    whole, "extra" for a member of `extra.json`, "checkpoint" for the step and the content: a whole state or weights.
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
    """

    equal: int
    differences: tuple[Difference, ...]
    layout: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return not self.differences


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Comparison:
    """Compare the states of two checkpoints; each path is a step's, or a run's, whose `latest` is followed.

    Streams are compared by parameter, by their checksums; `common` and `extra.json`, which are small, are read where
    their checksums differ. Checkpoints of other frameworks, which state no checksums of parameters, are read. Where one
    side holds weights only that is one difference, and what both hold, that is parameters, buffers and what `save` was
    given, is compared. Raises `CheckpointError` for a path that holds none, or a damaged one.
    """
    return of_newest(_comparison, a, b)


def _comparison(left: Source, right: Source) -> Comparison:
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
    readers = ("common", _common), ("extra", _extra)
    files = zip(left.whole_files(), right.whole_files(), strict=True)
    for (stream, read), ((our_file, _), (their_file, _)) in zip(readers, files, strict=True):
        if (our_file.crc, our_file.size) != (their_file.crc, their_file.size):
            # Nothing, if only the order of members differs.
            changes += _compare(stream, read(left, weights=mixed), read(right, weights=mixed))
    return Comparison(equal, tuple(changes), tuple(_layouts(left, right)), (*left.notes, *right.notes))


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
        name: f"{stream.dtype} {list(checkpoint.shapes[name])} {piece.crc:08x}"
        for number, stream in enumerate(checkpoint.streams)
        if stream.kind == kind
        for name, piece in checkpoint.checksums(number)
    }


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
