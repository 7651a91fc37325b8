"""`ForeignCheckpoint`: a checkpoint of another framework as a `Source`.

Everything follows from what a reader found: the line, its streams and scalars, and the two small files that zerokit
keeps beside the slices.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from zerokit.checkpoint.checksum import Piece, Pieces, combine, crc32, damaged
from zerokit.checkpoint.disk import is_file, opened, status_of
from zerokit.checkpoint.extra import encode
from zerokit.checkpoint.formats.checks import require
from zerokit.checkpoint.formats.description import (
    MASTER,
    PARAM,
    Description,
    ModelNames,
    Rename,
    StoredParameter,
    under_names,
)
from zerokit.checkpoint.formats.torchfile import Blob
from zerokit.checkpoint.manifest import (
    BUFFER_PREFIX,
    COMMON_NAME,
    EXTRA_NAME,
    MAX_STEP,
    MAX_WORLD,
    File,
    Manifest,
    Scalars,
)
from zerokit.checkpoint.reader import file_checksum
from zerokit.checkpoint.safetensors import ELEMENT_BYTES, Stream, lay_out
from zerokit.checkpoint.source import Source, Stretch
from zerokit.checkpoint.strict import compact
from zerokit.errors import CheckpointError
from zerokit.layout import Interval, Parameter, Segment, build_layout, default_bucket_bytes

_BLOCK = re.compile(r"^(.*?\.\d+)\.")
"""The part of a name up to its first number: what a repeated block of the model is called."""


class ForeignCheckpoint(Source):
    """A checkpoint of another framework. Raises `CheckpointError` if the description contradicts itself."""

    def __init__(self, described: Description, run: Path | None = None) -> None:
        """`run`: the directory of several checkpoints that was given, where it was one."""
        self.format, self.path, self.run = described.format, described.path, run
        self.manifest_crc = described.identity
        self.described = described
        dropped = ", ".join(described.dropped)
        self.notes = (
            *described.doubts,
            *([f"{described.path}: not carried over: {dropped}"] if dropped else ()),
        )
        self._check()
        segments = _segments([stored.parameter for stored in described.parameters])
        layout = build_layout(segments, world=described.world, bucket_bytes=default_bucket_bytes(segments))
        by_name = {stored.parameter.name: stored for stored in described.parameters}
        line = [by_name[parameter.name] for parameter in layout.parameters]
        held: dict[tuple[str, str], list[int]] = {}
        scalars: dict[str, list[int]] = {}
        for position, stored in enumerate(line):
            for kind, stream in stored.streams.items():
                held.setdefault((kind, stream.dtype), []).append(position)
            for kind in stored.scalars:
                scalars.setdefault(kind, []).append(position)
        streams = sorted(
            (Stream(kind, dtype, tuple(positions)) for (kind, dtype), positions in held.items()),
            key=lambda stream: stream.order,
        )
        self._stretches = {
            (number, position): line[position].streams[stream.kind].stretches
            for number, stream in enumerate(streams)
            for position in stream.parameters
        }
        self._small: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
        described_scalars = []
        for kind, positions in scalars.items():
            stored_scalars = [line[position].scalars[kind] for position in positions]
            forms = {(scalar.dtype, scalar.shape) for scalar in stored_scalars}
            require(len(forms) == 1, self.path, f"state {kind} has several dtypes or shapes: {sorted(forms)}")
            ((dtype, shape),) = forms
            content = b"".join(scalar.content for scalar in stored_scalars)
            self._small[f"optimizer/{kind}"] = dtype, (len(positions), *shape), content
            described_scalars.append(Scalars(kind, dtype, shape, tuple(positions)))
        self._extra = compact(_members(described))
        self.manifest = Manifest(
            described.step,
            layout,
            tuple(streams),
            tuple(described_scalars),
            tuple(() for _ in streams),
            (),
            File(COMMON_NAME, 0, 0, 0),
            File(EXTRA_NAME, len(self._extra), 0, crc32(self._extra)),
            weights_only=described.groups is None,
        )

    def fitted(self, model: ModelNames, rename: Rename | None = None) -> ForeignCheckpoint:
        """The checkpoint under a model's names, with the model's buffers and ties."""
        return ForeignCheckpoint(under_names(self.described, model, rename, self._require_equal), self.run)

    def _require_equal(self, one: StoredParameter, other: StoredParameter) -> None:
        streams = [stored.streams.get(MASTER) or stored.streams[PARAM] for stored in (one, other)]
        crcs = [self._read_checksum(s.stretches, ELEMENT_BYTES[s.dtype]) for s in streams]
        names = f"{one.parameter.name} and {other.parameter.name}"
        differ = f"{names} are tied in the model, but differ here: build the model with the two untied"
        require(crcs[0] == crcs[1], self.path, differ)

    def _check(self) -> None:
        """Raises `CheckpointError` unless every parameter is tiled by its stretches, in every stream."""
        step, world = self.described.step, self.described.world
        require(0 <= step <= MAX_STEP, self.path, f"its step is {step}")
        require(1 <= world <= MAX_WORLD, self.path, f"its files name {world} ranks")
        for stored in (*self.described.parameters, *self.described.buffers):
            name, numel = stored.parameter.name, stored.parameter.numel
            for kind, stream in stored.streams.items():
                starts = [*(stretch.interval.start for stretch in stream.stretches), numel]
                ends = [0, *(stretch.interval.stop for stretch in stream.stretches)]
                end = next((end for start, end in zip(starts, ends, strict=True) if start != end), None)
                partly = f"{kind} of {name} has elements up to {end} of {numel}: all are expected, each once"
                require(end is None, self.path, f"{partly}; files of several saves may be mixed")

    def locate(self, stream: int, position: int, interval: Interval) -> Iterator[Stretch]:
        stretches = self._stretches[stream, position]
        element = self.streams[stream].element_bytes
        first = bisect_right(stretches, interval.start, key=lambda stretch: stretch.interval.stop)
        for stretch in stretches[first:]:
            part = stretch.interval.intersection(interval)
            if not part.numel:
                return
            yield Stretch(
                stretch.file, part, stretch.offset + (part.start - stretch.interval.start) * element
            )

    def file_path(self, file: int) -> Path:
        return self.described.files[file]

    def open_file(self, file: int) -> AbstractContextManager[int]:
        return opened(self.described.files[file])

    def check_files(self) -> None:
        """Nothing: every file was checked when it was described."""

    def faults(self, by_rank: Sequence[Pieces]) -> list[str]:
        """Compare the bytes read with the format's checksums; gaps are read now."""
        everything = Pieces.joined(by_rank)
        read: dict[tuple[int, Blob], dict[int, Piece]] = {}
        for stream, position in everything.parameters():
            for start, piece in everything.parts(stream, position):
                place = next(self.locate(stream, position, Interval(start, start + 1)))
                blob = self._blob(place.file, place.offset)
                if blob is None:
                    continue
                pieces = read.setdefault((place.file, blob), {})
                if pieces.setdefault(place.offset, piece) != piece:
                    # Two readings of the same bytes that differ cannot both be right.
                    pieces[place.offset] = Piece(~piece.crc & 0xFFFFFFFF, piece.size)
        crcs = ((place, self._whole_crc(*place, pieces)) for place, pieces in sorted(read.items()))
        return [
            f"{self.file_path(file).name}: {_damage(blob, crc)}"
            for (file, blob), crc in crcs
            if crc != blob.crc
        ]

    def verified(self, progress: Callable[[int], None]) -> Iterator[tuple[str, str]]:
        """Read every byte that has a checksum; yields problems as file and text.

        `progress` is called with the bytes of each piece that was read.
        """
        for file, blobs in sorted(self._blobs.items()):
            for blob in blobs:
                crc = self._read(file, blob.offset, blob.offset + blob.size).crc
                if crc != blob.crc:
                    yield self.file_path(file).name, _damage(blob, crc)
                progress(blob.size)

    @property
    def verifiable_size(self) -> int:
        return sum(blob.size for blobs in self._blobs.values() for blob in blobs)

    def _blob(self, file: int, offset: int) -> Blob | None:
        blobs = self._blobs.get(file, [])
        index = bisect_right(blobs, offset, key=lambda blob: blob.offset) - 1
        return blobs[index] if index >= 0 and offset < blobs[index].offset + blobs[index].size else None

    @cached_property
    def _blobs(self) -> dict[int, list[Blob]]:
        """The blobs of each file, in order."""
        return {file: sorted(set(blobs)) for file, blobs in self.described.blobs.items()}

    def _whole_crc(self, file: int, blob: Blob, pieces: Mapping[int, Piece]) -> int:
        """The CRC-32 of a blob of which some was read: padding, and what no one wanted, is read here."""
        parts, end = [], blob.offset
        for offset, piece in sorted(pieces.items()):
            if offset >= end:  # else of shared storage, whose bytes are counted already
                parts += [self._read(file, end, offset), piece]
                end = offset + piece.size
        return combine([*parts, self._read(file, end, blob.offset + blob.size)]).crc

    def _read(self, file: int, start: int, stop: int) -> Piece:
        """The checksum of bytes that are read for it."""
        if start == stop:
            return Piece(0, 0)
        with self.open_file(file) as fd:
            return Piece(file_checksum(fd, stop - start, self.file_path(file), start), stop - start)

    @property
    def data_size(self) -> int:
        return sum(
            stretch.interval.numel * ELEMENT_BYTES[stream.dtype]
            for stored in self.described.parameters
            for stream in stored.streams.values()
            for stretch in stream.stretches
        )

    @cached_property
    def _buffers(self) -> dict[str, StoredParameter]:
        return {stored.parameter.name: stored for stored in self.described.buffers}

    @cached_property
    def common_forms(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        buffers = {
            BUFFER_PREFIX + name: (stored.streams[PARAM].dtype, stored.parameter.shape)
            for name, stored in self._buffers.items()
        }
        return buffers | {name: (dtype, shape) for name, (dtype, shape, _) in self._small.items()}

    def common_place(self, name: str) -> tuple[Path, int]:
        stretches = self._buffers[name.removeprefix(BUFFER_PREFIX)].streams[PARAM].stretches
        file, _, offset = next(iter(stretches), (0, None, 0))  # none of an empty buffer
        path, blob = self.file_path(file), self._blob(file, offset) if stretches else None
        if blob is not None:
            crc = self._read(file, blob.offset, blob.offset + blob.size).crc
            require(crc == blob.crc, path, f"{name}: {damaged(crc, blob.crc)}")
        return path, offset

    def common_tensor(self, name: str) -> tuple[str, tuple[int, ...], bytearray]:
        if name in self._small:
            dtype, shape, content = self._small[name]
            return dtype, shape, bytearray(content)
        return super().common_tensor(name)

    def held_files(self) -> list[tuple[str, int]]:
        root = self.path.parent if is_file(self.path) else self.path
        held = []
        for file in self.described.files:
            status = status_of(file)
            if status is None:
                raise CheckpointError(f"{file}: missing: removed since the checkpoint was opened")
            held.append((str(file.relative_to(root)), status.st_size))
        return held

    def checksums(self, stream: int) -> Iterator[tuple[str, Piece]]:
        width = self.streams[stream].element_bytes
        for position in self.streams[stream].parameters:
            piece = self._read_checksum(self._stretches[stream, position], width)
            yield self.layout.parameters[position].name, piece

    def _read_checksum(self, stretches: Sequence[Stretch], element_bytes: int) -> Piece:
        sizes = (stretch.interval.numel * element_bytes for stretch in stretches)
        return combine(
            self._read(stretch.file, stretch.offset, stretch.offset + size)
            for stretch, size in zip(stretches, sizes, strict=True)
        )

    def whole_files(self) -> Iterator[tuple[File, bytes | None]]:
        common = self._common_bytes()
        yield File(COMMON_NAME, len(common), 0, crc32(common)), common
        yield self.manifest.extra, self._extra

    def _common_bytes(self) -> bytes:
        tensors = {name: self.common_tensor(name) for name in self.common_forms}
        ordered = sorted(tensors, key=lambda name: (-ELEMENT_BYTES[tensors[name][0]], name))
        header, _ = lay_out(((name, *tensors[name][:2]) for name in ordered), {"format": "zerokit"})
        return header + b"".join(bytes(tensors[name][2]) for name in ordered)

    def extra_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(self._extra)
        return plain


def _damage(blob: Blob, crc: int) -> str:
    return f"bytes {blob.offset} to {blob.offset + blob.size}: {damaged(crc, blob.crc)}"


def _segments(parameters: Sequence[Parameter]) -> list[Segment]:
    """Parameters of one block of the model together, and what lies between blocks."""

    def block(parameter: Parameter) -> str | None:
        match = _BLOCK.match(parameter.name)
        return match[1] if match else None

    return [Segment(scope, tuple(members)) for scope, members in groupby(parameters, key=block)]


def _members(described: Description) -> dict[str, Any]:
    members: dict[str, Any] = {"step": described.step, "user": encode(described.user, "extra")[0]}
    if described.groups is not None:
        members["groups"] = [
            encode(dict(group), f"groups/{n}")[0] for n, group in enumerate(described.groups)
        ]
        members["values"] = {}
        members["scaler"] = described.scaler
        # No generator's state is there: every rank derives its own, of any number of ranks.
        members["rng"] = {"world": 1, "seed": 0, "step": described.step}
    return members
