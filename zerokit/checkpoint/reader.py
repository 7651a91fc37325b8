"""`Checkpoint`: a checkpoint on disk, read without torch. Nothing is loaded but what is asked for."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zerokit.checkpoint import header
from zerokit.checkpoint.checksum import Piece, combine, crc32
from zerokit.checkpoint.disk import check_size, opened, read_exactly, read_whole
from zerokit.checkpoint.extents import RankFile, rank_file
from zerokit.checkpoint.manifest import BUFFER_PREFIX, NAME, File
from zerokit.checkpoint.plan import PieceKey, damaged, refine
from zerokit.checkpoint.rest import check_generators, parse_rest
from zerokit.checkpoint.run import find_step, read_manifest
from zerokit.checkpoint.source import Source, StoredBuffer, Stretch
from zerokit.errors import CheckpointError, UsageError
from zerokit.layout import Interval

if TYPE_CHECKING:
    from numpy.typing import NDArray

BUFFER_BYTES = 1 << 20


class Checkpoint(Source):
    """A step's directory, or of a run's the newest step; with `whole` the newest that has an optimizer's state, too.

    The manifest is read and verified at once. Raises `CheckpointError` unless `path` holds one that is undamaged.
    """

    def __init__(self, path: str | os.PathLike[str], *, whole: bool = False) -> None:
        choice = find_step(Path(path), whole=whole)
        self.path, self.run = choice.path, choice.run
        """The step's directory, and the run's where `path` was one."""
        self.notes = choice.notes
        """Why it is not the step that the run's `latest` names, as sentences: `warn` shows them."""
        self.manifest, self.manifest_crc = choice.manifest or read_manifest(choice.path)
        self._rank_files: dict[int, RankFile] = {}
        self._crcs: dict[int, dict[str, list[tuple[int, int]]]] = {}
        self._cuts: dict[str, list[tuple[int, Interval]]] = {}

    def read(self, stream: str, name: str) -> NDArray[Any]:
        """A whole parameter in one stream, such as `read("master", "blocks.0.weight")`, as an array of its shape.

        Only its bytes are read, and they are verified. bfloat16 and float8 elements, which numpy does not have, come as
        float32, exactly. Raises `UsageError` for a stream or name that is not there, `CheckpointError` for damage.
        """
        from zerokit.checkpoint.arrays import to_array

        number, first = self.find(stream, name)
        held = self.streams[number]
        slices = self.slice_checksums(number)[first]
        for rank, _ in slices:  # before memory is taken that the files may not justify
            with self._opened(rank):
                pass
        whole = bytearray(self.layout.find(first)[1].interval.numel * held.element_bytes)
        for rank, crc in slices:
            file = self.rank_file(rank)
            extent = file.by_name[number, first]
            start = extent.interval.start * held.element_bytes
            part = memoryview(whole)[start : start + extent.size]
            path = self.path / file.name
            with self._opened(rank) as fd:
                read_exactly(fd, [part], extent.offset, path)
            if crc32(part) != crc:
                raise CheckpointError(
                    f"{path}: {stream}/{first}, elements {extent.interval.start} to {extent.interval.stop}: damaged "
                    f"(CRC-32 {crc32(part):08x}, expected {crc:08x}): take another checkpoint"
                )
        return to_array(whole, held.dtype, self.shapes[first])

    def find(self, stream: str, name: str) -> tuple[int, str]:
        """The number of the stream of that kind which holds the parameter, and the parameter's first name.

        Raises `UsageError` where there is no such stream or parameter.
        """
        first = self._first_names.get(name)
        if first is None:
            raise UsageError(f"{self.path} has no parameter {name!r}: see `zerokit inspect`")
        position = self.layout.positions[first]
        held = {s.kind: number for number, s in enumerate(self.streams) if position in self._held[number]}
        if stream not in held:
            raise UsageError(
                f"{self.path} has no stream {stream!r} of {name!r}, only {', '.join(map(repr, held))}"
            )
        return held[stream], first

    def slice_checksums(self, stream: int) -> dict[str, list[tuple[int, int]]]:
        """`(rank, CRC-32)` of every slice of the stream with that number, in rank order, by parameter."""
        if stream not in self._crcs:
            self._crcs[stream] = dict(self.manifest.slice_checksums(stream))
        return self._crcs[stream]

    def rank_file(self, rank: int) -> RankFile:
        """A rank's file as it must be. Raises `CheckpointError` if the manifest states another one."""
        if rank not in self._rank_files:
            file = rank_file(self.layout, self.streams, self.step, rank)
            stated = self.manifest.files[rank]
            computed = File(file.name, file.size, len(file.header), crc32(file.header))
            if stated != computed:
                raise CheckpointError(
                    f"{self.path / NAME}: describes {file.name} as {_summary(stated)}, but by its layout that file has "
                    f"{_summary(computed)}: the manifest was not written by zerokit, or changed since"
                )
            self._rank_files[rank] = file
        return self._rank_files[rank]

    @contextmanager
    def open_rank(self, rank: int) -> Iterator[int]:
        """The descriptor of a rank's file, whose size and header are as they must be.

        Raises `CheckpointError`, naming the file, if it is missing, of another size or of another header.
        """
        file = self.rank_file(rank)
        with self._opened(rank) as fd:
            check_header(fd, file, self.path / file.name)
            yield fd

    @contextmanager
    def _opened(self, rank: int) -> Iterator[int]:
        """The descriptor of a rank's file, whose size is as it must be."""
        file = self.rank_file(rank)
        path = self.path / file.name
        with opened(path) as fd:
            check_size(fd, file.size, path)
            yield fd

    @cached_property
    def common(self) -> header.Header:
        """The header of `common.safetensors`; the whole file is verified once.

        Raises `CheckpointError` if it is missing, damaged or no safetensors file.
        """
        stated = self.manifest.common
        path = self.path / stated.name
        with opened(path) as fd:
            check_size(fd, stated.size, path)
            crc = file_checksum(fd, stated.size, path)
            if crc != stated.crc:
                raise _damaged(path, crc, stated.crc)
            return read_header(fd, stated.size, path)

    def locate(self, stream: int, name: str, interval: Interval) -> Iterator[Stretch]:
        if name not in self._cuts:
            self._cuts[name] = self.layout.cuts(name)
        element = self.streams[stream].element_bytes
        for rank, cut, part in refine(self._cuts[name], interval):
            extent = self.rank_file(rank).by_name[stream, name]
            yield Stretch(rank, part, extent.offset + (part.start - cut.start) * element)

    def file_path(self, file: int) -> Path:
        return self.path / self.manifest.files[file].name

    def open_file(self, file: int) -> AbstractContextManager[int]:
        return self.open_rank(file)

    def check_files(self) -> None:
        for rank in range(self.world):
            with self.open_rank(rank):
                pass

    def faults(self, by_rank: Sequence[Mapping[PieceKey, Piece]]) -> list[str]:
        return damaged(self.manifest, by_rank)

    @property
    def data_size(self) -> int:
        """Bytes of all slices and of the files that are whole."""
        whole = self.manifest.common.size + self.manifest.extra.size
        return whole + sum(file.size - file.header_size for file in self.manifest.files)

    def held_files(self) -> list[tuple[str, int]]:
        manifest = self.manifest
        return [(file.name, file.size) for file in (*manifest.files, manifest.common, manifest.extra)]

    def checksums(self, stream: int) -> Iterator[tuple[str, Piece]]:
        element = self.streams[stream].element_bytes
        for name, slices in self.slice_checksums(stream).items():
            cuts = self.layout.cuts(name)
            yield (
                name,
                combine(
                    Piece(crc, cut.numel * element) for (_, crc), (_, cut) in zip(slices, cuts, strict=True)
                ),
            )

    def whole_files(self) -> Iterator[tuple[File, bytes | None]]:
        yield self.manifest.common, None
        yield self.manifest.extra, None

    @property
    def buffers(self) -> dict[str, StoredBuffer]:
        path = self.path / self.manifest.common.name
        return {
            name.removeprefix(BUFFER_PREFIX): StoredBuffer(
                tensor.dtype, tensor.shape, path, tensor.offset, tensor.size
            )
            for name, tensor in self.common.tensors.items()
            if name.startswith(BUFFER_PREFIX)
        }

    @property
    def common_forms(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        return {name: (tensor.dtype, tensor.shape) for name, tensor in self.common.tensors.items()}

    @property
    def common_names(self) -> Collection[str]:
        return self.common.tensors.keys()

    def common_tensor(self, name: str) -> tuple[str, tuple[int, ...], bytearray]:
        tensor = self.common.tensors.get(name)
        if tensor is None:
            raise UsageError(f"{self.path / self.manifest.common.name} has no tensor {name!r}")
        path = self.path / self.manifest.common.name
        content = bytearray(tensor.size)
        with opened(path) as fd:
            read_exactly(fd, [content], tensor.offset, path)
        return tensor.dtype, tensor.shape, content

    def extra_plain(self) -> dict[str, Any]:
        stated = self.manifest.extra
        path = self.path / stated.name
        content = read_whole(path, stated.size)
        if crc32(content) != stated.crc:
            raise _damaged(path, crc32(content), stated.crc)
        return parse_rest(content, self.manifest, str(path))

    def check_generators(self, plain: dict[str, Any]) -> None:
        try:
            check_generators(plain, self.common)
        except ValueError as error:
            raise CheckpointError(f"{self.path / self.manifest.common.name}: not valid: {error}") from None

    @cached_property
    def _first_names(self) -> dict[str, str]:
        return {name: p.name for p in self.layout.parameters for name in (p.name, *p.aliases)}

    @cached_property
    def _held(self) -> list[frozenset[int]]:
        return [frozenset(stream.parameters) for stream in self.streams]


def check_header(fd: int, file: RankFile, path: Path) -> None:
    """Raises `CheckpointError` unless the open file begins with the header that it must have."""
    actual = bytearray(len(file.header))
    read_exactly(fd, [actual], 0, path)
    if actual == file.header:
        return
    first = next(index for index, (a, b) in enumerate(zip(actual, file.header, strict=True)) if a != b)
    reason = f"differs from byte {first} on"
    try:
        metadata = header.parse_header(bytes(actual), file.size, str(path)).metadata
    except CheckpointError:
        pass
    else:  # a whole header: of another step, perhaps
        expected = header.parse_header(file.header, file.size, str(path)).metadata
        if strange := [
            f"{key} {metadata.get(key)!r}, not {expected[key]!r}"
            for key in expected
            if metadata.get(key) != expected[key]
        ]:
            reason = f"is of another checkpoint ({', '.join(strange)})"
    raise CheckpointError(f"{path}: its header is damaged or foreign: it {reason}")


def read_header(fd: int, size: int, path: Path) -> header.Header:
    """The header of an open safetensors file of `size` bytes. Raises `CheckpointError`."""
    first = bytearray(min(header.LENGTH_BYTES, size))
    read_exactly(fd, [first], 0, path)
    content = bytearray(header.header_size(bytes(first), size, str(path)))
    read_exactly(fd, [content], 0, path)
    return header.parse_header(bytes(content), size, str(path))


def file_checksum(fd: int, size: int, path: Path, offset: int = 0) -> int:
    """The CRC-32 of `size` bytes of an open file, from `offset` on. Raises `CheckpointError` if it has fewer."""
    buffer = memoryview(bytearray(min(BUFFER_BYTES, size)))
    crc = 0
    for start in range(0, size, BUFFER_BYTES):
        part = buffer[: min(BUFFER_BYTES, size - start)]
        read_exactly(fd, [part], offset + start, path)
        crc = crc32(part, crc)
    return crc


def _damaged(path: Path, crc: int, stated: int) -> CheckpointError:
    return CheckpointError(
        f"{path}: damaged (CRC-32 {crc:08x}, expected {stated:08x}): take another checkpoint"
    )


def _summary(file: File) -> str:
    return f"{file.size} bytes with a header of {file.header_size} ({file.crc:08x})"
