"""Elements of a checkpoint copied to other files, and the proof that they were the right ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from zerokit.checkpoint import plan
from zerokit.checkpoint.checksum import Piece
from zerokit.checkpoint.copying import Conversion, Copier, OpenFile
from zerokit.checkpoint.disk import check_size, opened
from zerokit.checkpoint.manifest import File
from zerokit.checkpoint.plan import Key, PieceKey
from zerokit.checkpoint.source import Source, Stretch
from zerokit.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Want(plan.Want):
    """What goes to byte `offset` of a file, converted or as it is."""

    offset: int
    conversion: Conversion | None = None


def copy_elements(source: Source, copier: Copier[Key], wants: Iterable[Want], target: OpenFile) -> None:
    """Hand over everything that `target` wants: one file of the source after the other, each opened once."""
    by_file: dict[int, list[tuple[Want, Stretch]]] = {}
    for want in wants:
        for stretch in source.locate(want.stream, want.name, want.interval):
            by_file.setdefault(stretch.file, []).append((want, stretch))
    for file, parts in sorted(by_file.items()):
        opened_file = copier.source(source.file_path(file), source.open_file(file))
        for want, stretch in parts:
            element = source.streams[want.stream].element_bytes
            conversion, part = want.conversion, stretch.interval
            width = conversion.element_bytes if conversion else element
            copier.copy(
                PieceKey(want.stream, want.position, file, part.start),
                part.numel * element,
                opened_file,
                stretch.offset,
                target,
                want.offset + (part.start - want.interval.start) * width,
                conversion,
            )
        copier.release(opened_file)


def copy_file(path: Path, file: File, copier: Copier[Key], target: OpenFile) -> None:
    """Hand over a file that is copied whole."""
    source = copier.source(path, opened(path))
    check_size(source.fd, file.size, path)
    copier.copy(file.name, file.size, source, 0, target, 0)
    copier.release(source)


def check_copied(source: Source, pieces: Mapping[Key, Piece]) -> None:
    """Raises `CheckpointError` if what was copied is not what was once written, naming files and elements."""
    faults = source.faults([{key: piece for key, piece in pieces.items() if isinstance(key, PieceKey)}])
    for file in (source.manifest.common, source.manifest.extra):
        piece = pieces.get(file.name)
        if piece is not None and piece.crc != file.crc:
            faults.append(f"{file.name}: damaged (CRC-32 {piece.crc:08x}, expected {file.crc:08x})")
    if faults:
        more = f"; and {len(faults) - 3} more (zerokit verify lists all)" if len(faults) > 3 else ""
        raise CheckpointError(
            f"{source.path}: {'; '.join(faults[:3])}{more}: nothing was written: take another checkpoint"
        )
