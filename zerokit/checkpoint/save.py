"""`save`: every rank writes its own pieces, rank 0 the rest, and one rename commits them all."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

from zerokit import files
from zerokit.checkpoint import background
from zerokit.checkpoint.background import Saving
from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.common import encode as encode_tensors
from zerokit.checkpoint.disk import MAX_TEXT_BYTES, explained, new_file, write_exactly, write_file
from zerokit.checkpoint.extents import RankFile, Stream, file_name, names_of, rank_file, slice_count
from zerokit.checkpoint.extra import decode
from zerokit.checkpoint.header import LENGTH_BYTES, header_size, parse_header
from zerokit.checkpoint.manifest import (
    COMMON_NAME,
    EXTRA_NAME,
    MAX_STEP,
    NAME,
    File,
    Manifest,
    Scalars,
    own_checksum,
)
from zerokit.checkpoint.parsing import parse_manifest
from zerokit.checkpoint.plan import PieceKey
from zerokit.checkpoint.recognise import foreign_to_step
from zerokit.checkpoint.requests import Request, write
from zerokit.checkpoint.rest import parse_rest
from zerokit.checkpoint.retention import Retention, prune
from zerokit.checkpoint.run import (
    LATEST_NAME,
    Latest,
    list_steps,
    mark_superseded,
    other_steps,
    read_latest,
    require_run,
    stated_checksum,
    step_name,
    unreferenced,
    write_latest,
)
from zerokit.checkpoint.snapshot import Arguments, Part, Rest, Slices, complete, require_agreement, take
from zerokit.checkpoint.staging import Staging, remove_gone
from zerokit.checkpoint.state import merge
from zerokit.checkpoint.together import Together
from zerokit.errors import CheckpointError, UsageError, ZerokitWarning
from zerokit.layout import Layout
from zerokit.runtime import ZeroOptimizer

_NAMED: dict[Path, set[str]] = {}
"""By run, the steps that this process has saved, and so may be named by `latest`."""


@dataclass(frozen=True, slots=True)
class Written:
    """A rank's file: the CRC-32 of its header and of each of its extents."""

    size: int
    header_size: int
    header_crc: int
    crcs: list[int]


@dataclass(frozen=True, slots=True)
class Contents:
    """What rank 0 writes: the small files, and the manifest but for what the ranks' files turn out to be."""

    common: bytes
    extra: bytes
    manifest: Manifest


@overload
def save(
    run_directory: str | os.PathLike[str],
    optimizer: ZeroOptimizer,
    *,
    step: int,
    extra: Any = ...,
    overwrite: bool = ...,
    weights_only: bool = ...,
    blocking: Literal[True] = ...,
    keep_last: int | None = ...,
    keep_every: int | None = ...,
    keep: Callable[[int], bool] | None = ...,
) -> Path: ...


@overload
def save(
    run_directory: str | os.PathLike[str],
    optimizer: ZeroOptimizer,
    *,
    step: int,
    extra: Any = ...,
    overwrite: bool = ...,
    weights_only: bool = ...,
    blocking: Literal[False],
    keep_last: int | None = ...,
    keep_every: int | None = ...,
    keep: Callable[[int], bool] | None = ...,
) -> Saving: ...


def save(
    run_directory: str | os.PathLike[str],
    optimizer: ZeroOptimizer,
    *,
    step: int,
    extra: Any = None,
    overwrite: bool = False,
    weights_only: bool = False,
    blocking: bool = True,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep: Callable[[int], bool] | None = None,
) -> Path | Saving:
    """Write the whole training state as `run_directory/step-########`, and point `latest` at it. Collective.

    Masters, every optimizer state, frozen parameters, persistent buffers, parameter groups' options, the loss scale and
    random number generators are written; gradients are not, so call it between steps.

    Args:
        run_directory: made if it does not exist; it must be shared by all nodes.
        optimizer: its model comes with it.
        step: names the checkpoint.
        extra: JSON-like data, tensors included, such as schedulers' `state_dict()`s and the sampler's position.
            Rank 0's is written, and `load` returns it.
        overwrite: replace this step where it is there already, at once and only when the new one is complete and on
            the disk; both take space until then. By default that is refused: `check_run` checks before training. Later
            steps stay, but they are not this training's: `load` does not take them as the newest any more.
        weights_only: write parameters and buffers, and no optimizer's state: trained parameters as their masters, so
            that nothing is rounded (`consolidate` converts), frozen ones and buffers as they are. `load` of the whole
            state passes over them.
        blocking: False returns as soon as this rank's state is copied into a buffer in host memory, which the
            optimizer keeps (a line of `memory()`), and writes it beside the training. One such save at a time: the
            next one waits for it. `wait()` for the last one before the process group is destroyed.
        keep_last: once this step is committed, remove others but for the newest so many that are intact. Later ones, of
            another training, stay until this one has passed them. A step that cannot be removed is a warning.
        keep_every: spares steps whose number is a multiple of it.
        keep: spares steps for which it returns True; asked on rank 0, before anything is written. Where `keep_last` is
            not given, the newest step and what these two spare stay.

    Returns the step's directory, or a `Saving`. Raises `CheckpointError` on every rank if any of them fails, or the
    background save before this one did and some rank has not raised its error yet; then the directory is as before,
    unless one of the last calls failed, the sync of the renamed step, the replacement of `latest`, or the marks of
    later steps that the new one supersedes: the new step is there then, whole, and `load` takes it, or of marked and
    unmarked later ones the newest without a mark.
    Ranks whose arguments, or whose options of the optimizer, differ are named. A rank that does not come raises
    `ScheduleError` on the others after the optimizer's time-out.
    """
    parts = optimizer.parts
    parts.control.finish()
    parts.walk.absorb_changes()  # weights that were clamped, say, since the last step: masters are what is written
    failed = background.failure(optimizer)
    together = Together(parts.collectives, background=not blocking)
    together.raise_any(failed)  # here, where it cannot be overlooked: a failed save ends no later one
    retention = Retention(keep_last, keep_every, keep)
    part: list[Part] = []
    cause: list[Exception] = []
    try:
        run = os.path.abspath(run_directory)
        arguments = Arguments(run, step, overwrite, weights_only, keep_last, keep_every)
        part.append(take(optimizer, arguments, extra, copied=not blocking))
    except Exception as error:  # raised on every rank, below
        cause.append(error)

    def own() -> Part:
        if cause:
            raise cause[0]
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise UsageError(f"step={step!r}: expected an integer from 0 to {MAX_STEP}")
        retention.check()
        return part[0]

    def work() -> Path:
        _commit(together, own, retention)
        return Path(run_directory) / step_name(step)

    return work() if blocking else background.start(optimizer, work)


def _commit(together: Together, own: Callable[[], Part], retention: Retention) -> None:
    """Write what all ranks have taken."""
    cards = together.do(lambda: own().card)
    require_agreement(cards)
    part = own()
    arguments, layout, rank = part.card.arguments, part.layout, together.rank
    step = int(str(arguments.step))
    target = Path(arguments.run) / step_name(step)
    streams, scalars, values = merge(layout, [card.description for card in cards])
    with ExitStack() as stack:
        staging: list[Staging] = []
        contents: list[Contents] = []
        asked: list[Retention] = []

        def begin() -> Path:
            asked.append(retention.asked({*list_steps(target.parent), step}))
            if not arguments.weights_only:
                complete(part, cards, scalars, values)
            contents.append(_contents(arguments, layout, streams, tuple(scalars), part.rest))
            staging.append(_begin(target, overwrite=arguments.overwrite))
            stack.callback(staging[0].discard)
            return staging[0].work

        work = together.on_first(begin)
        written = together.do(
            lambda: _write_rank(
                work, rank_file(layout, streams, step, rank), streams, part.slices, layout, rank
            )
        )

        def finish() -> None:
            content = _finish(work, contents[0], written)
            _publish(staging[0], content, weights_only=arguments.weights_only)
            if retention.wanted:
                try:
                    prune(target.parent, asked[0])
                except CheckpointError as error:
                    warnings.warn(
                        f"{target} is saved, but older steps stay: {error}", ZerokitWarning, stacklevel=2
                    )

        together.on_first(finish)


def _warn_of_another_job(run: Path) -> None:
    latest: Latest | None = None
    named = _NAMED.get(run.resolve())
    with suppress(CheckpointError):  # of a damaged one nobody knows
        latest = read_latest(run)
    if latest is not None and named and latest.name not in named:
        warnings.warn(
            f"{run}: another process has saved {latest.name} since this one saved {max(named)}: two jobs in one run "
            "directory supersede each other's steps: give each a directory of its own",
            ZerokitWarning,
            stacklevel=2,
        )


def _begin(target: Path, *, overwrite: bool) -> Staging:
    require_run(target.parent)
    _warn_of_another_job(target.parent)
    replaces = overwrite
    if os.path.lexists(target) and not overwrite:
        if not unreferenced(target):
            raise CheckpointError(
                f"{target}: this step is saved already: save with overwrite=True to replace it, or another step, or in "
                "another run directory (zerokit.check_run checks this before training)"
            )
        replaces = True  # its writer was killed before it was announced
    with explained(target.parent, "created"):
        files.make_directories(target.parent)
    return Staging(target, force=replaces, foreign=foreign_to_step)


def _write_rank(
    work: Path, file: RankFile, streams: tuple[Stream, ...], slices: Slices, layout: Layout, rank: int
) -> Written:
    if not work.is_dir():
        raise CheckpointError(f"{work}: not there: the run directory is not shared between the nodes")
    positions = layout.positions
    requests = [
        Request(
            PieceKey(extent.stream, positions[extent.parameter.name], rank, extent.interval.start),
            extent.offset,
            extent.size,
            slices[streams[extent.stream].kind, extent.parameter.name],
            streams[extent.stream].dtype,
        )
        for extent in file.extents
    ]
    path = work / file.name
    with new_file(path, file.size) as fd:
        write_exactly(fd, [file.header], 0, path)
        crcs = write(fd, requests, path)
    return Written(file.size, len(file.header), crc32(file.header), crcs)


def _contents(
    arguments: Arguments,
    layout: Layout,
    streams: tuple[Stream, ...],
    scalars: tuple[Scalars, ...],
    rest: Rest,
) -> Contents:
    """What rank 0 is to write. Raises `CheckpointError` for what `load` would refuse."""
    step, target = int(str(arguments.step)), Path(arguments.run)
    where = f"{target / step_name(step)} cannot be saved"
    common = encode_tensors(rest.tensors)
    extra = json.dumps(rest.members, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    manifest = Manifest(
        step,
        layout,
        streams,
        scalars,
        tuple((0,) * slice_count(layout, stream) for stream in streams),
        tuple(
            File(file_name(rank, layout.world), LENGTH_BYTES, LENGTH_BYTES, 0) for rank in range(layout.world)
        ),
        File(COMMON_NAME, len(common), 0, crc32(common)),
        File(EXTRA_NAME, len(extra), 0, crc32(extra)),
        arguments.weights_only,
    )
    content = manifest.to_bytes()
    for name, text in ((NAME, content), (EXTRA_NAME, extra)):
        if len(text) > MAX_TEXT_BYTES:
            raise CheckpointError(
                f"{where}: {name} would have {len(text)} bytes, more than the {MAX_TEXT_BYTES} that it may have: give "
                "long data as tensors or arrays"
            )
    parse_manifest(content, f"{where}: {NAME}")
    parse_header(
        common[: header_size(common[:LENGTH_BYTES], len(common), where)],
        len(common),
        f"{where}: {COMMON_NAME}",
    )
    plain = parse_rest(extra, manifest, f"{where}: {EXTRA_NAME}")
    for key in ("user", "groups", "values"):
        decode(plain.get(key), rest.tensors, f"{where}: {key}")
    return Contents(common, extra, manifest)


def _finish(work: Path, contents: Contents, written: list[Written]) -> bytes:
    """Rank 0's part: common, extra and the manifest, whose bytes are returned."""
    draft = contents.manifest
    for rank, file in enumerate(written):
        path = work / draft.files[rank].name
        if not path.exists() or path.stat().st_size != file.size:
            raise CheckpointError(
                f"{path}: rank {rank}'s file is not there: the run directory is not shared between the nodes"
            )
    write_file(work / COMMON_NAME, contents.common)
    write_file(work / EXTRA_NAME, contents.extra)
    content = replace(
        draft,
        checksums=_checksums(draft.layout, draft.streams, draft.step, written),
        files=tuple(
            File(stated.name, w.size, w.header_size, w.header_crc)
            for stated, w in zip(draft.files, written, strict=True)
        ),
    ).to_bytes()
    write_file(work / NAME, content)
    return content


def _publish(staging: Staging, manifest: bytes, *, weights_only: bool) -> None:
    """Commit a step, and make it the run's newest."""
    run, name = staging.target.parent, staging.target.name
    crc = own_checksum(manifest)
    assert crc is not None
    listed, later = other_steps(run, name)
    mark_superseded(listed)  # an earlier version's list, which the new `latest` does without
    begins = not (weights_only and later)  # weights alone begin no training before later steps
    replaced = _referenced_checksum(run, name)
    if begins:
        _NAMED.setdefault(run.resolve(), set()).add(name)
    if begins and replaced is not None:
        write_latest(run, Latest(name, (crc, replaced)))
    staging.commit()
    if begins:
        mark_superseded(later)
        write_latest(run, Latest(name, (crc,)))
    staging.discard()
    remove_gone(run, name, LATEST_NAME)


def _referenced_checksum(run: Path, name: str) -> int | None:
    """The CRC-32 of the manifest of a step that is there, if `latest` names it."""
    try:
        latest: Latest | None = read_latest(run)
    except CheckpointError:
        return None  # nothing that could be read there is lost
    return stated_checksum(run / name) if latest is not None and latest.name == name else None


def _checksums(
    layout: Layout, streams: tuple[Stream, ...], step: int, written: list[Written]
) -> tuple[tuple[int, ...], ...]:
    """Every slice's CRC-32, from the order of the files to the manifest's."""
    crcs: dict[tuple[int, str, int], int] = {}
    for rank, file in enumerate(written):
        extents = rank_file(layout, streams, step, rank).extents
        for extent, crc in zip(extents, file.crcs, strict=True):
            crcs[extent.stream, extent.parameter.name, rank] = crc
    return tuple(
        tuple(crcs[number, name, rank] for name in names_of(layout, stream) for rank in layout.owners(name))
        for number, stream in enumerate(streams)
    )
