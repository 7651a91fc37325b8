"""`diff`: what differs between two checkpoints, whatever their world sizes, by their manifests.

The CRC-32 of a whole parameter combines from those of its slices, however it is cut, so no stream is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeVar

from zerokit.checkpoint.checksum import Piece, crc32
from zerokit.checkpoint.formats import open_source
from zerokit.checkpoint.manifest import WEIGHT_KINDS, File
from zerokit.checkpoint.source import Source
from zerokit.checkpoint.strict import canonical
from zerokit.errors import CheckpointError
from zerokit.layout import Parameter

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that differs: `a` and `b` describe both sides, None where one has no such thing.

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


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `diff`: `equal` counts the parameters of streams that are equal by CRC-32, dtype and shape.

    `layout` lists how the cut differs (world size, units), which does not change the state. `unread` names the small
    files that differ and could not be read on one side, so that their differences are not all listed.
    `notes`: why a step of a run was compared that its `latest` does not name.
    """

    equal: int
    differences: tuple[Difference, ...]
    layout: tuple[str, ...]
    unread: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return not self.differences

    def plain(self) -> dict[str, object]:
        """As JSON data."""
        return {
            "same": self.same,
            "equal": self.equal,
            "differences": [asdict(one) | {"change": one.change} for one in self.differences],
            "layout": list(self.layout),
            "unread": list(self.unread),
            "notes": list(self.notes),
        }


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> Comparison:
    """Compare the states of two checkpoints; each path is a step's, or a run's, whose `latest` is followed.

    Streams are compared by parameter, by their checksums; `common` and `extra.json`, which are small, are read where
    their checksums differ. Checkpoints of other frameworks, which state no checksums of parameters, are read. Where one
    side holds weights only that is one difference, and what both hold, that is parameters, buffers and what `save` was
    given, is compared. Raises `CheckpointError` for a path that holds none, or a damaged one.
    """
    left, right = open_source(a), open_source(b)
    changes: list[Difference] = []
    if left.step != right.step:
        changes.append(Difference("checkpoint", "step", str(left.step), str(right.step)))
    mixed = left.weights_only != right.weights_only
    if mixed:
        changes.append(Difference("checkpoint", "content", _describe_content(left), _describe_content(right)))
    changes += _compare("parameter", _parameters(left), _parameters(right), _describe_parameter)
    equal = 0
    kinds = dict.fromkeys(stream.kind for checkpoint in (left, right) for stream in checkpoint.streams)
    for kind in kinds:
        if mixed and kind not in WEIGHT_KINDS:
            continue
        ours, theirs = _whole(left, kind), _whole(right, kind)
        equal += sum(theirs.get(name) == value for name, value in ours.items())
        changes += _compare(kind, ours, theirs, _describe_whole)
    common, extra = partial(_common, weights=mixed), partial(_extra, weights=mixed)
    unread = []
    (our_common, our_extra), (their_common, their_extra) = (
        [file for file, _ in side.whole_files()] for side in (left, right)
    )
    for stream, ours_of, theirs_of, read in (
        ("common", our_common, their_common, common),
        ("extra", our_extra, their_extra, extra),
    ):
        try:
            changes += _files(left, right, stream, ours_of, theirs_of, read)
        except CheckpointError as error:
            sides = f"{ours_of.crc:08x}", f"{theirs_of.crc:08x}"
            changes.append(Difference(stream, f"unreadable: {error}", *sides))
            unread.append(ours_of.name)
    notes = (*left.notes, *right.notes)
    return Comparison(equal, tuple(changes), tuple(_layouts(left, right)), tuple(unread), notes)


@dataclass(frozen=True, slots=True)
class _Whole:
    dtype: str
    shape: tuple[int, ...]
    piece: Piece


def _whole(checkpoint: Source, kind: str) -> dict[str, _Whole]:
    return {
        name: _Whole(stream.dtype, checkpoint.shapes[name], piece)
        for number, stream in enumerate(checkpoint.streams)
        if stream.kind == kind
        for name, piece in checkpoint.checksums(number)
    }


def _describe_whole(whole: _Whole) -> str:
    return f"{whole.dtype} {list(whole.shape)} {whole.piece.crc:08x}"


def _parameters(checkpoint: Source) -> dict[str, Parameter]:
    return {parameter.name: parameter for parameter in checkpoint.layout.parameters}


def _describe_parameter(parameter: Parameter) -> str:
    tied = f", tied with {', '.join(parameter.aliases)}" if parameter.aliases else ""
    trained = f"group {parameter.group}" if parameter.trainable else "frozen"
    return f"{parameter.dtype} {list(parameter.shape)}, {trained}{tied}"


def _compare(
    stream: str, ours: Mapping[K, V], theirs: Mapping[K, V], describe: Callable[[V], str]
) -> Iterator[Difference]:
    for name in dict.fromkeys([*ours, *theirs]):
        a, b = ours.get(name), theirs.get(name)
        if a != b:
            yield Difference(
                stream, str(name), None if a is None else describe(a), None if b is None else describe(b)
            )


def _files(
    left: Source,
    right: Source,
    stream: str,
    ours: File,
    theirs: File,
    read: Callable[[Source], Mapping[str, str]],
) -> Iterator[Difference]:
    if (ours.crc, ours.size) != (theirs.crc, theirs.size):
        yield from _compare(
            stream, read(left), read(right), str
        )  # nothing, if only the order of members differs


def _common(checkpoint: Source, *, weights: bool) -> dict[str, str]:
    """Descriptions by name; with `weights`, only of what a checkpoint of weights has."""
    tensors = {}
    for name in checkpoint.common_names:
        if weights and not name.startswith(("buffers/", "extra")):
            continue
        dtype, shape, content = checkpoint.common_tensor(name)
        tensors[name] = f"{dtype} {list(shape)} {crc32(content):08x}"
    return tensors


def _extra(checkpoint: Source, *, weights: bool) -> dict[str, str]:
    plain = checkpoint.extra_plain()
    return {
        name: canonical(value)
        for name, value in plain.items()
        if name == "user" or (name != "step" and not weights)
    }


def _describe_content(checkpoint: Source) -> str:
    return "weights only" if checkpoint.weights_only else "a whole state"


def _layouts(left: Source, right: Source) -> Iterator[str]:
    if left.world != right.world:
        yield f"world size {left.world} and {right.world}"
    ours, theirs = left.layout, right.layout
    if [unit.parameters for unit in ours.units] != [unit.parameters for unit in theirs.units]:
        yield f"{len(ours.units)} and {len(theirs.units)} units, of other parameters"
    if ours.bucket_bytes != theirs.bucket_bytes:
        yield f"buckets of {ours.bucket_bytes} and {theirs.bucket_bytes} bytes"
