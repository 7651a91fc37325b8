"""`save`: every rank writes its own pieces, rank 0 writes the rest, and one rename commits them all."""

from __future__ import annotations

import os
import warnings
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, overload

from safetensors.torch import save as save_tensors

from zerokit import files
from zerokit.checkpoint import run as runs
from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.disk import MAX_TEXT_BYTES, explained, new_file, write_exactly, write_file
from zerokit.checkpoint.extra import decode, parse_members
from zerokit.checkpoint.manifest import (
    COMMON_NAME,
    EXTRA_NAME,
    MAX_STEP,
    NAME,
    File,
    Manifest,
    Scalars,
    own_checksum,
    parse_manifest,
)
from zerokit.checkpoint.prune import Retention, foreign_to_step, prune_after_save
from zerokit.checkpoint.run import step_name
from zerokit.checkpoint.safetensors import (
    LENGTH_BYTES,
    Extent,
    RankFile,
    Stream,
    file_name,
    parse_header,
    rank_file,
    slice_count,
)
from zerokit.checkpoint.snapshot import (
    Arguments,
    Part,
    Rest,
    Slices,
    complete,
    require_agreement,
    require_equal,
    take,
)
from zerokit.checkpoint.staging import Staging, remove_gone
from zerokit.checkpoint.state import host_bytes, merge
from zerokit.checkpoint.strict import compact
from zerokit.checkpoint.together import Saving, Together, last_failure, start_saving
from zerokit.errors import CheckpointError, ScheduleError, UsageError, ZerokitWarning
from zerokit.layout import Layout
from zerokit.runtime import ZeroOptimizer

_NAMED: dict[Path, set[str]] = {}
"""By run, the steps that this process has saved, and so may be named by `latest`."""


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
        run_directory: made if it does not exist; it must be shared by all nodes. Islands (`zerokit.LocalSteps`) save
            into `run_directory/island-0`, `island-1` and so on; each is a whole run, and may lie on a disk of its own.
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
    runtime = optimizer.runtime
    runtime.control.finish()
    runtime.gathering.take_changes()  # weights that were clamped, say, since the last step: masters are what is written
    failed = last_failure(optimizer)
    together = Together(runtime.collectives)
    together.raise_any(failed)  # here, where it cannot be overlooked: a failed save ends no later one
    require_equal("blocking", [repr(each) for each in together.exchange(blocking)])  # which selects the group
    together = together if blocking else Together(runtime.collectives, background=True)
    retention = Retention(keep_last, keep_every, keep)
    if not weights_only:
        optimizer.settle(step)
    local = optimizer.local_steps
    islands = optimizer.islands
    if islands is not None and local is None:
        raise UsageError(
            "save() of an island without local steps: create zerokit.LocalSteps(optimizer) first"
        )
    outer = {} if local is None or weights_only else local.streams()
    part: Part | Exception
    try:
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise UsageError(f"step={step!r}: expected an integer from 0 to {MAX_STEP}")
        retention.check()
        whole = Path(os.path.abspath(run_directory))
        run = str(whole if islands is None else runs.island_run(whole, islands.index))
        arguments = Arguments(run, step, overwrite, weights_only, keep_last, keep_every)
        part = take(optimizer, arguments, extra, outer, copied=not blocking)
    except Exception as error:  # raised on every rank, below
        part = error

    def work() -> Path:
        target = _commit(together, part, retention, None if local is None else partial(local.committed, step))
        if islands is None:
            return Path(run_directory, target.name)
        if islands.rank == 0:
            runs.set_aside_islands(target.parents[1], islands.count, step)
        return Path(run_directory, target.parent.name, target.name)

    return work() if blocking else start_saving(optimizer, work)


def _commit(
    together: Together, part: Part | Exception, retention: Retention, others: Callable[[], None] | None
) -> Path:
    """Write what all ranks have taken, as the directory returned; `others` returns when other islands have, too."""
    together.raise_any(part if isinstance(part, Exception) else None)
    assert isinstance(part, Part)
    cards = together.exchange(part.card)
    require_agreement(cards)
    arguments, layout, rank, step = part.card.arguments, part.layout, together.rank, part.card.arguments.step
    target = Path(arguments.run) / runs.step_name(step)
    streams, scalars, values = merge(layout, [card.description for card in cards])
    with ExitStack() as stack:
        staging: list[Staging] = []
        contents: list[Contents] = []
        asked: list[Retention] = []

        def begin() -> Path:
            asked.append(retention.asked({*runs.list_steps(target.parent), step}))
            if not arguments.weights_only:
                complete(part, cards, scalars, values)
            contents.append(contents_of(arguments, layout, streams, tuple(scalars), part.rest))
            staging.append(_begin(target, overwrite=arguments.overwrite))
            stack.callback(staging[0].discard)
            return staging[0].work

        work = together.on_first(begin)
        file = rank_file(layout, streams, step, rank)
        own = together.each(lambda: write_rank(work, file, streams, part.slices, layout))
        written = together.exchange(own)

        def finish() -> None:
            content = write_rest(work, contents[0], written)
            _publish(staging[0], content, weights_only=arguments.weights_only)
            if retention.wanted:
                try:
                    if others is not None:
                        others()  # a step that only some islands have replaces no older one
                    prune_after_save(target.parent, asked[0])
                except (CheckpointError, ScheduleError) as error:
                    warnings.warn(
                        f"{target} is saved, but older steps stay: {error}", ZerokitWarning, stacklevel=2
                    )

        together.on_first(finish)
    return target


def _warn_of_another_job(run: Path) -> None:
    latest, named = runs.readable_latest(run), _NAMED.get(run.resolve())
    if latest is not None and named and latest.name not in named:
        warnings.warn(
            f"{run}: another process has saved {latest.name} since this one saved {max(named)}: two jobs in one run "
            "directory supersede each other's steps: give each a directory of its own",
            ZerokitWarning,
            stacklevel=2,
        )


def _begin(target: Path, *, overwrite: bool) -> Staging:
    runs.require_run(target.parent)
    _warn_of_another_job(target.parent)
    replaces = overwrite
    if os.path.lexists(target) and not overwrite:
        if not runs.unreferenced(target):
            raise CheckpointError(
                f"{target}: this step is already saved: pass overwrite=True to replace it, or save another step, "
                "or in another run directory (zerokit.check_run checks this before training)"
            )
        replaces = True  # its writer was killed before it was announced
    with explained(target.parent, "created"):
        files.make_directories(target.parent)
    return Staging(target, force=replaces, foreign=foreign_to_step)


def _publish(staging: Staging, manifest: bytes, *, weights_only: bool) -> None:
    """Commit a step, and make it the run's newest."""
    run, name = staging.target.parent, staging.target.name
    crc = own_checksum(manifest)
    assert crc is not None
    later = runs.steps_to_supersede(run, name)
    begins = not (weights_only and later)  # weights alone begin no training before later steps
    latest, replaced = runs.readable_latest(run), runs.stated_checksum(run / name)
    if begins:
        _NAMED.setdefault(run.resolve(), set()).add(name)
    if begins and replaced is not None and latest is not None and latest.name == name:
        runs.write_latest(run, runs.Latest(name, (crc, replaced)))
    staging.commit()
    if begins:
        runs.mark_superseded(later)
        runs.write_latest(run, runs.Latest(name, (crc,)))
    staging.discard()
    remove_gone(run, name, runs.LATEST_NAME)


_BATCH_BYTES = 64 << 20
"""Written in one call: what a device holds is copied to the host so much at a time."""

Written = tuple[File, "array[int]"]
"""A rank's file, and the CRC-32 of each of its extents."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What rank 0 writes: the small files, and the manifest but for what the ranks' files turn out to be."""

    common: bytes
    extra: bytes
    manifest: Manifest


def write_rank(
    work: Path, file: RankFile, streams: tuple[Stream, ...], slices: Slices, layout: Layout
) -> Written:
    """Write a rank's file in the directory `work`. Raises `CheckpointError`."""
    if not work.is_dir():
        raise CheckpointError(f"{work}: not there: the run directory is not shared between the nodes")
    path, line = work / file.name, layout.parameters
    wanted = {(streams[e.stream].kind, line[e.position].name) for e in file.extents}
    if missing := sorted(wanted - slices.keys()):
        kind, name = missing[0]
        raise CheckpointError(f"{kind} of {name} is missing on this rank, which others have")
    crcs = array("I")
    with new_file(path, file.size) as fd:
        write_exactly(fd, [file.header], 0, path)
        for batch in _batches(file.extents):
            held = [slices[streams[e.stream].kind, line[e.position].name] for e in batch]
            buffers = [host_bytes(tensor) for tensor in held]
            assert [buffer.nbytes for buffer in buffers] == [extent.size for extent in batch]
            write_exactly(fd, buffers, batch[0].offset, path)
            crcs.extend(map(crc32, buffers))
    return File(file.name, file.size, len(file.header), crc32(file.header)), crcs


def _batches(extents: Iterable[Extent]) -> Iterator[list[Extent]]:
    """Neighbours, for one vectored call each."""
    batch: list[Extent] = []
    for extent in extents:
        if batch and extent.offset + extent.size - batch[0].offset > _BATCH_BYTES:
            yield batch
            batch = []
        batch.append(extent)
    if batch:
        yield batch


def contents_of(
    arguments: Arguments,
    layout: Layout,
    streams: tuple[Stream, ...],
    scalars: tuple[Scalars, ...],
    rest: Rest,
) -> Contents:
    """What rank 0 is to write. Raises `CheckpointError` for what `load` would refuse."""
    step = arguments.step
    where = f"{Path(arguments.run) / step_name(step)} cannot be saved"
    common = save_tensors(dict(rest.tensors), {"format": "zerokit"})
    extra = compact(rest.members)
    manifest = Manifest(
        step,
        layout,
        streams,
        scalars,
        tuple(array("I", bytes(4 * slice_count(layout, stream))) for stream in streams),
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
    parse_header(common, len(common), f"{where}: {COMMON_NAME}")
    plain = parse_members(extra, manifest, f"{where}: {EXTRA_NAME}")
    for key in ("user", "groups", "values"):
        decode(plain.get(key), rest.tensors, f"{where}: {key}")
    return Contents(common, extra, manifest)


def write_rest(work: Path, contents: Contents, written: list[Written]) -> bytes:
    """Rank 0's part: common, extra and the manifest, whose bytes are returned."""
    draft = contents.manifest
    for rank, (file, _) in enumerate(written):
        path = work / file.name
        if not path.exists() or path.stat().st_size != file.size:
            raise CheckpointError(
                f"{path}: rank {rank}'s file is not there: the run directory is not shared between the nodes"
            )
    write_file(work / COMMON_NAME, contents.common)
    write_file(work / EXTRA_NAME, contents.extra)
    content = replace(
        draft,
        checksums=_checksums(draft.layout, draft.streams, draft.step, written),
        files=tuple(file for file, _ in written),
    ).to_bytes()
    write_file(work / NAME, content)
    return content


def _checksums(
    layout: Layout, streams: tuple[Stream, ...], step: int, written: list[Written]
) -> tuple[array[int], ...]:
    """Every slice's CRC-32, from the order of the files to the manifest's."""
    crcs: dict[tuple[int, int], array[int]] = {}
    for rank, (_, held) in enumerate(written):
        for extent, crc in zip(rank_file(layout, streams, step, rank).extents, held, strict=True):
            crcs.setdefault((extent.stream, extent.position), array("I")).append(crc)
    none = array("I")
    return tuple(
        array("I", chain.from_iterable(crcs.get((number, position), none) for position in stream.parameters))
        for number, stream in enumerate(streams)
    )
