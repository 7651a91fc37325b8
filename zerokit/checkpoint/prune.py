"""`prune`, and checks before removals: older steps, files of killed writers, zerokit's own outputs.

A directory that holds files which zerokit has not written there is never removed, nor replaced by an output.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from zerokit import files
from zerokit.checkpoint import run as runs
from zerokit.checkpoint.bases import unreferenced
from zerokit.checkpoint.disk import despite_damage, entries_of, explained, is_directory, is_kind, is_there
from zerokit.checkpoint.entries import UNCUT_FILE
from zerokit.checkpoint.latest import LATEST_NAME, read_latest
from zerokit.checkpoint.manifest import COMMON_NAME, EXTRA_NAME, MAX_STEP, NAME
from zerokit.checkpoint.nodes.record import NODE_NAME
from zerokit.checkpoint.safetensors import RANK_FILE
from zerokit.checkpoint.staging import Leftover, belongs_to_this_user, finish_replacements, leftovers
from zerokit.errors import CheckpointError, MissingPath, UsageError
from zerokit.skips import Skips

STEP_FILE = re.compile(
    rf"{re.escape(NAME)}|{RANK_FILE.pattern}|{re.escape(COMMON_NAME)}|{re.escape(EXTRA_NAME)}|"
    rf"{runs.SUPERSEDED_NAME}|{runs.ISLANDS_NAME}|{re.escape(NODE_NAME)}|{UNCUT_FILE.pattern}"
)


@dataclass(frozen=True, slots=True)
class Retention:
    """The rule for kept steps: the newest `keep_last` intact ones, multiples of `keep_every`, and those `keep` accepts.

    The newest step, the newest that is whole, and the last one before skipped steps always do.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep: Callable[[int], bool] | None = None

    @property
    def wanted(self) -> bool:
        return any(limit is not None for limit in (self.keep_last, self.keep_every, self.keep))

    def check(self) -> None:
        """Raise `UsageError` for invalid counts, and for a `keep` that is not a function."""
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= MAX_STEP):
                raise UsageError(f"{name}={value!r}: expected an integer from 1 to {MAX_STEP}")
        if self.keep is not None and not callable(self.keep):
            raise UsageError(f"keep={self.keep!r}: expected a function of a step's number")

    def asked(self, steps: Iterable[int]) -> Retention:
        """The rule with `keep`'s answers for these steps; it keeps steps that appear later.

        Raises `UsageError` where `keep` raises.
        """
        if self.keep is None:
            return self
        try:
            answers = {step: bool(self.keep(step)) for step in steps}
        except Exception as error:
            raise UsageError(f"keep raised {type(error).__name__}: {error}") from error
        return replace(self, keep=lambda step: answers.get(step, True))

    def removed(self, steps: list[int], newest: int, intact: Callable[[int], bool]) -> list[int]:
        """The steps to remove, ascending: all before the last `keep_last` that are `intact`, `newest` included.

        Nothing goes while there are fewer. A damaged step is not counted, and stays as long as its neighbours.
        """
        line = (step for step in sorted(steps, reverse=True) if step <= newest)
        last = list(islice((step for step in line if step == newest or intact(step)), self.keep_last or 1))
        if len(last) < (self.keep_last or 1):
            return []
        return [step for step in sorted(steps) if step < last[-1] and not self.spares(step)]

    def spares(self, step: int) -> bool:
        """Whether the step stays regardless of its age."""
        return bool(
            (self.keep_every and step % self.keep_every == 0) or (self.keep is not None and self.keep(step))
        )


@dataclass(frozen=True, slots=True)
class Doomed:
    """A step or leftover to remove; `size` is in bytes."""

    path: Path
    size: int
    leftover: Leftover | None = None

    def remove(self) -> None:
        """Remove it. Raises `CheckpointError` if it cannot be removed completely."""
        if self.leftover is None:
            _remove_step(self.path)
            return
        files.remove_tree(self.path)
        if is_there(self.path):
            raise CheckpointError(
                f"{self.path}: cannot be removed: check its permissions and its owner, and those of its contents"
            )


@dataclass(frozen=True, slots=True)
class Pruning:
    """Steps and leftovers `removed`, and those `left` for a reason: paths, and why they stay."""

    run: Path
    dry_run: bool
    removed: tuple[Doomed, ...]
    left: tuple[tuple[Path, str], ...]

    @property
    def bytes(self) -> int:
        return sum(doomed.size for doomed in self.removed)


def prune(
    run: str | os.PathLike[str],
    *,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep: Callable[[int], bool] | None = None,
    dry_run: bool = False,
) -> Pruning:
    """Remove a run's older steps, and files of dead writers in its directory.

    Args:
        run: a run's directory; for leftovers alone any directory, such as the one where a conversion was interrupted.
        keep_last: remove all but this many of the newest steps.
        keep_every: keep steps whose number is a multiple of this, too.
        keep: keep steps for which this returns True, too. Without any of the three only leftovers are removed.
        dry_run: remove nothing, only list what would be removed.

    The newest step, the newest one with an optimizer's state, the one that `latest` names, the last one before skipped
    steps, and what belongs to other users always stay; superseded steps are removed. The last one before skipped steps
    is the newest that was saved right after a step that was made, with fewer skipped ones than the newest has.

    A step is renamed before its files are removed. Raises `UsageError` for numbers below 1, `MissingPath` if there is
    no `run`, and `CheckpointError` if it is no directory, has no step that could stay or a damaged `latest`, or if
    something cannot be removed.
    """
    run, retention = files.path_of(run), Retention(keep_last, keep_every, keep)
    retention.check()
    with explained(run, "looked at"):
        if not is_directory(run):
            if not is_there(run):
                raise MissingPath(f"{run}: does not exist: give the directory of a run")
            raise CheckpointError(f"{run}: is not a directory: give the directory of a run")
        if runs.is_step(run):
            raise CheckpointError(f"{run}: is a step: give a run's directory")
        if not dry_run:
            finish_replacements(run)
        begun = leftovers(run)
    removed = [Doomed(left.path, left.size, left) for left in begun if left.gone]
    kept = [(left.path, left.describe()) for left in begun if not left.gone]
    for step in _superfluous(run, retention) if retention.wanted else ():
        if not belongs_to_this_user(step):
            kept.append((step, "is another user's"))
        elif strange := foreign_to_step(step):
            kept.append((step, f"holds {strange}, which zerokit has not written there"))
        else:
            with explained(step, "looked at"):
                removed.append(Doomed(step, files.measured(step)[0]))
    if retention.wanted:
        for base in unreferenced(run, {doomed.path for doomed in removed}):
            if belongs_to_this_user(base) and not foreign_to_step(base):
                with explained(base, "looked at"):
                    removed.append(Doomed(base, files.measured(base)[0]))
    for doomed in () if dry_run else removed:
        doomed.remove()
    return Pruning(run, dry_run, tuple(removed), tuple(kept))


def prune_after_save(run: Path, retention: Retention) -> None:
    """Remove the steps of a run that `retention` does not keep, then frozen parameters that no step needs any more.

    Steps of other users, or with foreign files, stay. So do superseded ones that the training has not reached yet: a
    user may still resume from them. Raises as `prune` does.
    """
    if retention.wanted:
        remove_steps(_superfluous(run, retention, later=False))
    remove_steps(unreferenced(run))


def remove_steps(steps: Iterable[Path]) -> None:
    """Remove those of these steps that are this user's and hold nothing foreign. Raises `CheckpointError`."""
    for step in steps:
        if belongs_to_this_user(step) and not foreign_to_step(step):
            _remove_step(step)


def _superfluous(run: Path, retention: Retention, *, later: bool = True) -> list[Path]:
    """The steps of a run that `retention` does not keep, ascending; superseded ones, if `later` all of them.

    What always stays: the newest step, the newest that is whole, the one that `latest` names, the last one before
    skipped steps, and what is later than the newest but not superseded: it is damaged, or could not be read just now.
    """
    retention.check()
    newest = runs.find_step(run, part=True)
    if newest.run is None:
        raise CheckpointError(
            f"{run}: holds the runs of islands: give one of them, such as {newest.path.parent}"
        )
    latest = read_latest(run)
    stays = {newest.path.name}
    if latest is not None:
        stays.add(latest.name)
    with despite_damage():
        stays.add(runs.find_step(run, whole=True, part=True).path.name)
    # Other nodes may not have the newest: they were killed in that save.
    stays |= {path.name for path in [path for path in runs.committed(run) if is_there(path / NODE_NAME)][-2:]}
    islands = runs.island_runs(run.parent)
    if run in islands:
        # Not all islands may have the newest: one was killed in that save.
        stays |= {runs.step_name(step) for step in sorted(runs.list_steps(run.parent))[-1:]}
    for one in islands if run in islands else [run]:
        stays |= _before_skipped(one)
    number = int(newest.path.name.removeprefix("step-"))
    paths = {step: run / runs.step_name(step) for step in runs.list_steps(run)}
    others = {step for step, path in paths.items() if runs.superseded(path)}
    own = [step for step in paths if step not in others]
    gone = retention.removed(own, number, lambda step: runs.is_sound(paths[step], part=True))
    gone += [step for step in others if (later or step < number) and not retention.spares(step)]
    return [
        paths[step]
        for step in sorted(gone)
        if paths[step].name not in stays
        # A number may be written with more zeros: that is no name of zerokit's; what a link leads to is not this run's.
        and is_kind(paths[step], stat.S_ISDIR)
    ]


def _before_skipped(run: Path) -> set[str]:
    """The name of the run's last step before skipped ones, if any were: where to go back to.

    Saves amid steps that are skipped one after the other are no such place, however many there are.
    """
    newest: Skips | None = None
    for path in reversed(runs.committed(run)):
        with despite_damage():
            if runs.superseded(path):
                continue
            manifest, _ = runs.read_sound(path, part=True)
            skips = manifest.skips
            if newest is None:
                newest = skips
            if not newest.total:
                break
            if skips.total < newest.total and not skips.in_a_row and not manifest.weights_only:
                return {path.name}
    return set()


def _remove_step(step: Path) -> None:
    """Rename a step, so that it is never there in part, then remove its files; does nothing where another process has.

    Raises `CheckpointError` where it cannot be renamed.
    """
    work = files.temporary(step)
    with explained(step, "removed"):
        try:
            files.system().rename(step, work)
        except FileNotFoundError:
            return  # by a prune beside this one
        files.system().sync_directory(step.parent)
    files.remove_tree(work)


def foreign_to_step(folder: Path) -> str:
    """The foreign contents of a step's directory, as text; "" if there are none. The functions below do the same."""
    if runs.stated_checksum(folder) is None:
        return f"no {NAME} of zerokit's"
    return foreign_to(folder, STEP_FILE, "")


def foreign_to_checkpoint(folder: Path) -> str:
    """The foreign contents of a step, or a run of one step, as `reshard` writes it."""
    if runs.stated_checksum(folder) is not None:
        return foreign_to_step(folder)
    steps = []
    for entry in entries_of(folder):
        if runs.STEP.fullmatch(entry.name) and is_kind(entry, stat.S_ISDIR):
            steps.append(entry.name)
            if strange := foreign_to_step(Path(entry.path)):
                return f"{strange} in {entry.name}"
        elif entry.name != LATEST_NAME and not files.TEMPORARY.fullmatch(entry.name):
            return named(entry)
    return "" if len(steps) == 1 else f"{len(steps) or 'no'} steps, where an output of this kind has one"


def foreign_to(folder: Path, own: re.Pattern[str], empty: str) -> str:
    """Beside files that are called like `own`; `empty` where there are none."""
    entries = entries_of(folder)
    for entry in entries:
        if not (own.fullmatch(entry.name) and is_kind(entry, stat.S_ISREG)):
            return named(entry)
    return "" if entries else empty


def named(entry: os.DirEntry[str]) -> str:
    """An entry of a directory, as text."""
    return f"the {'directory' if is_kind(entry, stat.S_ISDIR) else 'file'} {entry.name!r}"
