"""Which steps of a run stay when a newer one is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from zerokit import files
from zerokit.checkpoint.disk import explained
from zerokit.checkpoint.manifest import MAX_STEP
from zerokit.checkpoint.recognise import foreign_to_step
from zerokit.checkpoint.run import find_step, list_steps, read_latest, read_sound, step_name, superseded
from zerokit.errors import CheckpointError, UsageError


@dataclass(frozen=True, slots=True)
class Retention:
    """Steps that stay: the newest `keep_last` intact ones, multiples of `keep_every`, and what `keep` returns True for.

    The newest step, and the newest that is whole, always do.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep: Callable[[int], bool] | None = None

    @property
    def wanted(self) -> bool:
        """Whether anything is to be removed at all."""
        return any(limit is not None for limit in (self.keep_last, self.keep_every, self.keep))

    def check(self) -> None:
        """Raises `UsageError` for what is no count, and for a `keep` that is no function."""
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 1 <= value <= MAX_STEP):
                raise UsageError(f"{name}={value!r}: expected an integer from 1 to {MAX_STEP}")
        if self.keep is not None and not callable(self.keep):
            raise UsageError(f"keep={self.keep!r}: expected a function of a step's number")

    def asked(self, steps: Iterable[int]) -> Retention:
        """The same with `keep`'s answers for these steps; others, which come meanwhile, it spares.

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
        """Those of `steps` that go, ascending: all before the last `keep_last` that are `intact`, `newest` included.

        Nothing goes while there are fewer. A damaged step is not counted, and stays as long as its neighbours.
        """
        line = (step for step in sorted(steps, reverse=True) if step <= newest)
        last = list(islice((step for step in line if step == newest or intact(step)), self.keep_last or 1))
        if len(last) < (self.keep_last or 1):
            return []
        return [step for step in sorted(steps) if step < last[-1] and not self.spares(step)]

    def spares(self, step: int) -> bool:
        """Whether the step stays however old it is."""
        return bool(
            (self.keep_every and step % self.keep_every == 0) or (self.keep is not None and self.keep(step))
        )


def prune(run: Path, retention: Retention) -> None:
    """Remove the steps of a run that `retention` does not keep, after a save.

    Steps that hold foreign files stay. So do superseded ones that the training has not reached yet: a user may
    still resume from them. Raises as `superfluous` does, and `CheckpointError` where a step cannot be
    renamed.
    """
    try:
        read_latest(run)
    except CheckpointError:
        return  # what it superseded is not known; the next save of a whole state writes it anew
    for step in superfluous(run, retention, later=False):
        if not foreign_to_step(step):
            remove_step(step)


def superfluous(run: Path, retention: Retention, *, later: bool = True) -> list[Path]:
    """The steps of a run that `retention` does not keep, ascending; superseded ones, if `later` all of them.

    What always stays: the newest step, the newest that is whole, the one that `latest` names, and what is later than
    the newest but not superseded: it is damaged, or could not be read just now. Raises `UsageError` for impossible
    numbers, `CheckpointError` where `run` has no step that could stay, or its `latest` is damaged.
    """
    retention.check()
    newest = find_step(run)
    if newest.run is None:
        raise CheckpointError(f"{run}: is a step: give the directory of a run")
    latest = read_latest(run)
    stays = {newest.path.name}
    if latest is not None:
        stays.add(latest.name)
    with suppress(CheckpointError):
        stays.add(find_step(run, whole=True).path.name)
    number = int(newest.path.name.removeprefix("step-"))
    paths = {step: run / step_name(step) for step in list_steps(run)}
    others = {step for step, path in paths.items() if superseded(path, latest)}
    gone = retention.removed(
        [step for step in paths if step not in others], number, lambda step: _sound(paths[step])
    )
    gone += [step for step in others if (later or step < number) and not retention.spares(step)]
    return [
        paths[step]
        for step in sorted(gone)
        if paths[step].name not in stays
        and paths[step].is_dir()  # a number may be written with more zeros: that is no name of zerokit's
        and not paths[step].is_symlink()  # what is elsewhere is not this run's to remove
    ]


def _sound(step: Path) -> bool:
    try:
        read_sound(step)
    except CheckpointError:
        return False
    return True


def remove_step(step: Path) -> None:
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
