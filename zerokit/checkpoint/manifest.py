"""The manifest: a checkpoint's state, its sharding, and the checksum of every slice.

Where a slice lies follows from the layout (see `safetensors`), so the manifest lists no offsets. It is one JSON object
whose first member is the CRC-32 of all bytes that follow that member, so that the file verifies itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate, product
from pathlib import Path
from typing import Any

from zerokit.checkpoint.checksum import Piece, Pieces, combine, crc32, to_text
from zerokit.checkpoint.disk import read_whole
from zerokit.checkpoint.entries import Budget, Uncut, checksums_of, dtype_of, layout_of, ranges, uncut_of
from zerokit.checkpoint.safetensors import Stream, file_name, slice_checksums, slice_count
from zerokit.checkpoint.streams import CODES, SCALES, check_streams
from zerokit.checkpoint.strict import bounded, compact, member, members, parse_json, shape_of, typed
from zerokit.errors import CheckpointError
from zerokit.layout import ALIGNMENT, Interval, Layout
from zerokit.skips import NONE_SKIPPED, Skips

NAME = "manifest.json"
COMMON_NAME = "common.safetensors"
EXTRA_NAME = "extra.json"
BUFFER_PREFIX = "buffers/"
"""Names of buffers in `common` begin so."""

FORMAT = "zerokit.checkpoint"
MAJORS = (1, 2, 3, 4, 5)
"""Major versions that are read; a higher minor one only adds members that a reader may ignore.

Each checkpoint is written as the first version that has what is in it, so that older readers have the bytes they know:
1.1 added weights alone, 1.2 values of `extra` by rank, 1.3 how many steps were skipped, 2.0 frozen parameters that are
not in the ranks' files, 3.0 states that are not cut, 4.0 states in codes with scales, 5.0 ranks' shares."""

BASE = re.compile(r"frozen-[0-9a-f]{16}")
"""Names of directories beside steps that have frozen parameters."""

WEIGHTS = "weights"
"""The member "content" where there are parameters and buffers only (1.1); a whole state has none."""

FROZEN = "param"
WEIGHT_KINDS = ("master", FROZEN)
"""Streams of parameters: of trained ones, and of frozen ones. All others are the optimizer's."""

_PREFIX = '{"crc32":"%08x",'
_OWN = re.compile(rb'\{"crc32":"([0-9a-f]{8})",')
_PARAMETER = ("name", "shape", "dtype", "group", "trainable", "aliases")
MAX_WORLD = 1 << 20
MAX_STEP = 1 << 59

_MAX_KINDS = 1 << 10
"""Streams, and scalars. Optimizers have a few, and a hundred thousand would make every rank's file slow to check."""


@dataclass(frozen=True, slots=True)
class Scalars:
    """Optimizer state of another shape than its parameter's, such as step counts.

    Tensor `optimizer/<kind>` of `common` is [parameters × shape], in the order of the line.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]
    parameters: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class File:
    """A file of the checkpoint and the checksum of a rank file's header, or of the whole of any other."""

    name: str
    size: int
    header_size: int
    crc: int


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's description.

    `checksums` has one sequence a stream: the CRC-32 of each slice, parameters in line order, slices in rank order.
    `weights_only`: there are parameters and buffers, and no state of an optimizer. `extra_ranks`: how many ranks have
    values of their own in `extra`; 0 where all values are everyone's. `skips`: steps that the training had left out.

    `frozen`: None where frozen parameters are in the ranks' files, as all others. Otherwise the directory beside the
    step that has them, or "" where the checkpoint has none of them; `param` streams then have one checksum a parameter,
    of all its elements. `uncut`: the files with states that are not cut.
    """

    step: int
    layout: Layout
    streams: tuple[Stream, ...]
    scalars: tuple[Scalars, ...]
    checksums: tuple[Sequence[int], ...]
    files: tuple[File, ...]
    common: File
    extra: File
    weights_only: bool = False
    extra_ranks: int = 0
    skips: Skips = NONE_SKIPPED
    frozen: str | None = None
    uncut: tuple[Uncut, ...] = ()

    @property
    def world(self) -> int:
        return self.layout.world

    def to_bytes(self) -> bytes:
        body = compact(self._plain())[1:] + b"\n"
        return (_PREFIX % crc32(body)).encode() + body

    def _plain(self) -> dict[str, object]:
        layout = self.layout
        ranks = {"ranks": self.extra_ranks} if self.extra_ranks else {}
        skips = {"skipped": asdict(self.skips)} if self.skips.total else {}
        return {
            "format": FORMAT,
            "version": self._version(),
            **({"content": WEIGHTS} if self.weights_only else {}),
            **({} if self.frozen is None else {"frozen": {"base": self.frozen} if self.frozen else {}}),
            "step": self.step,
            **skips,
            "world": layout.world,
            **({"shares": list(layout.shares)} if layout.shares else {}),
            "alignment": ALIGNMENT,
            "bucket_bytes": layout.bucket_bytes,
            "parameters": [{key: getattr(p, key) for key in _PARAMETER} for p in layout.parameters],
            "units": [
                {"scopes": list(unit.scopes), "parameters": len(unit.parameters)} for unit in layout.units
            ],
            "streams": [
                {
                    "kind": stream.kind,
                    "dtype": stream.dtype,
                    **({} if stream.block == 1 else {"block": stream.block}),
                    "parameters": list(ranges(stream.parameters)),
                    "crc32": to_text(crcs),
                }
                for stream, crcs in zip(self.streams, self.checksums, strict=True)
            ],
            "scalars": [
                {
                    "kind": scalar.kind,
                    "dtype": scalar.dtype,
                    "shape": list(scalar.shape),
                    "parameters": list(ranges(scalar.parameters)),
                }
                for scalar in self.scalars
            ],
            "files": [_plain_file(file) for file in self.files],
            "common": _plain_file(self.common),
            "extra": _plain_file(self.extra) | ranks,
            **({"uncut": [one.plain() for one in self.uncut]} if self.uncut else {}),
        }

    def _version(self) -> list[int]:
        if self.layout.shares:
            return [5, 0]
        if any(stream.block > 1 for stream in self.streams):
            return [4, 0]
        if self.uncut:
            return [3, 0]
        if self.frozen is not None:
            return [2, 0]
        return [1, 3 if self.skips.total else 2 if self.extra_ranks else 1 if self.weights_only else 0]

    def apart(self, stream: int) -> bool:
        """Whether a stream is not in the ranks' files."""
        return self.frozen is not None and self.streams[stream].kind == FROZEN

    @cached_property
    def in_files(self) -> tuple[Stream, ...]:
        """`streams_in_files` of these streams."""
        return streams_in_files(self.streams, apart=self.frozen is not None)

    @property
    def whole_files(self) -> list[File]:
        """The files that are not cut: `common`, `extra`, and those of states."""
        return [self.common, self.extra, *(File(one.name, one.size, 0, one.crc) for one in self.uncut)]

    @property
    def all_files(self) -> list[File]:
        """All files but the manifest itself."""
        return [*self.files, *self.whole_files]

    def written(self, layout: Layout, files: tuple[File, ...], pieces: Pieces) -> Manifest:
        """The same state, cut as `layout`, in `files` of ranks with these checksums."""
        checksums = slice_checksums(layout, self.in_files, pieces)
        kept = (self.checksums[number] if self.apart(number) else own for number, own in enumerate(checksums))
        return replace(self, layout=layout, checksums=tuple(kept), files=files)

    def slices(self, stream: int, position: int) -> Iterator[tuple[int, Interval, int]]:
        """`(rank, elements, crc)` of a parameter's slices in one stream, its own elements, in rank order.

        Of what is apart there is one, of all elements, and its rank is −1.
        """
        first = self._first[stream][position]
        if self.apart(stream):
            if numel := self.layout.parameters[position].numel:
                yield -1, Interval(0, numel), self.checksums[stream][first]
            return
        for number, (rank, cut, _) in enumerate(self.layout.cuts(position)):
            yield rank, self.streams[stream].elements(cut), self.checksums[stream][first + number]

    def checksum(self, stream: int, position: int, rank: int) -> int:
        return self.checksums[stream][
            self._first[stream][position] + self.layout.owners(position).index(rank)
        ]

    def whole(self, stream: int, position: int) -> Piece:
        """The checksum of all elements of a parameter in one stream."""
        element = self.streams[stream].element_bytes
        return combine(Piece(crc, cut.numel * element) for _, cut, crc in self.slices(stream, position))

    def scales(self, stream: int, position: int) -> int | None:
        """The number of the stream with the scales of a parameter's codes; None where a stream has no codes."""
        codes = self.streams[stream]
        number = self.numbers.get((codes.kind + SCALES, position)) if codes.dtype in CODES else None
        return None if number is None or self.streams[number].block == 1 else number

    @cached_property
    def numbers(self) -> dict[tuple[str, int], int]:
        """The number of the stream that each kind and position is in."""
        return {
            (stream.kind, position): number
            for number, stream in enumerate(self.streams)
            for position in stream.parameters
        }

    @cached_property
    def _first(self) -> list[dict[int, int]]:
        """By stream and position, the index of a parameter's first slice among the stream's `checksums`."""
        return [
            dict(
                zip(
                    stream.parameters,
                    accumulate(self._counts(number), initial=0),
                    strict=False,
                )
            )
            for number, stream in enumerate(self.streams)
        ]

    def _counts(self, stream: int) -> Iterator[int]:
        for position in self.streams[stream].parameters:
            slices = len(self.layout.owners(position))
            yield min(slices, 1) if self.apart(stream) else slices


def streams_in_files(streams: Sequence[Stream], *, apart: bool) -> tuple[Stream, ...]:
    """Streams as the ranks' files have them, by their numbers: with nothing of frozen parameters that are `apart`."""
    return tuple(
        replace(stream, parameters=()) if apart and stream.kind == FROZEN else stream for stream in streams
    )


def own_checksum(content: bytes) -> int | None:
    """The CRC-32 in a manifest's first member; None if there is no such member."""
    match = _OWN.match(content)
    return int(match[1], 16) if match else None


def _plain_file(file: File) -> dict[str, object]:
    crc = f"{file.crc:08x}"
    checked = {"header_bytes": file.header_size, "header_crc32": crc} if file.header_size else {"crc32": crc}
    return {"name": file.name, "bytes": file.size} | checked


def parse_manifest(content: bytes, where: str) -> Manifest:
    """Parse a manifest. Raises `CheckpointError`, naming `where`, if it is damaged or of an unknown version."""
    stated = own_checksum(content)
    if stated is None:
        raise CheckpointError(f"{where}: not a zerokit manifest (it begins with {content[:24]!r})")
    if crc32(content[len(_PREFIX % 0) :]) != stated:
        raise CheckpointError(f"{where}: damaged, its contents do not match its checksum {stated:08x}")
    try:
        return _manifest(parse_json(content))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid: {error}") from None


def read_manifest(step: Path) -> tuple[Manifest, int]:
    """A step's manifest, verified by its own CRC-32, and that CRC-32. Raises `CheckpointError`."""
    content = read_whole(step / NAME)
    manifest = parse_manifest(content, str(step / NAME))
    crc = own_checksum(content)
    assert crc is not None
    return manifest, crc


def _manifest(plain: Any) -> Manifest:
    top = typed(plain, dict, "the manifest")
    if top.get("format") != FORMAT:
        raise ValueError(f"format is {str(top.get('format'))[:60]!r}, expected {FORMAT!r}")
    version = members(top, "version", int)
    if len(version) != 2 or version[0] not in MAJORS:
        raise ValueError(
            f"version is {'.'.join(map(str, version[:3]))}, this zerokit reads {MAJORS[0]}.x to {MAJORS[-1]}.x: use a "
            "newer one"
        )
    has_frozen = version[0] == 2 or (version[0] > 2 and "frozen" in top)
    frozen = _frozen(member(top, "frozen", dict)) if has_frozen else None
    alignment = member(top, "alignment", int)
    if alignment != ALIGNMENT:
        raise ValueError(f"alignment is {alignment}, expected {ALIGNMENT}")
    world = bounded(top, "world", 1, MAX_WORLD)
    layout = layout_of(top, world, shares=version[0] > 4)
    budget = Budget(sum(len(unit.parameters) for unit in layout.units))
    streams, checksums = [], []
    for entry in _few(top, "streams"):
        block = bounded(entry, "block", 1) if version[0] > 3 and "block" in entry else 1
        stream = Stream(member(entry, "kind", str), dtype_of(entry), budget.positions(entry), block)
        streams.append(stream)
        apart = frozen is not None and stream.kind == FROZEN
        checksums.append(checksums_of(entry, "crc32", slice_count(layout, stream, whole=apart)))
    check_streams(layout, streams)
    if version[0] == 4 and all(stream.block == 1 for stream in streams):
        raise ValueError("version 4 has codes with scales, and no stream of scales is listed")
    scalars = tuple(
        Scalars(member(entry, "kind", str), dtype_of(entry), shape_of(entry), budget.positions(entry))
        for entry in _few(top, "scalars")
    )
    if len({scalar.kind for scalar in scalars}) != len(scalars):
        raise ValueError("scalars of one kind are listed twice")
    for scalar, stream in product(scalars, streams):
        if scalar.kind == stream.kind and (both := set(stream.parameters).intersection(scalar.parameters)):
            raise ValueError(
                f"{scalar.kind[:200]!r} of parameter {min(both)} is in a stream and in scalars: one of the two is wrong"
            )
    parts = [(part.kind, part.parameters) for part in streams]
    parts += [(part.kind, part.parameters) for part in scalars]
    uncut = uncut_of(top, layout, parts) if version[0] == 3 or (version[0] > 3 and "uncut" in top) else ()
    weights_only = "content" in top
    if weights_only:
        _check_weights_only(
            top, [*(kind for kind, _ in parts), *(kind for one in uncut for kind in one.kinds)]
        )
    skipped = member(top, "skipped", dict) if "skipped" in top else asdict(NONE_SKIPPED)
    total = bounded(skipped, "total", 0, MAX_STEP)
    return Manifest(
        bounded(top, "step", 0, MAX_STEP),
        layout,
        tuple(streams),
        scalars,
        tuple(checksums),
        _files(top, world),
        _file(member(top, "common", dict), COMMON_NAME),
        _file(extra := member(top, "extra", dict), EXTRA_NAME),
        weights_only,
        bounded(extra, "ranks", 1, MAX_WORLD) if "ranks" in extra else 0,
        Skips(total, bounded(skipped, "in_a_row", 0, total)),
        frozen,
        uncut,
    )


def _frozen(entry: dict[str, Any]) -> str:
    name = member(entry, "base", str) if "base" in entry else ""
    if name and not BASE.fullmatch(name):
        raise ValueError(
            f"frozen parameters are in {name[:60]!r}, expected 'frozen-' and 16 hexadecimal digits"
        )
    return name


def _files(top: dict[str, Any], world: int) -> tuple[File, ...]:
    entries = members(top, "files", dict)
    if len(entries) != world:
        raise ValueError(f"{len(entries)} files are listed, expected one for each of {world} ranks")
    return tuple(_file(entry, file_name(rank, world), of_rank=True) for rank, entry in enumerate(entries))


def _few(top: dict[str, Any], key: str) -> list[dict[str, Any]]:
    entries = members(top, key, dict)
    if len(entries) > _MAX_KINDS:
        raise ValueError(f"{len(entries)} {key} are listed, {_MAX_KINDS} are allowed")
    return entries


def _check_weights_only(top: dict[str, Any], kinds: list[str]) -> None:
    content = member(top, "content", str)
    if content != WEIGHTS:
        raise ValueError(f"content is {content[:60]!r}, this zerokit knows {WEIGHTS!r}: use a newer one")
    if states := [kind for kind in kinds if kind not in WEIGHT_KINDS]:
        raise ValueError(f"content is {WEIGHTS!r}, but there is optimizer state: {states[0][:200]!r}")


def _file(entry: dict[str, Any], name: str, *, of_rank: bool = False) -> File:
    stated = member(entry, "name", str)
    if stated != name:
        raise ValueError(f"a file is called {stated[:60]!r}, expected {name!r}")
    (crc,) = checksums_of(entry, "header_crc32" if of_rank else "crc32", 1)
    header = bounded(entry, "header_bytes", 8) if of_rank else 0
    return File(name, bounded(entry, "bytes", header), header, crc)
