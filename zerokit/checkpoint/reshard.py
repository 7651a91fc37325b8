"""A checkpoint cut for another number of ranks: byte ranges copied, no tensor decoded.

Ranges are the common refinement of the old cuts and the new ones. Their checksums combine to those of the old slices,
which verifies what was read, and to those of the new ones, which the new manifest states; no byte is read twice for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from zerokit import __version__, files
from zerokit.checkpoint.checksum import Piece, combine, crc32
from zerokit.checkpoint.conversion import Work, converting
from zerokit.checkpoint.copying import Copier, Progress
from zerokit.checkpoint.disk import explained, sync_directory, write_exactly, write_file
from zerokit.checkpoint.extents import names_of, rank_file
from zerokit.checkpoint.formats import open_source
from zerokit.checkpoint.journal import Request
from zerokit.checkpoint.manifest import COMMON_NAME, EXTRA_NAME, MAX_WORLD, NAME, File, Manifest, own_checksum
from zerokit.checkpoint.plan import Key, PieceKey
from zerokit.checkpoint.recognise import foreign_to_checkpoint
from zerokit.checkpoint.run import Latest, step_name, write_latest
from zerokit.checkpoint.slices import Want, check_copied, copy_elements, copy_file
from zerokit.checkpoint.source import Source
from zerokit.checkpoint.staging import require_apart
from zerokit.errors import UsageError
from zerokit.layout import Layout


def reshard(
    source: str | os.PathLike[str],
    world: int,
    output: str | os.PathLike[str] | None = None,
    *,
    jobs: int | None = None,
    force: bool = False,
    resume: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write the checkpoint `source` as `world` ranks would have saved it, byte for byte.

    A checkpoint of DeepSpeed or DCP (FSDP2) keeps its format; `convert` writes another one. Every byte that is copied
    is verified; the result is synced to the disk and appears whole or not at all.
    A step becomes a step; a run becomes a run of one step, with its `latest`. `load` needs none of this: it reads
    checkpoints of any world size.

    Args:
        source: the directory of a step, or of a run, whose newest step is taken.
        world: number of ranks, at least 1.
        output: a directory that does not exist yet; by default beside the source, such as `run.to-16`.
        jobs: threads that copy; up to four by default.
        force: replace an existing output; a run only if it holds no more than one step.
        resume: take over the files that a killed one of the same output, source and world has finished. Without it such
            a one stays where it is, and a `ZerokitWarning` names it, until a conversion to the same output succeeds.
        progress: called with the bytes copied and the bytes in all, often; what it raises ends the work.

    Returns the step's directory: the output, or in it. Raises `UsageError` for an impossible `world` or `jobs`, and
    `CheckpointError` if the source is damaged or no checkpoint, or the output cannot be written; there is no output
    then, or it is as before.
    """
    return cut(source, world, output, jobs=jobs, force=force, resume=resume, progress=progress).path


@dataclass(frozen=True, slots=True)
class Cut:
    """What was written: the step's directory `path`, in the run `output` or `output` itself.

    `taken_bytes`: of its files, those that an interrupted conversion had finished.
    """

    output: Path
    path: Path
    step: int
    world_before: int
    taken_bytes: int
    format: str = "zerokit"


def cut(
    source: str | os.PathLike[str],
    world: int,
    output: str | os.PathLike[str] | None,
    *,
    jobs: int | None,
    force: bool,
    resume: bool,
    progress: Progress | None,
) -> Cut:
    """`reshard`, with a summary of what was written."""
    opened = open_source(source)
    if opened.format in ("deepspeed", "dcp"):  # those that have writers
        from zerokit.checkpoint.formats.convert import convert_source

        done = convert_source(
            opened,
            output,
            format=opened.format,
            world=world,
            jobs=jobs,
            force=force,
            resume=resume,
            progress=progress,
        )
        return Cut(done.output, done.path, done.step, done.source_world, done.taken_bytes, done.format)
    return write_cut(opened, world, output, jobs=jobs, force=force, resume=resume, progress=progress)


def write_cut(
    source: Source,
    world: int,
    output: str | os.PathLike[str] | None,
    *,
    jobs: int | None,
    force: bool,
    resume: bool,
    progress: Progress | None,
) -> Cut:
    """Write any source in zerokit's format, cut for `world` ranks. Arguments and errors as of `reshard`."""
    if not 1 <= world <= MAX_WORLD:
        raise UsageError(f"world={world!r}: expected an integer from 1 to {MAX_WORLD}")
    source.warn()
    layout, of_run = source.layout.for_world(world), source.run is not None
    path = (source.run or source.path).resolve()
    target = path.with_name(f"{path.name}.to-{world}") if output is None else Path(output)
    require_apart(source.path, target)
    request = Request(
        target.name,
        source.manifest_crc,
        {"command": "reshard", "zerokit": __version__, "world": world, "of a run": of_run},
    )
    with converting(target, request, resume=resume, force=force, foreign=foreign_to_checkpoint) as work:
        step = work.path / step_name(source.step) if of_run else work.path
        if not step.is_dir():
            with explained(step, "created"):
                files.system().mkdir(step)
        crc = own_checksum(_write(source, layout, work, step, jobs, progress))
        if of_run:
            assert crc is not None
            sync_directory(step)
            write_latest(work.path, Latest(step.name, (crc,)))
    path = target / step.name if of_run else target
    return Cut(target, path, source.step, source.world, work.taken_bytes)


def _write(
    source: Source, layout: Layout, work: Work, step: Path, jobs: int | None, progress: Progress | None
) -> bytes:
    """Everything of a step, in the directory `step`; returns its manifest."""
    manifest = source.manifest
    source.check_files()
    described = []
    with Copier[Key](
        jobs=jobs, total=source.data_size, progress=progress, synced=work.journal.note
    ) as copier:
        copier.take_over(work.pieces)
        for rank in range(layout.world):
            file = rank_file(layout, manifest.streams, manifest.step, rank)
            described.append(File(file.name, file.size, len(file.header), crc32(file.header)))
            if work.has(step / file.name, file.size):
                continue
            target = copier.target(step / file.name, file.size)
            write_exactly(target.fd, [file.header], 0, target.path)
            wants = (
                Want(
                    extent.stream,
                    source.layout.positions[extent.parameter.name],
                    extent.parameter.name,
                    extent.interval,
                    extent.offset,
                )
                for extent in file.extents
            )
            copy_elements(source, copier, wants, target)
            copier.release(target)
        wholes = {}
        for whole, content in source.whole_files():
            wholes[whole.name] = whole
            if work.has(step / whole.name, whole.size):
                continue
            if content is not None:
                write_file(step / whole.name, content)
                continue
            target = copier.target(step / whole.name, whole.size)
            copy_file(source.path / whole.name, whole, copier, target)
            copier.release(target)
    check_copied(source, copier.pieces)
    checksums = _recombined(manifest, layout, copier.pieces)
    content = replace(
        manifest,
        layout=layout,
        checksums=checksums,
        files=tuple(described),
        common=wholes[COMMON_NAME],
        extra=wholes[EXTRA_NAME],
    ).to_bytes()
    write_file(step / NAME, content)
    return content


def _recombined(
    manifest: Manifest, layout: Layout, pieces: Mapping[Key, Piece]
) -> tuple[tuple[int, ...], ...]:
    """The checksums of the new slices, from those of the pieces."""
    by_parameter: dict[tuple[int, int], list[tuple[int, Piece]]] = {}
    for key, piece in pieces.items():
        if isinstance(key, PieceKey):
            by_parameter.setdefault((key.stream, key.position), []).append((key.start, piece))
    checksums = []
    for number, stream in enumerate(manifest.streams):
        crcs = []
        for position, name in zip(stream.parameters, names_of(layout, stream), strict=True):
            parts = iter(sorted(by_parameter.get((number, position), []), key=lambda part: part[0]))
            for _, cut in layout.cuts(name):
                crcs.append(_take(parts, cut.numel * stream.element_bytes))
        checksums.append(tuple(crcs))
    return tuple(checksums)


def _take(parts: Iterator[tuple[int, Piece]], size: int) -> int:
    """The checksum of the next `size` bytes."""
    whole = Piece(0, 0)
    while whole.size < size:
        whole = combine((whole, next(parts)[1]))
    assert whole.size == size
    return whole.crc
