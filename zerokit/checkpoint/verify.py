"""`verify`: read every byte of a checkpoint, and report all that is wrong with it and where."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.copying import Progress
from zerokit.checkpoint.disk import explained, opened, read_exactly
from zerokit.checkpoint.extents import Extent, RankFile
from zerokit.checkpoint.formats import open_source, recognised
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.manifest import NAME
from zerokit.checkpoint.reader import Checkpoint, check_header
from zerokit.checkpoint.run import LATEST_NAME, SUPERSEDED_NAME, committed, find_step
from zerokit.errors import CheckpointError

_BUFFER_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong with a file; with one slice of one parameter, if `stream` is given.

    Elements `start` to `stop` (exclusive) of the flattened parameter are bad, or some of them.
    """

    file: str
    problem: str
    stream: str | None = None
    parameter: str | None = None
    start: int | None = None
    stop: int | None = None

    def __str__(self) -> str:
        if self.stream is None:
            return f"{self.file}: {self.problem}"
        return f"{self.file}: {self.stream}/{self.parameter}, elements {self.start} to {self.stop}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `verify`. `step`, `world` and `slices` are the manifest's: None and 0 if it cannot be read.

    `unread`: how many other steps the run has, of which nothing was read. `without_checksums`: the format has none, so
    headers and sizes were checked, and nothing else can be.
    """

    path: Path
    step: int | None
    world: int | None
    slices: int
    bytes_read: int
    findings: tuple[Finding, ...]
    unread: int = 0
    without_checksums: bool = False

    @property
    def intact(self) -> bool:
        return not self.findings

    def plain(self) -> dict[str, object]:
        """As JSON data."""
        return {"intact": self.intact} | asdict(self) | {"path": str(self.path)}


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> Report:
    """Read every byte of the checkpoint at `path`, a step's directory, or of a run's the newest step.

    A checkpoint of another framework is compared with the checksums that its format has. Damage is reported, not
    raised. Raises `CheckpointError` only where there is no checkpoint.
    """
    if recognised(path) is not None:
        return _verify_foreign(Path(path), progress)
    choice = find_step(Path(path), sound=False)
    report = _verify(choice.path, choice.faults, progress)
    others = 0 if choice.run is None else len(committed(choice.run)) - 1
    return replace(report, unread=others)


def verify_all(path: str | os.PathLike[str], progress: Progress | None = None) -> tuple[Report, ...]:
    """`verify` of every step of the run at `path`, ascending; of the one step where `path` is a step's directory."""
    if recognised(path) is not None:
        return (_verify_foreign(Path(path), progress),)
    choice = find_step(Path(path), sound=False)
    steps = [choice.path] if choice.run is None else committed(choice.run)
    return tuple(_verify(step, choice.faults if step == choice.path else (), progress) for step in steps)


def _verify(step: Path, faults: tuple[str, ...], progress: Progress | None) -> Report:
    try:
        checkpoint = Checkpoint(step)
    except CheckpointError as error:
        return Report(step, None, None, 0, 0, (_finding(NAME, error, step),))
    verification = _Verification(checkpoint, progress or (lambda done, total: None))
    findings = list(verification.run())
    findings[:0] = [_finding(LATEST_NAME, fault, step.parent) for fault in faults]
    slices = sum(map(len, checkpoint.manifest.checksums))
    return Report(step, checkpoint.step, checkpoint.world, slices, verification.bytes_read, tuple(findings))


def _verify_foreign(path: Path, progress: Progress | None) -> Report:
    try:
        source = open_source(path)
    except CheckpointError as error:
        return Report(path, None, None, 0, 0, (_finding("", error, path),))
    assert isinstance(source, ForeignCheckpoint)
    total, done = source.verifiable_size, 0

    def advance(size: int) -> None:
        nonlocal done
        done += size
        if progress is not None:
            progress(done, total)

    findings = tuple(Finding(file, problem) for file, problem in source.verified(advance))
    slices = sum(len(stored.streams) for stored in source.described.parameters)
    return Report(source.path, source.step, source.world, slices, done, findings, without_checksums=not total)


class _Verification:
    def __init__(self, checkpoint: Checkpoint, progress: Progress) -> None:
        self._checkpoint = checkpoint
        self._progress = progress
        manifest = checkpoint.manifest
        self._total = sum(file.size for file in (*manifest.files, manifest.common, manifest.extra))
        self._done = 0
        self.bytes_read = 0
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))

    def run(self) -> Iterator[Finding]:
        checkpoint, manifest = self._checkpoint, self._checkpoint.manifest
        yield from self._foreign()
        for rank, stated in enumerate(manifest.files):
            try:
                file = checkpoint.rank_file(rank)
            except CheckpointError as error:
                yield _finding(NAME, error, checkpoint.path)
                continue
            try:
                with opened(checkpoint.path / file.name) as fd:
                    yield from self._rank(fd, file, rank)
            except CheckpointError as error:
                yield _finding(stated.name, error, checkpoint.path)
        try:
            yield from self._common()
        except CheckpointError as error:
            yield _finding(manifest.common.name, error, checkpoint.path)
        self._advance(manifest.common.size)
        try:
            checkpoint.extra()
        except CheckpointError as error:
            yield _finding(manifest.extra.name, error, checkpoint.path)
        self._advance(manifest.extra.size)

    def _foreign(self) -> Iterator[Finding]:
        manifest = self._checkpoint.manifest
        known = {
            NAME,
            SUPERSEDED_NAME,
            *(file.name for file in (*manifest.files, manifest.common, manifest.extra)),
        }
        with explained(self._checkpoint.path, "listed"):
            for name in sorted(set(os.listdir(self._checkpoint.path)) - known):
                yield Finding(name, "not a part of this checkpoint: move it away")

    def _rank(self, fd: int, file: RankFile, rank: int) -> Iterator[Finding]:
        path = self._checkpoint.path / file.name
        size = os.fstat(fd).st_size
        if size != file.size:
            wrong = "truncated" if size < file.size else "too long"
            yield Finding(file.name, f"{wrong}: {size} bytes, expected {file.size}")
        try:
            check_header(fd, file, path)
        except CheckpointError as error:
            yield _finding(file.name, error, self._checkpoint.path)
        self._advance(len(file.header))
        for extent in file.extents:
            problem = self._problem(fd, extent, rank, size, path)
            if problem:
                kind, name = self._checkpoint.streams[extent.stream].kind, extent.parameter.name
                yield Finding(file.name, problem, kind, name, extent.interval.start, extent.interval.stop)

    def _problem(self, fd: int, extent: Extent, rank: int, size: int, path: Path) -> str:
        """What is wrong with a slice, read through one buffer; "" if nothing is."""
        if extent.offset + extent.size > size:
            self._advance(extent.size, read=False)
            return "beyond the end of the file"
        crc, left, offset = 0, extent.size, extent.offset
        while left:
            part = self._buffer[: min(left, _BUFFER_BYTES)]
            try:
                read_exactly(fd, [part], offset, path)
            except CheckpointError as error:
                self._advance(left, read=False)
                return str(error).removeprefix(f"{path}: ")
            crc = crc32(part, crc)
            left -= part.nbytes
            offset += part.nbytes
            self._advance(part.nbytes)
        slices = self._checkpoint.slice_checksums(extent.stream)[extent.parameter.name]
        expected = slices[rank - slices[0][0]][1]  # the ranks that hold some are neighbours
        return "" if crc == expected else f"damaged (CRC-32 {crc:08x}, expected {expected:08x})"

    def _common(self) -> Iterator[Finding]:
        """The stated tensors must be there, and those of generators; their bytes are verified with the whole file."""
        checkpoint, manifest = self._checkpoint, self._checkpoint.manifest
        tensors = checkpoint.common.tensors
        for scalar in manifest.scalars:
            name, shape = f"optimizer/{scalar.kind}", (len(scalar.parameters), *scalar.shape)
            tensor = tensors.get(name)
            if tensor is None or (tensor.dtype, tensor.shape) != (scalar.dtype, shape):
                what = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                yield Finding(
                    manifest.common.name, f"holds {what} as {name}, expected {scalar.dtype} {list(shape)}"
                )
        if not manifest.weights_only:
            try:
                plain = checkpoint.extra_plain()
            except CheckpointError:
                return  # reported with that file
            checkpoint.check_generators(plain)

    def _advance(self, size: int, *, read: bool = True) -> None:
        self._done += size
        self.bytes_read += size if read else 0
        self._progress(self._done, self._total)


def _finding(file: str, error: CheckpointError | str, folder: Path) -> Finding:
    """An error as a finding about `file` of `folder`, which need not be named again."""
    text = str(error)
    return Finding(file, text.removeprefix(f"{folder / file}: "))
