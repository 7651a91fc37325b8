"""`prune`: remove what a run does not need any more, older steps and what killed writers have left."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from zerokit import files
from zerokit.checkpoint.disk import explained
from zerokit.checkpoint.recognise import foreign_to_step
from zerokit.checkpoint.retention import Retention, remove_step, superfluous
from zerokit.checkpoint.run import is_step
from zerokit.checkpoint.staging import Leftover, finish_replacements, leftovers, remove
from zerokit.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Doomed:
    """A step, or a leftover, to be removed; `size` in bytes."""

    path: Path
    size: int
    leftover: Leftover | None = None

    def remove(self) -> None:
        """Raises `CheckpointError` where it cannot be removed, or not all of it."""
        if self.leftover is None:
            remove_step(self.path)
            return
        remove(self.leftover)
        if os.path.lexists(self.path):
            raise CheckpointError(
                f"{self.path}: cannot be removed: check its permissions and its owner, and those of what is in it"
            )

    def plain(self) -> dict[str, object]:
        """As JSON data."""
        kind = "step" if self.leftover is None else "leftover"
        return {"path": str(self.path), "kind": kind, "bytes": self.size}


@dataclass(frozen=True, slots=True)
class Pruning:
    """Steps and leftovers `removed`, and those `left` for a reason: paths, and why they stay."""

    run: Path
    dry_run: bool
    removed: tuple[Doomed, ...]
    left: tuple[tuple[Path, str], ...]

    @property
    def bytes(self) -> int:
        """Freed, or to be freed."""
        return sum(doomed.size for doomed in self.removed)

    def plain(self) -> dict[str, object]:
        """As JSON data."""
        return {
            "run": str(self.run),
            "dry_run": self.dry_run,
            "bytes": self.bytes,
            "removed": [doomed.plain() for doomed in self.removed],
            "left": [{"path": str(path), "reason": reason} for path, reason in self.left],
        }


def prune(
    run: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep: Callable[[int], bool] | None = None,
    dry_run: bool = False,
) -> Pruning:
    """Remove a run's older steps, and what writers that are gone have left in its directory.

    Args:
        run: a run's directory; for leftovers alone any directory, such as the one where a conversion was interrupted.
        keep_last: steps go, but for the newest so many.
        keep_every: and but for those whose number is a multiple of this.
        keep: and but for those for which this returns True. Without any of the three only leftovers go.
        dry_run: remove nothing, only list what would go.

    The newest step, the newest that is whole and the one that `latest` names always stay; superseded ones go. A step is
    renamed before its files go. Raises `UsageError` for numbers below 1, and `CheckpointError` where `run` is no
    directory, has no step that could stay or a damaged `latest`, or something cannot be removed.
    """
    pruning = plan(Path(run), Retention(keep_last, keep_every, keep), dry_run=dry_run)
    if not dry_run:
        for doomed in pruning.removed:
            doomed.remove()
    return pruning


def plan(run: Path, retention: Retention, *, dry_run: bool) -> Pruning:
    """What `prune` will do. Raises as it does."""
    retention.check()
    with explained(run, "looked at"):
        if not run.is_dir():
            what = "is not a directory" if run.exists() else "does not exist"
            raise CheckpointError(f"{run}: {what}: give the directory of a run")
        if is_step(run):
            raise CheckpointError(f"{run}: is a step: give the directory of a run")
        if not dry_run:
            finish_replacements(run)
        begun = leftovers(run)
    removed = [Doomed(left.path, left.size, left) for left in begun if left.gone]
    kept = [(left.path, left.describe()) for left in begun if not left.gone]
    for step in superfluous(run, retention) if retention.wanted else ():
        if strange := foreign_to_step(step):
            kept.append((step, f"holds {strange}, which zerokit has not written there"))
        else:
            removed.append(Doomed(step, files.measured(step)[0]))
    return Pruning(run, dry_run, tuple(removed), tuple(kept))
