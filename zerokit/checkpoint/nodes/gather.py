"""`gather`: an ordinary run of what several nodes' directories hold, each slice from one where it is right."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from zerokit import files
from zerokit.checkpoint.checksum import Part, Pieces, crc32, damaged
from zerokit.checkpoint.copying import Copier, Options, Progress, converting
from zerokit.checkpoint.disk import (
    explained,
    make_directory,
    opened,
    read_exactly,
    read_whole,
    sync_directory,
    sync_file,
    write_exactly,
    write_file,
)
from zerokit.checkpoint.latest import LATEST_NAME, Latest
from zerokit.checkpoint.manifest import NAME, own_checksum, parse_manifest
from zerokit.checkpoint.nodes.complete import listed
from zerokit.checkpoint.nodes.given import Paths, given_directories
from zerokit.checkpoint.nodes.joined import Joined, join
from zerokit.checkpoint.prune import foreign_to_checkpoint
from zerokit.checkpoint.reader import BUFFER_BYTES, file_checksum
from zerokit.checkpoint.requests import Request
from zerokit.checkpoint.run import step_name
from zerokit.errors import CheckpointError, UsageError
from zerokit.files import path_of

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Gathered:
    """The result of `gather`: the run `output`, and the step's directory `path` in it, of `world` ranks.

    `notes`: what was passed over, as sentences. `mended`: what was damaged in a directory and came from another.
    """

    output: Path
    path: Path
    step: int
    world: int
    notes: tuple[str, ...]
    mended: tuple[str, ...]


def gather(
    paths: Paths,
    output: str | os.PathLike[str],
    *,
    jobs: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> Gathered:
    """Write a run with the newest step that nodes' directories hold together, as a save into a shared one would have.

    A slice that is damaged in one directory is taken from another that has a copy. The output is synced to the disk
    and appears whole or not at all.

    Args:
        paths: directories of runs or steps: paths, or `host:path` for what is fetched with ssh. Some may be missing as
            long as the others have their copies.
        output: a directory that does not exist yet.
        jobs: threads that copy; up to four by default.
        force: replace an existing output of zerokit's, if it holds no more than one step.
        progress: called with the bytes copied and the bytes in all, often; what it raises ends the work.

    Returns what was written. Raises `CheckpointError` where no step is complete, where something is damaged in all
    directories that have it, or where the output cannot be written; there is no output then, or it is as before.
    """
    target, options = path_of(output), Options(jobs, force, progress)
    with given_directories(paths, beside=target, report=progress) as directories:
        joined = join(directories)
        if joined.manifest.frozen:
            raise UsageError(
                f"{joined.shown}: its frozen parameters are in the directory {joined.manifest.frozen} beside it, so it "
                "is a step of an ordinary run: copy that run"
            )
        name, passed = step_name(joined.step), list[str]()
        with joined.reading(), converting(joined, target, options, foreign_to_checkpoint) as work:
            while True:
                make_directory(work / name)
                try:
                    joined.settle((file.name for file in joined.manifest.all_files), progress)
                    mended = _write(joined, work / name, options)
                    break
                except CheckpointError:
                    if not (unreadable := joined.pass_over_unreadable()):
                        raise
                    passed += unreadable
                    files.remove_tree(work / name)
            sync_directory(work / name)
            write_file(work / LATEST_NAME, Latest(name, (joined.manifest_crc,)).text().encode())
        return Gathered(target, target / name, joined.step, joined.world, joined.notes, (*passed, *mended))


def _write(joined: Joined, step: Path, options: Options) -> list[str]:
    """Everything of a step; returns what was damaged and came from another directory."""
    manifest = joined.manifest
    content = read_whole(joined.path / NAME)
    parse_manifest(content, str(joined.path / NAME))
    if own_checksum(content) != joined.manifest_crc:
        raise CheckpointError(f"{joined.path}: was replaced while it was read: try again")
    total = sum(file.size - file.header_size for file in manifest.all_files)
    with Copier(jobs=options.jobs, total=total, progress=options.progress) as copier:
        for rank in range(manifest.world):
            file = joined.rank_file(rank)
            target = copier.target(step / file.name, file.size)
            write_exactly(target.fd, [file.header], 0, target.path)
            place = joined.place(file.name)
            wanted = (
                Request(
                    Part(one.stream, one.position, one.interval.start),
                    place,
                    one.offset,
                    one.size,
                    target,
                    one.offset,
                )
                for one in file.extents
            )
            copier.copy(joined, wanted)
            copier.release(target)
        for whole in manifest.whole_files:
            target = copier.target(step / whole.name, whole.size)
            copier.copy(joined, [Request(whole.name, joined.place(whole.name), 0, whole.size, target, 0)])
            copier.release(target)
    mended, lost = [], []
    for wrong in _wrong(joined, copier.pieces):
        if options.progress is not None:
            options.progress(total, total)
        first = joined.place(wrong.file)
        if shown := _replace(joined, step / wrong.file, wrong, options.progress):
            mended.append(f"{joined.named(str(first.parent))}: {wrong.what}: taken from {shown}")
        else:
            lost.append(wrong)
    if lost:
        raise CheckpointError(f"{joined.shown}: {_lost(joined, lost)}")
    write_file(step / NAME, content)
    return mended


class _Wrong(NamedTuple):
    """`size` bytes of a file, from byte `offset` on, whose CRC-32 should be `crc`; `what` says what is wrong."""

    file: str
    offset: int
    size: int
    crc: int
    what: str


def _wrong(joined: Joined, pieces: Pieces) -> Iterator[_Wrong]:
    manifest = joined.manifest
    for (number, position, rank), what in joined.wrong_slices([pieces]).items():
        ((cut, crc),) = ((cut, crc) for own, cut, crc in manifest.slices(number, position) if own == rank)
        (place,) = joined.locate(number, position, cut)
        size = cut.numel * manifest.streams[number].element_bytes
        yield _Wrong(manifest.files[rank].name, place.offset, size, crc, what)
    for file in manifest.whole_files:
        if (crc := pieces.whole[file.name].crc) != file.crc:
            yield _Wrong(file.name, 0, file.size, file.crc, f"{file.name}: {damaged(crc, file.crc)}")


def _replace(joined: Joined, target: Path, wrong: _Wrong, progress: Progress | None) -> str:
    """Write what was damaged from a directory where it is right; returns what that is called, or ""."""
    for directory, path in joined.copies(wrong.file):
        directory.fetch([path], progress)
        right = False
        with suppress(CheckpointError), opened(path) as source:
            right = file_checksum(source, wrong.size, path, wrong.offset) == wrong.crc
        if right and _copy(path, target, wrong):
            return directory.shown
    return ""


def _copy(path: Path, target: Path, wrong: _Wrong) -> bool:
    """Copy a part of a file, and sync it; whether it was still right."""
    crc, buffer = 0, memoryview(bytearray(min(BUFFER_BYTES, wrong.size)))
    with explained(target, "opened"):
        out = os.open(target, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        with opened(path) as source:
            for start in range(0, wrong.size, BUFFER_BYTES):
                part = buffer[: min(BUFFER_BYTES, wrong.size - start)]
                read_exactly(source, [part], wrong.offset + start, path)
                crc = crc32(part, crc)
                write_exactly(out, [part], wrong.offset + start, target)
        sync_file(out, wrong.size, target)
    finally:
        os.close(out)
    return crc == wrong.crc


def _lost(joined: Joined, lost: list[_Wrong]) -> str:
    told = []
    for wrong in lost[:_MOST_NAMED]:
        where = listed(directory.shown for directory, _ in joined.copies(wrong.file))
        told.append(f"{wrong.what} in every directory that has it ({where})")
    more = f"; and {len(lost) - _MOST_NAMED} more" if len(lost) > _MOST_NAMED else ""
    return (
        f"{'; '.join(told)}{more}: nothing was written: name more directories that have copies, or those of an older "
        "step, such as run/step-00000100"
    )
