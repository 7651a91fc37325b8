"""Loads from nodes' directories: each rank reads what its node has, and is sent the rest by ranks whose nodes have it.

Bytes are verified where they arrive, as in every load: a slice that is wrong is read again from each of its holders in
turn. A holder that cannot read its file sends zeros, which the checksums refuse.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import torch

from zerokit.checkpoint.checksum import Part, Pieces, crc32
from zerokit.checkpoint.disk import opened, read_exactly, read_whole
from zerokit.checkpoint.manifest import File, own_checksum, parse_manifest
from zerokit.checkpoint.nodes.complete import Holding
from zerokit.checkpoint.nodes.sending import PIECE_BYTES, view_of
from zerokit.checkpoint.reader import Checkpoint
from zerokit.checkpoint.reading import Reading
from zerokit.checkpoint.requests import Memory, Request, by_file, read
from zerokit.checkpoint.run import Choice
from zerokit.checkpoint.safetensors import file_name
from zerokit.checkpoint.together import Together
from zerokit.errors import CheckpointError

_Slice = tuple[int, int, int]
"""A stream, a position in the line, and the rank whose file has the slice."""
_Range = tuple[int, int, int]
"""A rank's file, a byte of it, and how many from there on."""

_MOST_NAMED = 3
_WRONG = 0xFFFFFFFF
"""In place of the CRC-32 of what could not be read."""


class OnNodes(Checkpoint):
    """A step whose files are on several nodes. Files that this rank's node lacks are brought into memory."""

    def __init__(self, step: Path, manifest: bytes, own: Iterable[Holding]) -> None:
        crc = own_checksum(manifest)
        assert crc is not None
        self._describe(Choice(step), parse_manifest(manifest, str(step)), crc)
        self._own: dict[str, Path] = {}
        for holding in own:
            for file in self.manifest.all_files:
                if file.name not in holding.lacks:
                    self._own.setdefault(file.name, Path(holding.place, file.name))
        self._brought: dict[str, int] = {}

    def __del__(self) -> None:
        for fd in self.__dict__.get("_brought", {}).values():
            os.close(fd)

    def has(self, name: str) -> bool:
        """Whether a file of that name is here."""
        return name in self._own

    def place(self, name: str) -> Path:
        return self._own.get(name, self.path / name)

    def take(self, name: str, content: bytes) -> None:
        """Keep the contents of a file in memory, and read it from there."""
        fd = os.memfd_create(name)
        self._brought[name] = fd
        view = memoryview(content)
        while view:
            view = view[os.write(fd, view) :]
        self._own[name] = Path(f"/proc/self/fd/{fd}")

    def check_files(self) -> None:
        """Which are there was looked at when the step was chosen."""


class FromNodes(Reading):
    """A step on several nodes.

    `holders`: by file's name, the ranks whose nodes have it with the right size. `sources`: of these, one a node.
    """

    source: OnNodes

    def __init__(
        self,
        source: OnNodes,
        together: Together,
        holders: Mapping[str, Sequence[int]],
        sources: Mapping[str, Sequence[int]],
    ) -> None:
        self.source = source
        self._together, self._holders, self._sources = together, holders, sources
        self._tries: dict[_Slice, int] = {}
        """For a slice that was wrong, which of its holders all ranks take it from."""
        self._used: dict[_Slice, set[int]] = {}
        self.repaired: list[str] = []
        """What was wrong, and came from another holder."""
        self.bring(file.name for file in (source.manifest.common, source.manifest.extra))

    # ---- whole files

    def bring(self, names: Iterable[str]) -> None:
        files = {file.name: file for file in self.source.manifest.whole_files}
        wanted = [files[name] for name in names]
        lacking = self._together.each(lambda: [file.name for file in wanted if not self._sound(file)])
        for name in sorted(set().union(*self._together.exchange(lacking))):
            self._bring(files[name], wanted=name in lacking)

    def _sound(self, file: File) -> bool:
        with suppress(CheckpointError):
            return self.source.has(file.name) and _content(self.source.place(file.name), file) is not None
        return False

    def _bring(self, file: File, *, wanted: bool) -> None:
        """From the first rank that has it undamaged."""
        together, content = self._together, None
        with suppress(CheckpointError):
            if together.rank in self._holders.get(file.name, ()):
                content = _content(self.source.place(file.name), file)
        good = [rank for rank, has in enumerate(together.exchange(content is not None)) if has]
        if not good:
            raise CheckpointError(f"{self.source.path / file.name}: damaged on every node that has it")
        sent = together.exchange(content if together.rank == good[0] else None)[good[0]]
        assert sent is not None
        if wanted:
            self.source.take(file.name, sent)

    # ---- slices

    def read(self, requests: Iterable[Request]) -> Pieces:
        together, pieces = self._together, Pieces()
        asked: dict[int, list[Request]] = {}
        for file, wanted in by_file(requests).items():
            assert isinstance(file, int)
            for request in sorted(wanted, key=lambda request: request.offset):
                asked.setdefault(self._holder(file, request), []).append(request)
        for request in self._read_own(asked.pop(together.rank, []), pieces):
            pieces.add(request.key, _WRONG, request.size)
        ranges = {
            holder: [(int(str(one.file)), one.offset, one.size) for one in wanted]
            for holder, wanted in asked.items()
        }
        of_all = together.exchange(ranges)
        self._fetch(asked, of_all, pieces)
        return pieces

    def _holder(self, file: int, request: Request) -> int:
        """The rank that reads what a request wants: this one, if its node has it and it was right so far."""
        if file >= self.source.world:  # of frozen parameters beside the step
            return self._together.rank
        name = file_name(file, self.source.world)
        holders = self._holders[name]
        assert isinstance(request.key, Part)
        key = (request.key.stream, request.key.position, file)
        if (turn := self._tries.get(key)) is not None:
            holder = self._sources[name][turn]
        elif self._together.rank in holders:
            holder = self._together.rank
        else:
            holder = holders[self._together.rank % len(holders)]
        self._used.setdefault(key, set()).add(holder)
        return holder

    def _read_own(self, requests: Sequence[Request], pieces: Pieces) -> Iterator[Request]:
        """Read what this node has; yields what could not be read."""
        for file, wanted in by_file(requests).items():
            assert isinstance(file, int)
            place: int | Path = file
            if file < self.source.world:
                place = self.source.place(file_name(file, self.source.world))
            try:
                pieces.update(read(self.source, [one._replace(file=place) for one in wanted]))
            except CheckpointError:
                yield from wanted

    def _fetch(
        self,
        asked: Mapping[int, Sequence[Request]],
        of_all: Sequence[Mapping[int, Sequence[_Range]]],
        pieces: Pieces,
    ) -> None:
        """Send what others have asked of this rank, and take what it has asked of them."""
        together = self._together
        outgoing, incoming = (torch.empty(PIECE_BYTES, dtype=torch.uint8) for _ in range(2))
        leaving, coming = view_of(outgoing), view_of(incoming)
        for shift in range(1, together.world):
            to, source = (together.rank + shift) % together.world, (together.rank - shift) % together.world
            served, filled = of_all[to].get(together.rank, ()), asked.get(source, ())
            left, due = sum(size for _, _, size in served), sum(one.size for one in filled)
            supply, sink = _Supply(self.source, served), _Sink(filled, pieces)
            with supply:
                while left or due:
                    sent, taken = min(left, PIECE_BYTES), min(due, PIECE_BYTES)
                    supply.fill(leaving[:sent])
                    together.swap(
                        outgoing[:sent] if sent else None, to, incoming[:taken] if taken else None, source
                    )
                    sink.take(coming[:taken])
                    left, due = left - sent, due - taken

    # ---- what was wrong

    def settle(self, by_rank: Sequence[Pieces]) -> bool:
        wrong = self.source.wrong_slices(by_rank)
        used = self._together.exchange({key: self._used.get(key, set()) for key in wrong})
        self._used.clear()
        lost = []
        for key, what in wrong.items():
            from_whom = ", ".join(map(str, sorted(set().union(*(own[key] for own in used)))))
            turn = self._tries.get(key, -1) + 1
            sources = self._sources[file_name(key[2], self.source.world)] if key[2] >= 0 else ()
            if turn < len(sources):
                self._tries[key] = turn
                self.repaired.append(f"{what} as rank {from_whom} has it")
            else:
                lost.append(what)
        if lost:
            more = f"; and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
            raise CheckpointError(
                f"{self.source.path}: damaged on every node that has it: {'; '.join(lost[:_MOST_NAMED])}{more}"
            )
        return not wrong


class _Supply:
    """The bytes of ranges of this node's files, one after the other; zeros for what cannot be read."""

    def __init__(self, source: OnNodes, ranges: Sequence[_Range]) -> None:
        self._source, self._ranges, self._closing = source, iter(ranges), ExitStack()
        self._file, self._fd, self._offset, self._left = -1, -1, 0, 0

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def fill(self, view: memoryview) -> None:
        while view:
            if not self._left:
                file, self._offset, self._left = next(self._ranges)
                if file != self._file:
                    self._open(file)
            part = view[: min(len(view), self._left)]
            place = self._source.place(file_name(self._file, self._source.world))
            try:
                if self._fd < 0:
                    raise CheckpointError(f"{place}: not open")
                read_exactly(self._fd, [part], self._offset, place)
            except CheckpointError:
                part[:] = bytes(len(part))
            self._offset, self._left = self._offset + len(part), self._left - len(part)
            view = view[len(part) :]

    def _open(self, file: int) -> None:
        self._closing.close()
        self._file, self._fd = file, -1
        with suppress(CheckpointError):
            place = self._source.place(file_name(file, self._source.world))
            self._fd = self._closing.enter_context(opened(place))


class _Sink:
    """Memory that requests fill with bytes that come one after the other."""

    def __init__(self, requests: Sequence[Request], pieces: Pieces) -> None:
        self._requests, self._pieces = iter(requests), pieces
        self._request: Request | None = None
        self._buffer, self._filled = memoryview(b""), 0

    def take(self, content: memoryview) -> None:
        while content:
            if self._request is None:
                self._request, self._filled = next(self._requests), 0
                assert isinstance(self._request.target, Memory)
                self._buffer = self._request.target.buffer(self._request.at, self._request.size)
            part = content[: self._request.size - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            content = content[len(part) :]
            if self._filled == self._request.size:
                target = self._request.target
                assert isinstance(target, Memory)
                self._pieces.add(self._request.key, crc32(self._buffer), self._filled)
                target.take(self._request.at, self._buffer)
                self._request = None


def _content(path: Path, file: File) -> bytes | None:
    """A whole file, or None if it is damaged. Raises `CheckpointError` where it cannot be read."""
    content = read_whole(path, file.size, limit=max(file.size, 1))
    return content if crc32(content) == file.crc else None
