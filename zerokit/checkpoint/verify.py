"""`verify`: reads every byte of a checkpoint, and reports all damage and its place."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from zerokit.checkpoint.checksum import damaged
from zerokit.checkpoint.copying import Progress
from zerokit.checkpoint.disk import check_size, despite_damage, entries_of, is_there, opened, size_of
from zerokit.checkpoint.entries import Uncut
from zerokit.checkpoint.formats import open_source, recognised
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.latest import LATEST_NAME
from zerokit.checkpoint.manifest import NAME
from zerokit.checkpoint.nodes.given import Paths, alone, given_directories
from zerokit.checkpoint.nodes.joined import Joined, Look, join
from zerokit.checkpoint.nodes.record import NODE_NAME
from zerokit.checkpoint.nodes.scan import has_nodes
from zerokit.checkpoint.reader import Checkpoint, file_checksum
from zerokit.checkpoint.run import ISLANDS_NAME, SUPERSEDED_NAME, committed, find_step, island_runs, step_name
from zerokit.checkpoint.uncut import check_uncut
from zerokit.errors import CheckpointError, StorageError


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
    headers and sizes were checked, and nothing else can be. `without_frozen`: frozen parameters are in no file.
    `missing`: which files none of the nodes' directories has, and which nodes do. `notes`: what was passed over there.
    """

    path: Path
    step: int | None
    world: int | None
    slices: int
    bytes_read: int
    findings: tuple[Finding, ...]
    unread: int = 0
    without_checksums: bool = False
    without_frozen: bool = False
    missing: str = ""
    notes: tuple[str, ...] = ()

    @property
    def intact(self) -> bool:
        return not self.findings and not self.missing


def verify(path: Paths, progress: Progress | None = None) -> Report:
    """Read every byte of the checkpoint at `path`: a step, or a run's newest step; or in several directories of nodes.

    Of nodes' directories all copies are read; those on other machines (`host:path`) are fetched with ssh.

    A checkpoint of another framework is compared with the checksums that its format has. Damage is reported, not
    raised. Raises `CheckpointError` where there is no checkpoint, and where the operating system fails to read a file,
    which says nothing about its bytes.
    """
    return _chosen(path, progress, every=False)[-1]


def verify_all(path: Paths, progress: Progress | None = None) -> tuple[Report, ...]:
    """Verify every step of the run at `path`, ascending, or the one step at `path`."""
    return _chosen(path, progress, every=True)


def _chosen(path: Paths, progress: Progress | None, *, every: bool) -> tuple[Report, ...]:
    if (one := alone(path)) is not None and not has_nodes(one):
        return _reports(one, progress, every=every)
    with given_directories(path, report=progress) as directories:
        look = Look(directories)
        if (newest := look.newest) is None and not look.holdings:
            join(directories)  # raises
        bad = tuple(Finding("", text) for one in look.holdings for text in (one.damaged, one.note) if text)
        if newest is None:
            return (Report(Path(look.where), None, None, 0, 0, bad),)
        keys = look.keys() if every else [newest]
        reports = []
        for key in keys:
            joined = look.joined(key)
            with joined.reading():
                reports.append(_verify_joined(joined, progress))
        last = reports[-1]
        reports[-1] = replace(last, findings=(*bad, *last.findings), unread=len(look.keys()) - len(keys))
        return tuple(reports)


def _verify_joined(joined: Joined, progress: Progress | None) -> Report:
    """Every copy of every file is read."""
    manifest, findings = joined.manifest, list[Finding]()
    parts = []
    for part in joined.parts():
        (holding,) = part.holdings
        there = [file for file in manifest.all_files if is_there(part.path / file.name)]
        expected = {file.name for file in there}
        if holding.record is not None:
            expected.update(file.name for file in holding.record.files(manifest))
        parts.append((part, expected, there))
    read = _Reading(sum(file.size for *_, there in parts for file in there), progress)
    for part, names, there in parts:
        fetched = [part.path / file.name for file in there]
        directory = joined.directories[part.holdings[0].holder]
        directory.fetch(fetched, progress)
        for found in _findings(part, read, names):
            problem = joined.named(found.problem)
            findings.append(replace(found, file=str(Path(part.shown, found.file)), problem=problem))
        directory.drop(fetched)
    slices = sum(map(len, manifest.checksums))
    return Report(
        Path(joined.shown),
        joined.step,
        joined.world,
        slices,
        read.done,
        tuple(findings),
        without_frozen=manifest.frozen == "",
        missing=joined.missing,
        notes=joined.notes,
    )


def _reports(path: Path, progress: Progress | None, *, every: bool) -> tuple[Report, ...]:
    if recognised(path) is not None:
        return (_verify_foreign(path, progress),)
    choice = find_step(path, sound=False)
    runs = island_runs(path) if choice.run is None else [choice.run]
    steps = [step for run in runs for step in committed(run)] or [choice.path]
    wanted = steps if every else [choice.path]
    reports: list[Report] = []
    bases: dict[Path, tuple[Finding, ...]] = {}
    for step in wanted:
        faults = choice.faults if step == choice.path else ()
        try:
            report = _verify(step, faults, progress, bases, in_run=bool(runs))
        except StorageError:
            if is_there(step):
                raise
            continue  # a save beside this has removed it: there is a newer one now
        if report.intact or is_there(step):
            reports.append(replace(report, unread=len(steps) - len(wanted)))
    return tuple(reports) or _reports(path, progress, every=every)


class _Reading:
    """Counts bytes that were read, and tells `progress`."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total, self.done, self._progress = total, 0, progress

    def __call__(self, size: int) -> None:
        self.done += size
        if self._progress is not None:
            self._progress(self.done, self.total)


def _verify(
    step: Path,
    faults: tuple[str, ...],
    progress: Progress | None,
    bases: dict[Path, tuple[Finding, ...]],
    *,
    in_run: bool,
) -> Report:
    """`bases` has the findings in frozen parameters beside steps, by directory: each is read once."""
    try:
        checkpoint = Checkpoint(step)
    except CheckpointError as error:
        return Report(step, None, None, 0, 0, (_finding(NAME, error, step),))
    base, lost = None, []
    if checkpoint.manifest.frozen:
        try:
            base = checkpoint.base
        except CheckpointError as error:
            lost.append(_finding(checkpoint.manifest.frozen, error, step.parent))
    unread = [checkpoint] if base is None or base.path in bases else [checkpoint, base]
    read = _Reading(sum(size for each in unread for _, size in each.held_files()), progress)
    findings = [_finding(LATEST_NAME, fault, step.parent) for fault in faults]
    if in_run and step.name != step_name(checkpoint.step):
        findings.append(Finding(NAME, f"describes step {checkpoint.step}"))
    findings += [*_findings(checkpoint, read), *lost]
    if base is not None:
        if base.path not in bases:
            found = _findings(base, read)
            bases[base.path] = tuple(replace(each, file=f"{base.path.name}/{each.file}") for each in found)
        findings += bases[base.path]
    slices = sum(map(len, checkpoint.manifest.checksums))
    return Report(
        step,
        checkpoint.step,
        checkpoint.world,
        slices,
        read.done,
        tuple(findings),
        without_frozen=checkpoint.manifest.frozen == "",
    )


def _verify_foreign(path: Path, progress: Progress | None) -> Report:
    try:
        source = open_source(path)
    except CheckpointError as error:
        return Report(path, None, None, 0, 0, (_finding("", error, path),))
    assert isinstance(source, ForeignCheckpoint)
    read = _Reading(source.verifiable_size, progress)
    findings = tuple(Finding(file, problem) for file, problem in source.verified(read))
    slices = sum(len(stored.streams) for stored in source.described.parameters)
    return Report(
        source.path, source.step, source.world, slices, read.done, findings, without_checksums=not read.total
    )


def _findings(
    checkpoint: Checkpoint, read: _Reading, only: Collection[str] | None = None
) -> Iterator[Finding]:
    """The problems in the files of a checkpoint's directory, or in those called as `only`."""
    manifest = checkpoint.manifest
    for name, findings in (
        ("", _strangers(checkpoint)),
        *((file.name, _rank(checkpoint, rank, read)) for rank, file in enumerate(manifest.files)),
        (manifest.common.name, _common(checkpoint, read)),
        (manifest.extra.name, _extra(checkpoint, read)),
        *((place.name, _uncut(checkpoint, place, read)) for place in manifest.uncut),
    ):
        if name and only is not None and name not in only:
            continue
        try:
            yield from findings
        except CheckpointError as error:
            yield _finding(name, error, checkpoint.path)


def _strangers(checkpoint: Checkpoint) -> Iterator[Finding]:
    files = (file.name for file in checkpoint.manifest.all_files)
    known = {NAME, NODE_NAME, SUPERSEDED_NAME, ISLANDS_NAME, *files}
    names = [entry.name for entry in entries_of(checkpoint.path)]
    yield from (
        Finding(name, "not a part of this checkpoint: move it away") for name in sorted(set(names) - known)
    )


def _rank(checkpoint: Checkpoint, rank: int, read: _Reading) -> Iterator[Finding]:
    try:
        file = checkpoint.rank_file(rank)
    except CheckpointError as error:
        yield _finding(NAME, error, checkpoint.path)
        return
    path = checkpoint.place(file.name)
    with opened(path) as fd:
        size = size_of(fd, path)
        if size != file.size:
            wrong = "truncated" if size < file.size else "too long"
            yield Finding(file.name, f"{wrong}: {size} bytes, expected {file.size}")
        try:
            checkpoint.check_header(fd, rank)
        except CheckpointError as error:
            yield _finding(file.name, error, checkpoint.path)
        read(len(file.header))
        for number, position, part, offset, extent_size in file.extents:
            if offset + extent_size > size:
                problem = "beyond the end of the file"
            else:
                try:
                    crc = file_checksum(fd, extent_size, path, offset, read)
                except StorageError:
                    raise
                except CheckpointError as error:
                    problem = str(error).removeprefix(f"{path}: ")
                else:
                    expected = checkpoint.manifest.checksum(number, position, rank)
                    problem = "" if crc == expected else damaged(crc, expected)
            if problem:
                kind, name = checkpoint.streams[number].kind, checkpoint.layout.parameters[position].name
                yield Finding(file.name, problem, kind, name, part.start, part.stop)


def _common(checkpoint: Checkpoint, read: _Reading) -> Iterator[Finding]:
    """The stated tensors must be there, and those of generators; their bytes are verified with the whole file."""
    manifest, tensors = checkpoint.manifest, checkpoint.common.tensors
    read(manifest.common.size)
    for scalar in manifest.scalars:
        name, shape = f"optimizer/{scalar.kind}", (len(scalar.parameters), *scalar.shape)
        tensor = tensors.get(name)
        if tensor is None or (tensor.dtype, tensor.shape) != (scalar.dtype, shape):
            what = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            yield Finding(
                manifest.common.name, f"holds {what} as {name}, expected {scalar.dtype} {list(shape)}"
            )
    if not manifest.weights_only:
        plain = None
        with despite_damage():  # reported with that file
            plain = checkpoint.extra_plain()
        if plain is not None:
            checkpoint.check_generators(plain)


def _extra(checkpoint: Checkpoint, read: _Reading) -> Iterator[Finding]:
    checkpoint.extra()
    read(checkpoint.manifest.extra.size)
    yield from ()


def _uncut(checkpoint: Checkpoint, place: Uncut, read: _Reading) -> Iterator[Finding]:
    path = checkpoint.place(place.name)
    with opened(path) as fd:
        check_size(fd, place.size, path)
        crc = file_checksum(fd, place.size, path, 0, read)
    if crc != place.crc:
        yield Finding(place.name, damaged(crc, place.crc))
    else:
        check_uncut(path, place)


def _finding(file: str, error: CheckpointError | str, folder: Path) -> Finding:
    """An error as a finding about `file` of `folder`, which need not be named again. `StorageError` is none: raised."""
    if isinstance(error, StorageError):
        raise error
    text = str(error)
    return Finding(file, text.removeprefix(f"{folder / file}: "))
