"""`save`: every rank writes its own pieces, rank 0 writes the rest, and one rename commits them all."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from zerokit import files
from zerokit.checkpoint import run as runs
from zerokit.checkpoint.bases import holds
from zerokit.checkpoint.by_rank import Member, differing, members_of
from zerokit.checkpoint.disk import explained, is_there, write_file
from zerokit.checkpoint.frozen import Frozen, set_apart, write_base
from zerokit.checkpoint.latest import LATEST_NAME, Latest, readable_latest, write_latest
from zerokit.checkpoint.manifest import MAX_STEP, own_checksum, streams_in_files
from zerokit.checkpoint.owned import owned_by_all
from zerokit.checkpoint.prune import Retention, foreign_to_step, prune_after_save
from zerokit.checkpoint.safetensors import rank_file
from zerokit.checkpoint.snapshot import (
    Arguments,
    Card,
    Part,
    complete,
    receive,
    require_agreement,
    require_equal,
    take,
)
from zerokit.checkpoint.staging import Staging, remove_gone
from zerokit.checkpoint.state import merge
from zerokit.checkpoint.together import Saving, Together, finish_saving, start_saving
from zerokit.checkpoint.writing import Contents, contents_of, write_rank, write_rest
from zerokit.errors import CheckpointError, ScheduleError, UsageError, ZerokitWarning
from zerokit.runtime import ZeroOptimizer

T = TypeVar("T")

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
    frozen: Frozen = ...,
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
    frozen: Frozen = ...,
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
    frozen: Frozen = "always",
) -> Path | Saving:
    """Write the whole training state as `run_directory/step-########`, and point `latest` at it. Collective.

    Masters, every optimizer state, frozen parameters, persistent buffers, parameter groups' options, the loss scale and
    random number generators are written; gradients are not, so call it between steps.

    Args:
        run_directory: made if it does not exist; it must be shared by all nodes. Islands (`zerokit.LocalSteps`) save
            into `run_directory/island-0`, `island-1` and so on; each is a whole run, and may lie on a disk of its own.
        optimizer: its model comes with it.
        step: names the checkpoint.
        extra: JSON-like data, tensors included, such as schedulers' `state_dict()`s and the sampler's position. A
            value that differs between ranks, such as the state of each rank's own data loader, is kept for each rank,
            and `load` on as many ranks returns each rank its own; on another number of ranks `load` refuses it and
            names it. If all ranks give dicts with the same text keys, members are compared one by one; anything else
            is compared as a whole. If only rank 0 gives an `extra`, and the others None, all ranks get it.
        overwrite: replace this step if it exists, in one operation once the new one is complete and on the disk; both
            take space until then. By default that is refused, which `check_run` finds before training. Later steps
            stay, but belong to another training: `load` no longer takes them as the newest.
        weights_only: write parameters and buffers, and no optimizer's state: trained parameters as their masters, so
            that nothing is rounded (`consolidate` converts), frozen ones and buffers as they are. `load` of the whole
            state passes over them.
        blocking: False returns as soon as this rank's state is copied into a buffer in host memory, which the
            optimizer keeps (a line of `memory()`), and writes it beside the training. One such save at a time: the
            next one waits for it. `wait()` for the last one before the process group is destroyed.
        keep_last: once this step is committed, remove all but this many of the newest intact steps, and the last one
            before skipped steps (`optimizer.skipped_steps`). Later ones, of another training, stay until this one has
            passed them. A step that cannot be removed is a warning.
        keep_every: keep steps whose number is a multiple of it, too.
        keep: keep steps for which it returns True, too; it is called on rank 0, before anything is written. Without
            `keep_last`, the newest step stays beside those that these two keep.
        frozen: where frozen parameters go, such as the base model under LoRA. "always" writes them into the step, which
            is then complete in itself. "once" writes them into a directory `frozen-…` of the run, which steps share as
            long as the contents stay the same, whoever changes them: a save reads this rank's part and compares
            checksums (a second for 16 GB), and writes all anew where they differ. Whoever copies a step copies that
            directory with it; it is removed with the last step that needs it. "never" writes only checksums: `load`
            takes the values from the model as it was built, and refuses others. Without frozen parameters all three
            are the same.

    Returns the step's directory, or a `Saving`.

    Raises `CheckpointError` on every rank if any of them fails, or if the background save before this one failed and a
    rank has not raised its error yet. The directory is then as before, with one exception: if the very last calls fail
    (the sync of the renamed step, the replacement of `latest`, the marks of later steps that the new one supersedes),
    the new step is there, complete, and `load` takes the newest step without such a mark. Ranks whose arguments, or
    whose options of the optimizer, differ are named. If a rank does not come, the others raise `ScheduleError` after
    the optimizer's time-out.
    """
    runtime = optimizer.runtime
    runtime.control.finish()
    runtime.engine.take_changes()  # weights that were clamped, say, since the last step: masters are what is written
    together = Together(runtime.collectives)
    finish_saving(
        optimizer, together
    )  # raises here, where it cannot be overlooked: a failed save ends no later one
    asked = together.exchange((blocking, frozen))
    require_equal("blocking", [repr(each) for each, _ in asked])  # which selects the group
    require_equal("frozen", [repr(each) for _, each in asked])
    retention = Retention(keep_last, keep_every, keep)
    if not weights_only:
        runtime.gradients.draws.begin(step)  # as in a run that resumes from here
    local = optimizer.local_steps
    islands = optimizer.islands
    if islands is not None and local is None:
        raise UsageError(
            "save() of an island without local steps: create zerokit.LocalSteps(optimizer) first"
        )
    outer = {} if local is None or weights_only else local.streams()
    arguments: Arguments | Exception
    part: Part | Exception
    try:
        if type(step) is not int or not 0 <= step <= MAX_STEP:
            raise UsageError(f"step={step!r}: expected an integer from 0 to {MAX_STEP}")
        retention.check()
        whole = Path(os.path.abspath(files.path_of(run_directory)))
        run = str(whole if islands is None else runs.island_run(whole, islands.index))
        arguments = Arguments(run, step, overwrite, weights_only, keep_last, keep_every)
    except Exception as error:  # raised on every rank, below
        arguments = error
    try:
        # Before copies are made: what the run has already needs none.
        apart = set_apart(optimizer, together, frozen, lambda: Path(_or_raise(arguments).run))
        owned = owned_by_all(runtime, together, weights_only=weights_only)
    except ScheduleError:
        raise
    except Exception as error:
        arguments, owned = error, None
    try:
        part = take(
            optimizer, _or_raise(arguments), extra, outer, copied=not blocking, apart=apart, owned=owned
        )
    except Exception as error:
        part = error
    if owned is not None and not any(together.exchange(isinstance(part, Exception))):
        receive(optimizer, _or_raise(part), owned)
    together = together if blocking else Together(runtime.collectives, background=True)

    def work() -> Path:
        others = Others(None if local is None else partial(local.at_save, step))
        try:
            target = _commit(together, part, retention, others)
        except Exception:
            if together.rank == 0:
                others.give_up()
            raise
        if islands is None:
            return Path(files.path_of(run_directory), target.name)
        whole_run, count = target.parents[1], islands.count
        together.each(lambda: runs.set_aside_islands(whole_run, count, step) if islands.rank == 0 else None)
        return Path(files.path_of(run_directory), target.parent.name, target.name)

    return work() if blocking else start_saving(optimizer, work)


def _commit(together: Together, taken: Part | Exception, retention: Retention, others: Others) -> Path:
    """Write what all ranks have taken, as the directory returned."""
    part = together.each(lambda: _or_raise(taken))
    cards = together.exchange(part.card)
    require_agreement(cards)
    arguments, layout, rank, step = part.card.arguments, part.layout, together.rank, part.card.arguments.step
    target = Path(arguments.run) / runs.step_name(step)
    streams, scalars, values = merge(layout, [card.description for card in cards])
    extras = _extras(together, part, cards)
    with ExitStack() as stack:
        staging: list[Staging] = []
        contents: list[Contents] = []
        asked: list[Retention] = []

        def begin() -> Path:
            asked.append(retention.asked({*runs.list_steps(target.parent), step}))
            if not arguments.weights_only:
                complete(part, cards, scalars, values)
            part.rest.add_extra(part.extra, extras)
            contents.append(
                contents_of(arguments, layout, streams, tuple(scalars), part.rest, part.apart, part.all_uncut)
            )
            saves = others.hear(runs.saved_with(target) if runs.is_step(target) else None)
            # What only some islands have, as one was killed in this save, counts nowhere.
            void = any(one != saves[0] for one in saves)
            staging.append(_begin(target, overwrite=arguments.overwrite or void))
            stack.callback(staging[0].discard)
            return staging[0].work

        work = together.on_first(begin)
        if part.apart is not None and part.apart.new:
            write_base(together, part.apart, arguments, layout, streams, part.slices)
        in_files = streams_in_files(streams, apart=part.apart is not None)
        file = rank_file(layout, in_files, step, rank)
        own = together.each(lambda: write_rank(work, file, in_files, part.slices, layout, part.uncut))
        written = together.exchange(own)

        def finish() -> None:
            content = write_rest(work, contents[0], written)
            manifests = others.hear(own_checksum(content))
            if len(manifests) > 1:
                write_file(work / runs.ISLANDS_NAME, "".join(f"{crc:08x}\n" for crc in manifests).encode())
            others.settled = True
            if part.apart is not None and part.apart.base and not holds(target.parent / part.apart.base):
                raise CheckpointError(
                    f"{target.parent / part.apart.base}: another process has removed or changed it, which this step "
                    "needs: save again"
                )
            _publish(staging[0], content, weights_only=arguments.weights_only)
            try:
                others.hear("committed")  # a step that only some islands have replaces no older one
                remove_gone(target.parent, target.name, LATEST_NAME)
                prune_after_save(target.parent, asked[0])
            except (CheckpointError, ScheduleError) as error:
                what = (
                    "older files stay" if others.alone else "older files stay, and other islands may lack it"
                )
                warnings.warn(f"{target} is saved, but {what}: {error}", ZerokitWarning, stacklevel=2)

        together.on_first(finish)
    return target


def _or_raise(value: T | Exception) -> T:
    if isinstance(value, Exception):
        raise value
    return value


class Others:
    """The other islands, in a save that they commit together or not at all; without islands there are none.

    One rank of each island talks to them. `tell` returns every island's message, in order.
    """

    def __init__(self, tell: Callable[[tuple[str, Any]], list[tuple[str, Any]]] | None) -> None:
        self._tell = tell
        self.alone = tell is None
        self.settled = self.alone
        """Nothing that fails from now on keeps other islands from their step."""

    def hear(self, value: T) -> list[T]:
        """Every island's `value`.

        Raises `CheckpointError` where one has given up, and `ScheduleError` where one does not come.
        """
        if self._tell is None:
            return [value]
        settled, self.settled = self.settled, True  # an error below is theirs
        heard = self._tell(("", value))
        if failed := [f"island {index}" for index, (lost, _) in enumerate(heard) if lost]:
            raise CheckpointError(
                f"{', '.join(failed)} could not save, so no island has this step: see the error there"
            )
        self.settled = settled
        return [each for _, each in heard]

    def give_up(self) -> None:
        """Tell them that there is no step of this island."""
        if self._tell is not None and not self.settled:
            with suppress(ScheduleError):
                self._tell(("failed", None))


def _extras(together: Together, part: Part, cards: Sequence[Card]) -> dict[Member, list[Any]]:
    """All ranks' values, by the rank's number, of the members of `extra` that differ."""
    names = differing([card.extra for card in sorted(cards, key=attrgetter("rank"))])
    if not names:
        return {}
    own = {name: members_of(part.extra).get(name) if name is not None else part.extra for name in names}
    by_rank = dict(together.exchange((part.card.rank, own)))
    return {name: [by_rank[rank][name] for rank in sorted(by_rank)] for name in names}


def _warn_of_another_job(run: Path) -> None:
    latest, named = readable_latest(run), _NAMED.get(run.resolve())
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
    if is_there(target) and not overwrite:
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
    latest, replaced = readable_latest(run), runs.stated_checksum(run / name)
    if begins:
        _NAMED.setdefault(run.resolve(), set()).add(name)
    if begins and replaced is not None and latest is not None and latest.name == name:
        write_latest(run, Latest(name, (crc, replaced)))
    staging.commit()
    if begins:
        runs.mark_superseded(later)
        write_latest(run, Latest(name, (crc,)))
    staging.discard()
