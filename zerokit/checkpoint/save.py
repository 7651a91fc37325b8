"""`save`: every rank writes its own pieces, rank 0 the rest, and one rename commits them all."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

from zerokit import files
from zerokit.checkpoint import background
from zerokit.checkpoint.background import Saving
from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.common import encode as encode_tensors
from zerokit.checkpoint.disk import explained, new_file, write_exactly, write_file
from zerokit.checkpoint.extents import RankFile, Stream, file_name, names_of, rank_file
from zerokit.checkpoint.manifest import COMMON_NAME, EXTRA_NAME, NAME, File, Manifest, Scalars, own_checksum
from zerokit.checkpoint.plan import PieceKey
from zerokit.checkpoint.recognise import foreign_to_step
from zerokit.checkpoint.requests import Request, write
from zerokit.checkpoint.retention import Retention, prune
from zerokit.checkpoint.run import (
    LATEST_NAME,
    Latest,
    next_latest,
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


@dataclass(frozen=True, slots=True)
class Written:
    """A rank's file: the CRC-32 of its header and of each of its extents."""

    size: int
    header_size: int
    header_crc: int
    crcs: list[int]


@dataclass(frozen=True, slots=True)
class Contents:
    """The manifest's part about the ranks' files."""

    step: int
    layout: Layout
    streams: tuple[Stream, ...]
    scalars: tuple[Scalars, ...]
    written: list[Written]
    weights_only: bool


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
        keep: spares steps for which it returns True; asked on rank 0. Where `keep_last` is not given, the newest step
            and what these two spare stay.

    Returns the step's directory, or a `Saving`. Raises `CheckpointError` on every rank if any of them fails, or the
    background save before this one did and some rank has not raised its error yet; then the directory is as before.
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
        if type(step) is not int or step < 0:
            raise UsageError(f"step={step!r}: expected an integer of at least 0")
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

        def begin() -> Path:
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
            if not arguments.weights_only:
                complete(part, cards, scalars, values)
            contents = Contents(step, layout, streams, tuple(scalars), written, arguments.weights_only)
            _publish(staging[0], _finish(work, contents, part.rest), weights_only=arguments.weights_only)
            if retention.wanted:
                try:
                    prune(target.parent, retention)
                except CheckpointError as error:
                    warnings.warn(
                        f"{target} is saved, but older steps stay: {error}", ZerokitWarning, stacklevel=2
                    )

        together.on_first(finish)


def _begin(target: Path, *, overwrite: bool) -> Staging:
    require_run(target.parent)
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


def _finish(work: Path, contents: Contents, rest: Rest) -> bytes:
    """Rank 0's part: common, extra and the manifest, whose bytes are returned."""
    layout, streams, step, written = contents.layout, contents.streams, contents.step, contents.written
    for rank, file in enumerate(written):
        path = work / file_name(rank, layout.world)
        if not path.exists() or path.stat().st_size != file.size:
            raise CheckpointError(
                f"{path}: rank {rank}'s file is not there: the run directory is not shared between the nodes"
            )
    common = encode_tensors(rest.tensors)
    write_file(work / COMMON_NAME, common)
    text = json.dumps(rest.members, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    write_file(work / EXTRA_NAME, text)
    content = Manifest(
        step,
        layout,
        streams,
        contents.scalars,
        _checksums(layout, streams, step, written),
        tuple(
            File(file_name(rank, layout.world), w.size, w.header_size, w.header_crc)
            for rank, w in enumerate(written)
        ),
        File(COMMON_NAME, len(common), 0, crc32(common)),
        File(EXTRA_NAME, len(text), 0, crc32(text)),
        contents.weights_only,
    ).to_bytes()
    write_file(work / NAME, content)
    return content


def _publish(staging: Staging, manifest: bytes, *, weights_only: bool) -> None:
    """Commit a step, and make it the run's newest."""
    run, name = staging.target.parent, staging.target.name
    crc = own_checksum(manifest)
    assert crc is not None
    latest = next_latest(run, name, crc, weights_only=weights_only)
    replaced = _referenced_checksum(run, name)
    if latest is not None and replaced is not None:
        write_latest(run, replace(latest, crcs=(crc, replaced)))
    staging.commit()
    if latest is not None:
        write_latest(run, latest)
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
