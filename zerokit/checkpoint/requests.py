"""Requests: byte ranges of files with their targets, and the engine that reads and checksums them.

Copying and loading differ only in where bytes go: into another file, or into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zerokit.checkpoint.checksum import Key, Part, Pieces, crc32
from zerokit.checkpoint.disk import opened, read_exactly, write_exactly
from zerokit.layout import Interval

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from zerokit.checkpoint.source import Source

VECTOR_BYTES = 64 << 20
"""Neighbours that go into memory are read in one vectored call up to this size."""


@dataclass(eq=False, slots=True)
class Target:
    """An open file of `size` bytes that is written, and the parts that were copied into it."""

    fd: int
    path: Path
    closing: ExitStack
    size: int
    pieces: Pieces = field(default_factory=Pieces)
    unflushed: int = 0
    """Bytes written since the disk was last asked to take what there is."""


class Memory:
    """Memory as the target of a request: all `size` bytes that are read."""

    def __init__(self, size: int) -> None:
        self.content = bytearray(size)

    def buffer(self, at: int, size: int) -> memoryview:
        """The buffer for `size` bytes at byte `at`."""
        return memoryview(self.content)[at : at + size]

    def take(self, at: int, content: memoryview) -> None:
        """Note that `content`, an earlier buffer, has been filled."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Elements of `source_bytes` each become others of `element_bytes` each; no buffer ends inside an element."""

    convert: Callable[[memoryview], ReadableBuffer]
    source_bytes: int
    element_bytes: int


class Request(NamedTuple):
    """`size` bytes from byte `offset` of a file on go to byte `at` of `target`, through `conversion` if there is one.

    `file` is the number of a file of the source, or a path. The checksum of what is read counts under `key`.
    """

    key: Key
    file: int | Path
    offset: int
    size: int
    target: Target | Memory
    at: int
    conversion: Conversion | None = None

    def split(self, most: int) -> Iterator[Request]:
        if self.size <= most:
            yield self
            return
        for start in range(0, self.size, most):
            at = start
            if self.conversion is not None:
                at = start // self.conversion.source_bytes * self.conversion.element_bytes
            size = min(most, self.size - start)
            yield self._replace(offset=self.offset + start, size=size, at=self.at + at)

    def precedes(self, other: Request) -> bool:
        """Whether the other request continues this one, in the file and in the target."""
        if other.file != self.file or other.offset != self.offset + self.size:
            return False
        if isinstance(self.target, Memory):
            return isinstance(other.target, Memory)
        joined = other.target is self.target and other.at == self.at + self.size
        return joined and self.conversion is None and other.conversion is None


def requests_for(
    source: Source,
    stream: int,
    position: int,
    interval: Interval,
    target: Target | Memory,
    at: int,
    conversion: Conversion | None = None,
) -> Iterator[Request]:
    """The requests that bring a stream's elements of a parameter to byte `at` of `target`, in order."""
    element = source.streams[stream].element_bytes
    width = element if conversion is None else conversion.element_bytes
    for file, part, offset in source.locate(stream, position, interval):
        start = part.start
        key, size = Part(stream, position, start), (part.stop - start) * element
        yield Request(key, file, offset, size, target, at + (start - interval.start) * width, conversion)


def by_file(requests: Iterable[Request]) -> dict[int | Path, list[Request]]:
    """The requests of each file."""
    files: dict[int | Path, list[Request]] = {}
    for request in requests:
        files.setdefault(request.file, []).append(request)
    return files


def opening(source: Source, file: int | Path) -> tuple[Path, AbstractContextManager[int]]:
    """A request's file: its path, and what gives its descriptor."""
    if isinstance(file, Path):
        return file, opened(file)
    return source.file_path(file), source.open_file(file)


def neighbours(requests: Iterable[Request], most: int) -> Iterator[list[Request]]:
    """Runs of requests of at most `most` bytes, or of one request, that one call can read."""
    run: list[Request] = []
    size = 0
    for request in requests:
        if run and not (size + request.size <= most and run[-1].precedes(request)):
            yield run
            run, size = [], 0
        run.append(request)
        size += request.size
    if run:
        yield run


def move(fd: int, path: Path, run: Sequence[Request], scratch: memoryview) -> Iterator[tuple[Request, int]]:
    """Read neighbours in one call and move them to their targets; yields their CRC-32s.

    `scratch` has room for what goes into a file. Raises `CheckpointError`.
    """
    first = run[0]
    if isinstance(first.target, Target):
        whole = scratch[: sum(request.size for request in run)]
        read_exactly(fd, [whole], first.offset, path)
        start = 0
        for request in run:
            yield request, crc32(whole[start : start + request.size])
            start += request.size
        content = whole if first.conversion is None else first.conversion.convert(whole)
        write_exactly(first.target.fd, [content], first.at, first.target.path)
        return
    targets = [request.target for request in run if isinstance(request.target, Memory)]
    buffers = [target.buffer(one.at, one.size) for one, target in zip(run, targets, strict=True)]
    read_exactly(fd, buffers, first.offset, path)
    for request, target, buffer in zip(run, targets, buffers, strict=True):
        yield request, crc32(buffer)
        target.take(request.at, buffer)


def read(source: Source, requests: Iterable[Request]) -> Pieces:
    """Fill memory, one source file after the other; returns the checksums. Raises `CheckpointError`."""
    pieces = Pieces()
    for file, wanted in by_file(requests).items():
        path, descriptor = opening(source, file)
        wanted.sort(key=lambda request: request.offset)
        with descriptor as fd:
            for run in neighbours(wanted, VECTOR_BYTES):
                for request, crc in move(fd, path, run, memoryview(b"")):
                    pieces.add(request.key, crc, request.size)
    return pieces
