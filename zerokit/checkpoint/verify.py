"""`verify`: reads every byte of a checkpoint, and reports all damage and its place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from zerokit.checkpoint.checksum import damaged
from zerokit.checkpoint.copying import Progress
from zerokit.checkpoint.disk import explained, opened
from zerokit.checkpoint.formats import open_source, recognised
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.manifest import NAME
from zerokit.checkpoint.reader import Checkpoint, file_checksum
from zerokit.checkpoint.run import LATEST_NAME, SUPERSEDED_NAME, committed, find_step, island_runs, step_name
from zerokit.checkpoint.safetensors import Extent
from zerokit.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem in a file, or in the whole if `file` is ""; in one slice of one parameter if `stream` is given.

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
            return f"{self.file}: {self.problem}" if self.file else self.problem
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


def verify(path: str | os.PathLike[str], progress: Progress | None = None) -> Report:
    """Read every byte of the checkpoint at `path`: a step, or a run's newest step.

    A checkpoint of another framework is compared with the checksums that its format has. Damage is reported, not
    raised. Raises `CheckpointError` only where there is no checkpoint.
    """
    return _reports(Path(path), progress, every=False)[0]


def verify_all(path: str | os.PathLike[str], progress: Progress | None = None) -> tuple[Report, ...]:
    """Verify every step of the run at `path`, ascending, or the one step at `path`."""
    return _reports(Path(path), progress, every=True)


def _reports(path: Path, progress: Progress | None, *, every: bool) -> tuple[Report, ...]:
    if recognised(path) is not None:
        return (_verify_foreign(path, progress),)
    choice = find_step(path, sound=False)
    runs = island_runs(path) if choice.run is None else [choice.run]
    steps = [step for run in runs for step in committed(run)] or [choice.path]
    wanted = steps if every else [choice.path]
    reports = []
    for step in wanted:
        faults = choice.faults if step == choice.path else ()
        report = _verify(step, faults, progress, in_run=bool(runs))
        if report.intact or not every or step.exists():  # a save beside this may have removed an older one
            reports.append(replace(report, unread=len(steps) - len(wanted)))
    return tuple(reports)


def _verify(step: Path, faults: tuple[str, ...], progress: Progress | None, *, in_run: bool) -> Report:
    try:
        checkpoint = Checkpoint(step)
    except CheckpointError as error:
        return Report(step, None, None, 0, 0, (_finding(NAME, error, step),))
    verification = _Verification(checkpoint, progress or (lambda done, total: None))
    findings = list(verification.run())
    if in_run and step.name != step_name(checkpoint.step):
        findings.insert(0, Finding(NAME, f"describes step {checkpoint.step}"))
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
        self._checkpoint, self._progress = checkpoint, progress
        manifest = checkpoint.manifest
        self._total = sum(file.size for file in (*manifest.files, manifest.common, manifest.extra))
        self._done = 0
        self.bytes_read = 0

    def run(self) -> Iterator[Finding]:
        manifest = self._checkpoint.manifest
        yield from self._strangers()
        for file, findings in (
            *((file, self._rank(rank)) for rank, file in enumerate(manifest.files)),
            (manifest.common, self._common()),
            (manifest.extra, self._extra()),
        ):
            try:
                yield from findings
            except CheckpointError as error:
                yield _finding(file.name, error, self._checkpoint.path)
            if not file.header_size:  # it was read whole
                self._advance(file.size)

    def _strangers(self) -> Iterator[Finding]:
        known = {NAME, SUPERSEDED_NAME, *(name for name, _ in self._checkpoint.held_files())}
        with explained(self._checkpoint.path, "listed"):
            for name in sorted(set(os.listdir(self._checkpoint.path)) - known):
                yield Finding(name, "not a part of this checkpoint: move it away")

    def _rank(self, rank: int) -> Iterator[Finding]:
        checkpoint = self._checkpoint
        try:
            file = checkpoint.rank_file(rank)
        except CheckpointError as error:
            yield _finding(NAME, error, checkpoint.path)
            return
        path = checkpoint.path / file.name
        with opened(path) as fd:
            size = os.fstat(fd).st_size
            if size != file.size:
                wrong = "truncated" if size < file.size else "too long"
                yield Finding(file.name, f"{wrong}: {size} bytes, expected {file.size}")
            try:
                checkpoint.check_header(fd, rank)
            except CheckpointError as error:
                yield _finding(file.name, error, checkpoint.path)
            self._advance(len(file.header))
            for extent in file.extents:
                if problem := self._problem(fd, extent, rank, size, path):
                    kind = checkpoint.streams[extent.stream].kind
                    name, part = checkpoint.layout.parameters[extent.position].name, extent.interval
                    yield Finding(file.name, problem, kind, name, part.start, part.stop)

    def _problem(self, fd: int, extent: Extent, rank: int, size: int, path: Path) -> str:
        """What is wrong with a slice; "" if nothing is."""
        if extent.offset + extent.size > size:
            self._advance(extent.size, read=False)
            return "beyond the end of the file"
        end = self._done + extent.size
        try:
            crc = file_checksum(fd, extent.size, path, extent.offset, self._advance)
        except CheckpointError as error:
            self._advance(end - self._done, read=False)
            return str(error).removeprefix(f"{path}: ")
        expected = self._checkpoint.manifest.checksum(extent.stream, extent.position, rank)
        return "" if crc == expected else damaged(crc, expected)

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

    def _extra(self) -> Iterator[Finding]:
        self._checkpoint.extra()
        yield from ()

    def _advance(self, size: int, *, read: bool = True) -> None:
        self._done += size
        self.bytes_read += size if read else 0
        self._progress(self._done, self._total)


def _finding(file: str, error: CheckpointError | str, folder: Path) -> Finding:
    """An error as a finding about `file` of `folder`, which need not be named again."""
    text = str(error)
    return Finding(file, text.removeprefix(f"{folder / file}: "))
