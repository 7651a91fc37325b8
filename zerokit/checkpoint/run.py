"""A run's directory: what may be saved into it, asked before training rather than after."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from zerokit.checkpoint.disk import explained, opened
from zerokit.checkpoint.manifest import NAME, own_checksum
from zerokit.checkpoint.reader import Checkpoint, find_step, read_whole
from zerokit.errors import CheckpointError, UsageError

_STEP = re.compile(r"step-(\d{8,20})")


def step_name(step: int) -> str:
    """What a step's directory is called."""
    return f"step-{step:08d}"


def check_run(run_directory: str | os.PathLike[str], *, after: int = 0, overwrite: bool = False) -> None:
    """Refuse, before training, a directory into which `save` would refuse to write after it.

        zerokit.check_run("run")                       # of a training that starts anew
        zerokit.check_run("run", after=extra["step"])  # of one that goes on from a step that was loaded

    Nothing is written and no other rank is asked, so that it may be called before the process group is there.

    Args:
        run_directory: as for `save`; it need not exist yet.
        after: steps trained so far. Committed steps up to this one are in nobody's way.
        overwrite: as for `save`: later steps may be there, they will be replaced.

    Raises `CheckpointError` where later steps are there, where the directory is a checkpoint itself, or where it cannot
    be written to, and `UsageError` for an impossible `after`.
    """
    if type(after) is not int or after < 0:
        raise UsageError(f"after={after!r}: expected the number of steps trained so far, at least 0")
    run = Path(run_directory)
    require_run(run)
    _require_writable(run)
    later = [] if overwrite else later_steps(run, after)
    if later:
        more = f" and {len(later) - 1} more" if len(later) > 1 else ""
        raise CheckpointError(
            f"{run}: holds {step_name(later[-1])}{more}, later than step {after}, after which this training begins; a "
            "committed step is not replaced, so saving would fail then: go on from the newest with zerokit.load(), "
            "choose another directory, or give overwrite=True here and to zerokit.save()"
        )


def require_run(run: Path) -> None:
    """Raises `CheckpointError` where `run` is, or lies in, a step's directory: files in there would damage it."""
    run = run.absolute()
    for folder in (run, run.parent):
        if is_step(folder):
            where = "is a checkpoint itself" if folder == run else f"lies in the checkpoint {folder}"
            raise CheckpointError(
                f"{run}: {where}, not a run's directory: name the directory that holds the steps, such as "
                f'zerokit.save("{folder.parent}", optimizer, step=...)'
            )


def is_step(folder: Path) -> bool:
    """Whether there is a manifest of zerokit's; other programs call files so, too."""
    path = folder / NAME
    with explained(folder, "looked at"):
        if not path.is_file():
            return False
    with opened(path) as fd, explained(path, "read"):
        return own_checksum(os.pread(fd, 64, 0)) is not None or _STEP.fullmatch(folder.name) is not None


def committed_steps(run: Path) -> list[int]:
    """The steps of a run that are there, ascending; none where there is no such directory."""
    with explained(run, "listed"):
        names = [path.parent.name for path in run.glob(f"step-*/{NAME}")]
    return sorted(int(found[1]) for name in names if (found := _STEP.fullmatch(name)))


def later_steps(run: Path, after: int) -> list[int]:
    """Those of a run's steps that a training which begins `after` a step would come to, ascending."""
    return [step for step in committed_steps(run) if step > after]


def newest_whole(run: Path) -> Path | None:
    """The directory of a run's newest step that holds a whole state; None where there is none."""
    for step in reversed(committed_steps(run)):
        try:
            checkpoint = Checkpoint(run / step_name(step))
        except CheckpointError:
            continue
        if not checkpoint.weights_only:
            return checkpoint.path
    return None


def remove_leftovers(run: Path, step: int) -> None:
    """Remove what killed writers of this step have left; once it is committed nobody else is writing it."""
    for folder in run.glob(f".{step_name(step)}.tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)


def newest_manifest(run: Path, step: int) -> int | None:
    """The CRC-32 of the manifest that `latest` leads to, if that is of this step."""
    try:
        found, _ = find_step(run)
        name = step_name(step)
        if found.parent != run or not (found.name == name or found.name.startswith(f".{name}.tmp-")):
            return None
        return own_checksum(read_whole(found / NAME))
    except CheckpointError:
        return None  # nothing that could be read there is lost


def _require_writable(run: Path) -> None:
    """By the permissions of the run, or of the nearest directory that is there."""
    place = next(folder for folder in (run.absolute(), *run.absolute().parents) if os.path.lexists(folder))
    if not place.is_dir():
        raise CheckpointError(
            f"{run}: cannot be created: {place} is not a directory: choose another directory"
        )
    if not os.access(place, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{run}: cannot be written to: {place} allows it to others: check its permissions and its owner"
        )
