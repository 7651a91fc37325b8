"""`check_run`: whether a later save could write into a directory, asked before training."""

from __future__ import annotations

import os
import sys

from zerokit.checkpoint.run import committed, list_steps, number_of, require_run, step_name
from zerokit.errors import CheckpointError, ScheduleError, UsageError, ZerokitError
from zerokit.files import path_of


def check_run(run_directory: str | os.PathLike[str], *, after: int = 0, overwrite: bool = False) -> None:
    """Refuse, before training, a directory into which `save` would refuse to write after it.

        zerokit.check_run("run")                       # of a training that starts anew
        zerokit.check_run("run", after=extra["step"])  # of one that goes on from a step that was loaded

    Where a process group has been initialised, all ranks call it, and what one of them finds is raised on all. Before
    that it checks for its own process. Nothing is written, so what changes later is not seen: a disk that fills up,
    permissions that are taken away, another job that saves there.

    Args:
        run_directory: as for `save`; it need not exist yet.
        after: steps trained so far. Committed steps up to this one may be there.
        overwrite: as for `save`: later steps may be there, they will be replaced.

    Raises `CheckpointError` where later steps are there, where the directory is a checkpoint itself, or where it cannot
    be written to, `UsageError` for an impossible `after`, and `ScheduleError` where a rank has not come within the
    group's time-out.
    """
    found: ZerokitError | None = None
    try:
        check_directory(run_directory, after=after, overwrite=overwrite)
    except ZerokitError as error:
        found = error
    dist = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        answers = [None if found is None else str(found)]
    else:
        answers = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(answers, None if found is None else str(found))
        except RuntimeError as error:
            raise ScheduleError(f"check_run(): not all ranks have called it: {error}") from error
    if found is not None:
        raise found
    if failed := {rank: text for rank, text in enumerate(answers) if text is not None}:
        rank, text = next(iter(failed.items()))
        raise CheckpointError(f"rank {rank}: {text}")


def check_directory(
    run_directory: str | os.PathLike[str], *, after: int = 0, overwrite: bool = False
) -> None:
    """`check_run` for this process alone."""
    if type(after) is not int or after < 0:
        raise UsageError(f"after={after!r}: expected the number of steps trained so far, at least 0")
    run = path_of(run_directory)
    existing = require_run(run)
    if not os.access(existing, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{run}: cannot be written to: {existing} is on a read-only file system, or allows it to others: check its "
            "permissions and its owner, or choose another directory"
        )
    # What only some islands have is replaced.
    steps = {*map(number_of, committed(run)), *list_steps(run)}
    if later := [] if overwrite else sorted(step for step in steps if step > after):
        more = f" and {len(later) - 1} more" if len(later) > 1 else ""
        raise CheckpointError(
            f"{run}: holds {step_name(later[-1])}{more}, later than step {after}, after which this training "
            "starts. Committed steps are not replaced, so saving would fail: resume from the newest with "
            "zerokit.load(), choose another directory, or pass overwrite=True here and to zerokit.save()"
        )
