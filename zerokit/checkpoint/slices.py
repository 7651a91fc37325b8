"""Elements of a checkpoint copied to other files, and the proof that they were the right ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from zerokit.checkpoint import plan
from zerokit.checkpoint.checksum import Piece
from zerokit.checkpoint.copying import Conversion, Copier, OpenFile
from zerokit.checkpoint.disk import check_size, opened
from zerokit.checkpoint.manifest import File
from zerokit.checkpoint.plan import Key, PieceKey, damaged, refine
from zerokit.checkpoint.reader import Checkpoint
from zerokit.errors import CheckpointError
from zerokit.layout import Interval


@dataclass(frozen=True, slots=True)
class Want(plan.Want):
    """What goes to byte `offset` of a file, converted or as it is."""

    offset: int
    conversion: Conversion | None = None


class Source:
    """A checkpoint to copy from."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.positions = checkpoint.layout.positions
        self._cuts: dict[str, list[tuple[int, Interval]]] = {}

    @property
    def size(self) -> int:
        """Bytes of all slices and of the files that are whole."""
        manifest = self.checkpoint.manifest
        whole = manifest.common.size + manifest.extra.size
        return whole + sum(file.size - file.header_size for file in manifest.files)

    def check_headers(self) -> None:
        """Raises `CheckpointError` unless every rank's file is there, with its size and header."""
        for rank in range(self.checkpoint.world):
            with self.checkpoint.open_rank(rank):
                pass

    def copy(self, copier: Copier[Key], wants: Iterable[Want], target: OpenFile) -> None:
        """Hand over everything that `target` wants: one file of the source after the other, each opened once."""
        checkpoint = self.checkpoint
        by_rank: dict[int, list[tuple[Want, Interval, Interval]]] = {}
        for want in wants:
            for rank, cut, part in refine(self.cuts(want.name), want.interval):
                by_rank.setdefault(rank, []).append((want, cut, part))
        for rank, parts in sorted(by_rank.items()):
            file = checkpoint.rank_file(rank)
            source = copier.source(checkpoint.path / file.name, checkpoint.open_rank(rank))
            for want, cut, part in parts:
                element = checkpoint.streams[want.stream].element_bytes
                conversion = want.conversion
                copier.copy(
                    PieceKey(want.stream, want.position, rank, part.start),
                    part.numel * element,
                    source,
                    file.by_name[want.stream, want.name].offset + (part.start - cut.start) * element,
                    target,
                    want.offset
                    + (part.start - want.interval.start)
                    * (conversion.element_bytes if conversion else element),
                    conversion,
                )
            copier.release(source)

    def cuts(self, name: str) -> list[tuple[int, Interval]]:
        """`Layout.cuts`, remembered."""
        if name not in self._cuts:
            self._cuts[name] = self.checkpoint.layout.cuts(name)
        return self._cuts[name]

    def copy_file(self, copier: Copier[Key], file: File, target: OpenFile) -> None:
        """Hand over a file that is copied whole."""
        path = self.checkpoint.path / file.name
        source = copier.source(path, opened(path))
        check_size(source.fd, file.size, path)
        copier.copy(file.name, file.size, source, 0, target, 0)
        copier.release(source)

    def check(self, pieces: Mapping[Key, Piece]) -> None:
        """Raises `CheckpointError` if what was copied is not what was once written, naming files and elements."""
        checkpoint = self.checkpoint
        faults = damaged(
            checkpoint.manifest, [{key: piece for key, piece in pieces.items() if isinstance(key, PieceKey)}]
        )
        for file in (checkpoint.manifest.common, checkpoint.manifest.extra):
            piece = pieces.get(file.name)
            if piece is not None and piece.crc != file.crc:
                faults.append(f"{file.name}: damaged (CRC-32 {piece.crc:08x}, expected {file.crc:08x})")
        if faults:
            more = f"; and {len(faults) - 3} more (zerokit verify lists all)" if len(faults) > 3 else ""
            raise CheckpointError(
                f"{checkpoint.path}: {'; '.join(faults[:3])}{more}: nothing was written: take another checkpoint"
            )
