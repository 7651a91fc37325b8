"""The files of a step: every rank writes its own pieces, and rank 0 the rest."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from safetensors.torch import save as save_tensors

from zerokit.checkpoint.by_rank import decode_by_rank
from zerokit.checkpoint.checksum import Part, Piece, Pieces, combine, crc32
from zerokit.checkpoint.disk import (
    MAX_TEXT_BYTES,
    is_directory,
    new_file,
    status_of,
    write_exactly,
    write_file,
)
from zerokit.checkpoint.entries import Uncut
from zerokit.checkpoint.extra import decode, parse_members, ranks_in
from zerokit.checkpoint.manifest import (
    COMMON_NAME,
    EXTRA_NAME,
    FROZEN,
    NAME,
    File,
    Manifest,
    Scalars,
    parse_manifest,
)
from zerokit.checkpoint.run import step_name
from zerokit.checkpoint.safetensors import (
    LENGTH_BYTES,
    RankFile,
    Stream,
    file_name,
    parse_header,
    slice_count,
)
from zerokit.checkpoint.snapshot import Apart, Arguments, Rest, Slices
from zerokit.checkpoint.staged import contents, device_of, staging_for, through
from zerokit.checkpoint.strict import compact
from zerokit.checkpoint.uncut import UncutFile
from zerokit.errors import CheckpointError
from zerokit.layout import Layout
from zerokit.runtime.homes import Elements
from zerokit.runtime.homes.staging import Staging


class Written(NamedTuple):
    """A rank's file, the checksums of its extents, and the files of states that the rank has written."""

    file: File
    pieces: Pieces
    crc: int
    """The CRC-32 of the rank's whole file."""
    uncut: tuple[Uncut, ...] = ()

    def files(self) -> list[tuple[str, int, int]]:
        """The names, sizes in bytes and CRC-32s of the rank's files."""
        return [(self.file.name, self.file.size, self.crc), *((o.name, o.size, o.crc) for o in self.uncut)]


@dataclass(frozen=True, slots=True)
class Contents:
    """What rank 0 writes: the small files, and the manifest but for what the ranks' files turn out to be."""

    common: bytes
    extra: bytes
    manifest: Manifest


def write_rank(
    work: Path,
    file: RankFile,
    streams: tuple[Stream, ...],
    slices: Slices,
    layout: Layout,
    uncut: Iterable[UncutFile] = (),
) -> Written:
    """Write a rank's file, and its files of `uncut` states, in the directory `work`. Raises `CheckpointError`."""
    if not is_directory(work):
        raise CheckpointError(f"{work}: not there: the run directory is not shared between the nodes")
    path, line = work / file.name, layout.parameters
    wanted = {(streams[e.stream].kind, line[e.position].name) for e in file.extents}
    if missing := sorted(wanted - slices.keys()):
        kind, name = missing[0]
        raise CheckpointError(f"{kind} of {name} is missing on this rank, which others have")
    held = [slices[streams[e.stream].kind, line[e.position].name] for e in file.extents]
    assert [elements.nbytes for elements in held] == [extent.size for extent in file.extents]
    pieces, parts = Pieces(), [Piece(crc32(file.header), len(file.header))]
    with through(device_of(held), staging_for("saves")) as staging:
        for extent, crc in zip(
            file.extents, _write(path, file.size, file.header, held, staging), strict=True
        ):
            parts.append(Piece(crc, extent.size))
            pieces.add(Part(extent.stream, extent.position, extent.interval.start), crc, extent.size)
        others = tuple(_write_uncut(work, one, staging) for one in uncut)
    described = File(file.name, file.size, len(file.header), parts[0].crc)
    return Written(described, pieces, combine(parts).crc, others)


def _write_uncut(work: Path, file: UncutFile, staging: Staging | None) -> Uncut:
    crcs = _write(work / file.place.name, file.size, file.header, file.tensors, staging)
    parts = [Piece(crc, one.nbytes) for crc, one in zip(crcs, file.tensors, strict=True)]
    whole = combine([Piece(crc32(file.header), len(file.header)), *parts])
    return replace(file.place, size=file.size, crc=whole.crc)


def _write(
    path: Path, size: int, header: bytes, elements: Sequence[Elements], staging: Staging | None
) -> list[int]:
    """Write a file: elements behind a header, one after the other. Returns the CRC-32 of each one's bytes."""
    crcs, offset = [0] * len(elements), len(header)
    with new_file(path, size) as fd:
        write_exactly(fd, [header], 0, path)
        for batch in contents(elements, staging):
            write_exactly(fd, [content for _, content in batch], offset, path)
            for number, content in batch:
                crcs[number] = crc32(content, crcs[number])
                offset += content.nbytes
    return crcs


def contents_of(
    arguments: Arguments,
    layout: Layout,
    streams: tuple[Stream, ...],
    scalars: tuple[Scalars, ...],
    rest: Rest,
    apart: Apart | None = None,
    uncut: tuple[Uncut, ...] = (),
) -> Contents:
    """What rank 0 is to write, beside frozen parameters that are `apart`, and files of `uncut` states.

    Raises `CheckpointError` for what `load` would refuse."""
    step = arguments.step
    where = f"{Path(arguments.run) / step_name(step)} cannot be saved"
    common = save_tensors(dict(rest.tensors), {"format": "zerokit"})
    extra = compact(rest.members)
    manifest = Manifest(
        step,
        layout,
        streams,
        scalars,
        tuple(array("I", bytes(4 * slice_count(layout, stream))) for stream in streams),
        tuple(
            File(file_name(rank, layout.world), LENGTH_BYTES, LENGTH_BYTES, 0) for rank in range(layout.world)
        ),
        File(COMMON_NAME, len(common), 0, crc32(common)),
        File(EXTRA_NAME, len(extra), 0, crc32(extra)),
        arguments.weights_only,
        max(map(len, ranks_in(rest.members["user"]).values()), default=0),
        rest.skips,
        uncut=uncut,
    )
    if apart is not None:
        line = layout.parameters
        stated = (
            array("I", [apart.checksums[line[p].name] for p in stream.parameters if line[p].numel])
            if stream.kind == FROZEN
            else manifest.checksums[number]
            for number, stream in enumerate(streams)
        )
        manifest = replace(manifest, checksums=tuple(stated), frozen=apart.base)
    content = manifest.to_bytes()
    for name, text in ((NAME, content), (EXTRA_NAME, extra)):
        if len(text) > MAX_TEXT_BYTES:
            raise CheckpointError(
                f"{where}: {name} would have {len(text)} bytes, more than the {MAX_TEXT_BYTES} that it may have: give "
                "long data as tensors or arrays"
            )
    parse_manifest(content, f"{where}: {NAME}")
    parse_header(common, len(common), f"{where}: {COMMON_NAME}")
    plain = parse_members(extra, manifest, f"{where}: {EXTRA_NAME}")
    for key, read in (("user", decode_by_rank), ("groups", decode), ("values", decode)):
        read(plain.get(key), rest.tensors, f"{where}: {key}")
    return Contents(common, extra, manifest)


def require_written(work: Path, written: Iterable[Written]) -> None:
    """Raise `CheckpointError` unless ranks' files are in `work`."""
    for own in written:
        for name, size, _ in own.files():
            path = work / name
            status = status_of(path)
            if status is None or status.st_size != size:
                raise CheckpointError(
                    f"{path}: a rank's file is not there: the run directory is not shared between the nodes: save with "
                    "shared=False"
                )


def final_manifest(contents: Contents, written: Sequence[Written]) -> bytes:
    """The manifest with what the ranks' files turned out to be."""
    draft = contents.manifest
    pieces = Pieces.joined([own.pieces for own in written])
    final = draft.written(draft.layout, tuple(own.file for own in written), pieces)
    uncut = sorted((one for own in written for one in own.uncut), key=attrgetter("position", "start"))
    return replace(final, uncut=tuple(uncut)).to_bytes()


def write_rest(work: Path, common: bytes, extra: bytes, manifest: bytes) -> None:
    """Write the files that a step has once, each whole."""
    for name, content in ((COMMON_NAME, common), (EXTRA_NAME, extra), (NAME, manifest)):
        write_file(work / name, content)
