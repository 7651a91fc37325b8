"""`Checkpoint`: a checkpoint on disk, read on demand and without torch."""

from __future__ import annotations

import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokit.checkpoint.bases import base_of, check_base
from zerokit.checkpoint.checksum import Piece, Pieces, along, crc32, damaged
from zerokit.checkpoint.disk import check_file, check_size, opened, read_exactly, read_whole
from zerokit.checkpoint.extra import parse_members
from zerokit.checkpoint.manifest import NAME, File, Manifest, read_manifest
from zerokit.checkpoint.requests import Memory, read, requests_for
from zerokit.checkpoint.run import Choice, find_step
from zerokit.checkpoint.safetensors import Header, RankFile, file_name, rank_file, read_header
from zerokit.checkpoint.source import Source, Stretch, scaled, to_array
from zerokit.checkpoint.uncut import read_uncut
from zerokit.errors import CheckpointError, UsageError
from zerokit.files import path_of
from zerokit.layout import Interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

BUFFER_BYTES = 1 << 20


class Checkpoint(Source):
    """Open a step, or a run's newest step; with `whole`, the newest step with optimizer states.

    The manifest is read and verified at once. Raises `CheckpointError` unless `path` holds one that is undamaged.
    """

    def __init__(self, path: str | os.PathLike[str], *, whole: bool = False) -> None:
        choice = find_step(path_of(path), whole=whole)
        self._describe(choice, *(choice.manifest or read_manifest(choice.path)))

    def _describe(self, choice: Choice, manifest: Manifest, crc: int) -> None:
        self.path, self.run = choice.path, choice.run
        """The step's directory, and the run's where `path` was one."""
        self.notes = choice.notes
        self.manifest, self.manifest_crc = manifest, crc
        self._places: dict[int, tuple[list[int], array[int], array[int]]] = {}
        """By rank: where each stream's slices begin in two lists, of the slices' positions and of their offsets."""
        self._checked: set[int] = set()
        """Ranks whose file has been opened, and had the right header."""

    def read(self, stream: str, name: str) -> NDArray[Any]:
        """A whole parameter in one stream, such as `read("master", "blocks.0.weight")`, as an array of its shape.

        Only its bytes are read, and they are verified. bfloat16 and float8 elements, which numpy does not have, come as
        float32, exactly; codes of a state times their scales; scales, such as `exp_avg.scale`, flat, one for each 64
        elements. Raises `UsageError` for a stream or name that is not there, `CheckpointError` for damage.
        """
        number, position = self.find(stream, name)
        elements = self._read(number, position)
        if (scales := self.manifest.scales(number, position)) is not None:
            return scaled(elements, self._read(scales, position))
        return elements

    def _read(self, number: int, position: int) -> NDArray[Any]:
        """All elements of a parameter in a stream, in its shape, or flat where there is one for each block."""
        stream = self.streams[number]
        parameter = self.layout.parameters[position]
        every = stream.elements(Interval(0, parameter.numel))
        # Before memory is taken that they may not justify.
        for file, _, _ in self.locate(number, position, every):
            with self.open_file(file):
                pass
        memory = Memory(every.numel * stream.element_bytes)
        wanted = requests_for(self, number, position, every, memory, 0)
        self.require_right([read(self, wanted)], ": take another checkpoint")
        return to_array(memory.content, stream.dtype, parameter.shape if stream.block == 1 else (-1,))

    def uncut(self, name: str) -> dict[tuple[int, int], dict[str, Any]]:
        """The states of a parameter that are not cut, by the rows `(first, last + 1)` of the tensor that has them.

        By kind: arrays as those of `read`, lists of them, numbers. There are several tensors where blocks of rows are
        updated as tensors of their own, and none without such states. Raises as `read` does.
        """
        position = self._position(name)
        places = [place for place in self.manifest.uncut if place.position == position]
        return {place.rows: read_uncut(self.place(place.name), place, to_array) for place in places}

    def _position(self, name: str) -> int:
        position = self._positions.get(name)
        if position is None:
            raise UsageError(f"{self.path} has no parameter {name!r}: see `zerokit inspect`")
        return position

    def find(self, stream: str, name: str) -> tuple[int, int]:
        """The number of the stream of this kind that has the parameter, and the parameter's position in the line.

        Raises `UsageError` where there is no such stream or parameter.
        """
        position = self._position(name)
        held = {s.kind: number for number, s in enumerate(self.streams) if list(s.among([position]))}
        if stream not in held:
            raise UsageError(
                f"{self.path} has no stream {stream!r} of {name!r}, only {', '.join(map(repr, held))}"
            )
        return held[stream], position

    def rank_file(self, rank: int) -> RankFile:
        """A rank's expected file. Raises `CheckpointError` if the manifest contradicts it."""
        file = rank_file(self.layout, self.manifest.in_files, self.step, rank)
        stated = self.manifest.files[rank]
        computed = File(file.name, file.size, len(file.header), crc32(file.header))
        if stated != computed:
            raise CheckpointError(
                f"{self.path / NAME}: describes {file.name} as {_summary(stated)}, but by its layout that file has "
                f"{_summary(computed)}: the manifest was not written by zerokit, or was changed"
            )
        return file

    @cached_property
    def base(self) -> Checkpoint:
        """The checkpoint beside this one that has its frozen parameters; its files' numbers follow this one's.

        Raises `CheckpointError` where it is not there, or of others.
        """
        return Checkpoint(base_of(self.path, self.manifest)[0])

    def _offset(self, rank: int, stream: int, position: int) -> int:
        first, positions, offsets = self._placed(rank)
        return offsets[bisect_left(positions, position, first[stream], first[stream + 1])]

    def _placed(self, rank: int) -> tuple[list[int], array[int], array[int]]:
        if rank not in self._places:
            extents = self.rank_file(rank).extents
            streams = [extent.stream for extent in extents]
            self._places[rank] = (
                [bisect_left(streams, number) for number in range(len(self.streams) + 1)],
                array("I", [extent.position for extent in extents]),
                array("Q", [extent.offset for extent in extents]),
            )
        return self._places[rank]

    @contextmanager
    def open_file(self, file: int) -> Iterator[int]:
        """The descriptor of a rank's file, after a check of its size and header.

        Raises `CheckpointError`, naming the file, if it is missing, of another size or of another header.
        """
        if file >= self.world:
            with self.base.open_file(file - self.world) as fd:
                yield fd
            return
        self._placed(file)
        path = self.file_path(file)
        with opened(path) as fd:
            check_size(fd, self.manifest.files[file].size, path)
            if file not in self._checked:
                self.check_header(fd, file)
                self._checked.add(file)
            yield fd

    def check_header(self, fd: int, rank: int) -> None:
        """Raise `CheckpointError` unless the open file starts with the rank's expected header."""
        stated, path = self.manifest.files[rank], self.file_path(rank)
        actual = bytearray(stated.header_size)
        read_exactly(fd, [actual], 0, path)
        if (crc := crc32(actual)) != stated.crc:
            raise CheckpointError(
                f"{path}: its header is {damaged(crc, stated.crc)}, or the file is of another checkpoint"
            )

    @cached_property
    def common(self) -> Header:
        """The header of `common.safetensors`, after one verification of the whole file.

        Raises `CheckpointError` if it is missing, damaged or no safetensors file.
        """
        stated = self.manifest.common
        path = self.place(stated.name)
        with opened(path) as fd:
            check_size(fd, stated.size, path)
            crc = file_checksum(fd, stated.size, path)
            if crc != stated.crc:
                raise CheckpointError(f"{path}: {damaged(crc, stated.crc)}: take another checkpoint")
        return read_header(path)

    def locate(self, stream: int, position: int, interval: Interval) -> Iterator[Stretch]:
        element = self.streams[stream].element_bytes
        if self.manifest.apart(stream):
            if interval.numel:
                there = self.base.find(self.streams[stream].kind, self.layout.parameters[position].name)
                for file, part, offset in self.base.locate(*there, interval):
                    yield Stretch(self.world + file, part, offset)
            return
        held, numel = self.streams[stream], self.layout.parameters[position].numel
        for rank, cut, part in self.layout.cuts(position, held.behind(interval, numel)):
            cut, part = held.elements(cut), held.elements(part)
            offset = self._offset(rank, stream, position) + (part.start - cut.start) * element
            yield Stretch(rank, part, offset)

    def file_path(self, file: int) -> Path:
        if file >= self.world:
            return self.base.file_path(file - self.world)
        return self.place(file_name(file, self.world))

    def check_files(self) -> None:
        for name, size in self.held_files():
            check_file(self.place(name), size)
        check_base(self.path, self.manifest)

    def faults(self, by_rank: Sequence[Pieces]) -> list[str]:
        pieces = Pieces.joined(by_rank)
        lines = list(self.wrong_slices(by_rank).values())
        for file in self.manifest.whole_files:
            if (copied := pieces.whole.get(file.name)) is not None and copied.crc != file.crc:
                lines.append(f"{file.name}: {damaged(copied.crc, file.crc)}")
        return lines

    def wrong_slices(self, by_rank: Sequence[Pieces]) -> dict[tuple[int, int, int], str]:
        """What is wrong with slices that ranks have read, by stream, position and the rank whose file has the slice.

        A slice that no rank has read is not checked; one that was read in part only is an error of the caller's.
        """
        pieces = Pieces.joined(by_rank)
        wrong = {}
        for number, position in pieces.parameters():
            stream, name = self.streams[number], self.layout.parameters[position].name
            slices = {cut: (rank, crc) for rank, cut, crc in self.manifest.slices(number, position)}
            for cut, piece in along(pieces.parts(number, position), slices):
                rank, crc = slices[cut]
                assert piece.size == cut.numel * stream.element_bytes, (
                    f"{stream.kind}/{name} was read in part only"
                )
                if piece.crc != crc:
                    apart = self.manifest.apart(number)
                    where = self.manifest.frozen if apart else file_name(rank, self.world)
                    wrong[number, position, rank] = (
                        f"{where}: {stream.kind}/{name}, elements {cut.start} to {cut.stop}: "
                        f"{damaged(piece.crc, crc)}"
                    )
        return wrong

    @property
    def data_size(self) -> int:
        whole = sum(file.size for file in self.manifest.whole_files)
        return whole + sum(
            map(_data_size, (self.manifest, *([self.base.manifest] if self.manifest.frozen else [])))
        )

    def held_files(self) -> list[tuple[str, int]]:
        return [(file.name, file.size) for file in self.manifest.all_files]

    def checksums(self, stream: int) -> Iterator[tuple[str, Piece]]:
        for position in self.streams[stream].parameters:
            yield self.layout.parameters[position].name, self.manifest.whole(stream, position)

    def whole_files(self) -> Iterator[tuple[File, bytes | None]]:
        for file in self.manifest.whole_files:
            yield file, None

    @cached_property
    def common_forms(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {name: (tensor.dtype, tensor.shape) for name, tensor in self.common.tensors.items()}

    def common_place(self, name: str) -> tuple[Path, int]:
        return self.place(self.manifest.common.name), self.common.tensors[name].offset

    def extra_plain(self) -> dict[str, Any]:
        stated = self.manifest.extra
        path = self.place(stated.name)
        content = read_whole(path, stated.size)
        if (crc := crc32(content)) != stated.crc:
            raise CheckpointError(f"{path}: {damaged(crc, stated.crc)}: take another checkpoint")
        return parse_members(content, self.manifest, str(path))

    @cached_property
    def _positions(self) -> dict[str, int]:
        """By every name, aliases too."""
        line = enumerate(self.layout.parameters)
        return {name: position for position, p in line for name in (p.name, *p.aliases)}


def file_checksum(
    fd: int, size: int, path: Path, offset: int = 0, progress: Callable[[int], None] = lambda size: None
) -> int:
    """The CRC-32 of `size` bytes of an open file, from `offset` on. Raises `CheckpointError` if it has fewer.

    `progress` is called with the bytes of each part that was read.
    """
    buffer = memoryview(bytearray(min(BUFFER_BYTES, size)))
    crc = 0
    for start in range(0, size, BUFFER_BYTES):
        part = buffer[: min(BUFFER_BYTES, size - start)]
        read_exactly(fd, [part], offset + start, path)
        crc = crc32(part, crc)
        progress(part.nbytes)
    return crc


def _data_size(manifest: Manifest) -> int:
    return sum(file.size - file.header_size for file in manifest.files)


def _summary(file: File) -> str:
    return f"{file.size} bytes with a header of {file.header_size} ({file.crc:08x})"
