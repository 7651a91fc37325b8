"""`save`: every rank writes its own pieces, rank 0 writes the rest, and one rename commits them all."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, overload

from zerokit import files
from zerokit.checkpoint import run as runs
from zerokit.checkpoint.commit import Others, commit, or_raise
from zerokit.checkpoint.frozen import Frozen, set_apart
from zerokit.checkpoint.manifest import MAX_STEP
from zerokit.checkpoint.nodes.locally import Locally
from zerokit.checkpoint.owned import owned_by_all
from zerokit.checkpoint.prune import Retention
from zerokit.checkpoint.snapshot import Arguments, Part, receive, require_equal, take
from zerokit.checkpoint.together import Saving, Together, finish_saving, start_saving
from zerokit.errors import ScheduleError, UsageError
from zerokit.runtime import ZeroOptimizer


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
    shared: bool = ...,
    copies: int = ...,
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
    shared: bool = ...,
    copies: int = ...,
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
    shared: bool = True,
    copies: int = 2,
) -> Path | Saving:
    """Write the whole training state as `run_directory/step-########`, and point `latest` at it. Collective.

    Masters, every optimizer state, frozen parameters, persistent buffers, parameter groups' options, the loss scale and
    random number generators are written; gradients are not, so call it between steps.

    Args:
        run_directory: made if it does not exist; shared by all nodes, or with `shared=False` a directory of each node's
            own, on a disk or in memory (`/dev/shm/run`). Islands (`zerokit.LocalSteps`) save
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
        shared: False where nodes share no directory. Each node's directory gets the files of its own ranks, and copies
            of other nodes', which travel beside the training if `blocking` is False. Ranks that see the same directory
            are a node. It is made for this user alone, and refused where others could change it. The newest
            `keep_last` steps are kept, two by default, whatever training saved them, and the others go before the new
            one is written: that many times the files of `copies` nodes are there at most. `load` needs no more than
            one holder of each file. `zerokit gather` makes an ordinary run of the nodes' directories.
        copies: with `shared=False`, on how many nodes each file is, the own one included: so many nodes less one may be
            lost. With fewer nodes on all of them. Nodes of other replica groups (a mesh's outer axis) come first.

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
    _require_possible(optimizer, retention, frozen, shared=shared, copies=copies)
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
        arguments = Arguments(
            run, step, overwrite, weights_only, keep_last, keep_every, None if shared else copies
        )
    except Exception as error:  # raised on every rank, below
        arguments = error
    try:
        # Before copies are made: what the run has already needs none.
        apart = set_apart(optimizer, together, frozen, lambda: Path(or_raise(arguments).run))
        owned = owned_by_all(runtime, together, weights_only=weights_only)
    except ScheduleError:
        raise
    except Exception as error:
        arguments, owned = error, None
    try:
        part = take(
            optimizer, or_raise(arguments), extra, outer, copied=not blocking, apart=apart, owned=owned
        )
    except Exception as error:
        part = error
    if owned is not None and not any(together.exchange(isinstance(part, Exception))):
        receive(optimizer, or_raise(part), owned)
    together = together if blocking else Together(runtime.collectives, background=True)

    def work() -> Path:
        others = Others(None if local is None else partial(local.at_save, step))

        def find_nodes(run: Path) -> Locally:
            kept = max(keep_last or 0, 2)  # a kill amid a save leaves the one before
            return Locally.begin(optimizer, together, run, copies, kept, paced=not blocking)

        try:
            target = commit(together, part, retention, others, None if shared else find_nodes)
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


def _require_possible(
    optimizer: ZeroOptimizer, retention: Retention, frozen: Frozen, *, shared: object, copies: object
) -> None:
    """Raise `UsageError` for what nodes' own directories do not go with."""
    if type(shared) is not bool:
        raise UsageError(f"shared={shared!r}: expected True, or False where nodes share no directory")
    if shared:
        return
    if type(copies) is not int or copies < 1:
        raise UsageError(f"copies={copies!r}: expected on how many nodes each file is to be, at least 1")
    refused = {
        "islands: each saves into its own directory, which all its nodes share": optimizer.islands
        is not None,
        'frozen="once": "never" takes frozen parameters from the model, "always" writes them': frozen
        == "once",
        "keep_every and keep: use keep_last, and save into a shared directory what is to stay": (
            retention.keep_every is not None or retention.keep is not None
        ),
    }
    for what, asked in refused.items():
        if asked:
            raise UsageError(f"save(shared=False) does not go with {what}")
