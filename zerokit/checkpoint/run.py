"""A run's directory: its steps, and the newest one.

The newest step is the highest that is whole, whatever `latest` says: a writer may be killed between committing a step
and naming it. Steps with a file `superseded`, of a training that was begun anew before them, are passed over, and so
are damaged ones. A step that the operating system does not read is an error: an older one must not take its place.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from zerokit import files
from zerokit.checkpoint.bases import check_base
from zerokit.checkpoint.disk import (
    check_file,
    despite_damage,
    entries_of,
    explained,
    is_directory,
    is_file,
    is_there,
    opened,
    read_whole,
    status_of,
)
from zerokit.checkpoint.latest import LATEST_NAME, Latest, read_latest, readable_latest
from zerokit.checkpoint.manifest import NAME, Manifest, own_checksum, read_manifest
from zerokit.checkpoint.nodes.held import require_files
from zerokit.checkpoint.nodes.record import NODE_NAME
from zerokit.checkpoint.staging import finish_replacement, finish_replacements
from zerokit.errors import CheckpointError, MissingPath, StorageError

SUPERSEDED_NAME = "superseded"
"""An empty file in a step's directory."""

ISLANDS_NAME = "islands"
"""A file in a step's directory: the CRC-32s of the manifests that all islands have written together."""

_ISLAND = re.compile(r"island-(\d+)")
"""A run of islands (`zerokit.LocalSteps`) holds a run for each; a step counts where all of them have it."""

STEP = re.compile(r"step-(\d{8,20})")


@dataclass(frozen=True, slots=True)
class Choice:
    """A step's directory `path`, and its verified manifest unless that is damaged.

    `run`: the run's directory, where one was named. `faults`: what is wrong with its `latest`. `notes`: why a step is
    taken that `latest` does not name, as sentences.
    """

    path: Path
    run: Path | None = None
    manifest: tuple[Manifest, int] | None = None
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def step_name(step: int) -> str:
    """The name of a step's directory."""
    return f"step-{step:08d}"


def island_run(run: Path, island: int) -> Path:
    """The run of one island in a run of islands."""
    return run / f"island-{island}"


def island_runs(run: Path) -> list[Path]:
    """The runs of all islands, in order; none in any other run, or where a training without islands has gone on."""
    found = [
        (int(match[1]), Path(entry.path))
        for entry in entries_of(run)
        if (match := _ISLAND.fullmatch(entry.name)) and is_directory(entry)
    ]
    runs = [path for _, path in sorted(found)]
    if runs and (own := committed(run)) and number_of(own[-1]) >= max(_steps_of_all(runs), default=-1):
        return []
    return runs


def _steps_of_all(islands: Sequence[Path]) -> set[int]:
    return set(_in_common(islands, {run: {number_of(path) for path in committed(run)} for run in islands}))


def set_aside_islands(run: Path, count: int, step: int) -> None:
    """Rename the runs of islands from number `count` on, which are gone: the first `count` have saved `step`.

    A step counts where all islands have it, so theirs would hide all later ones.
    """
    for path in island_runs(run):
        if int(path.name.removeprefix("island-")) >= count:
            target = path.with_name(f"former-{path.name}-until-{step_name(step)}")
            while is_there(target):  # it was lost here before
                target = target.with_name(f"{target.name}-again")
            with explained(path, "renamed"):
                path.rename(target)


def common_steps(runs: Sequence[Path], *, whole: bool = False) -> dict[int, str]:
    """Steps that islands have from one save, intact and not superseded, each with its `saved_with`.

    `whole` leaves out those with weights only.
    """

    def steps(run: Path) -> Iterator[int]:
        for path in committed(run):
            with despite_damage():
                if not superseded(path) and not (read_sound(path)[0].weights_only and whole):
                    yield number_of(path)

    return _in_common(runs, {run: set(steps(run)) for run in runs})


def _in_common(runs: Sequence[Path], steps: Mapping[Path, set[int]]) -> dict[int, str]:
    """Those of the runs' steps that all islands of a save have: one may have been killed in it, and others not."""
    found: dict[int, str] = {}
    for step in set().union(*steps.values()):
        saves = {run: saved_with(run / step_name(step)) for run in runs if step in steps[run]}
        for save in set(saves.values()):
            if all(saves.get(run) == save for run in partners(runs, save)):
                found[step] = save
    return found


def partners(runs: Sequence[Path], save: str) -> list[Path]:
    """The runs of those islands that took part in a save, by what `saved_with` returns."""
    count = len(save.split()) or math.inf  # it is not known of older steps
    return [run for run in runs if int(run.name.removeprefix("island-")) < count]


def saved_with(step: Path) -> str:
    """What the step's file `islands` says, equal on all islands that have written it together; "" without one."""
    path = step / ISLANDS_NAME
    while is_there(path):
        try:
            return read_whole(path).decode("latin-1")
        except CheckpointError:
            if is_there(path):  # else another process replaces the step just now
                raise
    return ""


def find_step(path: Path, *, whole: bool = False, sound: bool = True, part: bool = False) -> Choice:
    """The step at `path`, or the newest step of the run at `path`.

    In a run, `whole` passes over steps that hold weights only, `sound` over those with a damaged manifest or with
    missing or truncated files. In a node's own directory a step counts only if all nodes' files are in it; with `part`
    those of that node are enough. Raises `CheckpointError` if there is no such step.
    """
    with explained(path, "opened"):
        require_directory(path)
        # A run may hold another program's file of that name.
        if status_of(path / NAME) is not None and (stated_checksum(path) is not None or not committed(path)):
            manifest = read_manifest(path) if sound else None
            if manifest is not None and is_there(path / NODE_NAME):
                require_files(path, *manifest, part=part)
            return Choice(path, manifest=manifest)
        finish_replacements(path)
        if runs := island_runs(path):
            return _of_islands(path, runs, whole=whole, sound=sound)
        return _newest(path, whole=whole, sound=sound, part=part)


def require_directory(path: Path) -> None:
    """Finish the replacement of a directory, and raise `CheckpointError` where there is none."""
    finish_replacement(path)
    if not is_directory(path):
        if not is_there(path):
            raise MissingPath(f"{path}: does not exist: give the directory of a step, or of a run")
        raise CheckpointError(f"{path}: is not a directory: give the directory of a step, or of a run")


def _of_islands(run: Path, runs: Sequence[Path], *, whole: bool, sound: bool) -> Choice:
    """The first island's newest step among those that all islands have."""
    steps = common_steps(runs, whole=whole)
    if not steps:
        names = ", ".join(path.name for path in runs)
        raise CheckpointError(
            f"{run}: the islands have no step in common ({names}): name the run of one of them"
        )
    newest = max(steps)
    choice = find_step(partners(runs, steps[newest])[0] / step_name(newest), whole=whole, sound=sound)
    return replace(choice, notes=(f"{run} has the runs of {len(runs)} islands: {choice.path} is taken",))


def _newest(run: Path, *, whole: bool, sound: bool, part: bool) -> Choice:
    faults, passed, weights, latest = [], [], set(), None
    try:
        latest = read_latest(run)
    except StorageError:
        raise
    except CheckpointError as error:
        faults.append(str(error))
    steps = [path for path in reversed(committed(run)) if not superseded(path)]
    for path in steps:
        manifest = None
        if sound:
            try:
                manifest = read_sound(path, part=part)
            except CheckpointError as error:
                if not is_there(path):  # a prune beside this has removed it: there is a newer one now
                    return _newest(run, whole=whole, sound=sound, part=part)
                if isinstance(error, StorageError):
                    raise
                passed.append(str(error))
                continue
        if whole and manifest is not None and manifest[0].weights_only:
            weights.add(path.name)
            continue
        if fault := _fault(run, latest):
            if readable_latest(run) != latest:  # a save beside this has named another step
                return _newest(run, whole=whole, sound=sound, part=part)
            faults.append(fault)
        taken = []
        if latest is None or latest.name not in {path.name, *weights}:
            if latest and not faults and not passed:
                taken.append(f"{LATEST_NAME} names {latest.name}, whose successor was committed all the same")
            taken.append(f"{path.name} is taken as the newest of {run}")
        return Choice(path, run, manifest, tuple(faults), (*faults, *passed, *taken))
    if weights:
        passed.append(
            f"{max(weights)} was saved with weights_only=True, so it has no optimizer's state: take its weights with "
            f'zerokit.load("{run}", optimizer, weights_only=True)'
        )
    if passed:
        raise CheckpointError(f"{run}: has no step to resume from: {'; '.join(passed)}")
    absent = (
        f" and no step, and {LATEST_NAME} names {latest.name}, which is not there"
        if latest
        else f", no step and no {LATEST_NAME}"
    )
    raise CheckpointError(f"{run}: not a checkpoint: it has no {NAME}{absent}")


def _fault(run: Path, latest: Latest | None) -> str:
    """What is wrong with a `latest` that can be read."""
    if latest is None:
        return ""
    path = run / latest.name
    if status_of(path / NAME) is None:
        return f"{run / LATEST_NAME}: names {latest.name}, which has no {NAME}"
    actual = stated_checksum(path)
    if actual not in latest.crcs:
        stated = " or ".join(f"{crc:08x}" for crc in latest.crcs)
        has = "none that can be read" if actual is None else f"{actual:08x}"
        return (
            f"{run / LATEST_NAME}: states the manifest {stated}, {latest.name} has {has}: one of the two is damaged or "
            "from another run"
        )
    return ""


def read_sound(path: Path, *, part: bool = False) -> tuple[Manifest, int]:
    """The manifest of a step, after a check that all files exist with the right sizes. Raises `CheckpointError`.

    With `part` the files that a node should have are enough in its own directory.
    """
    read = read_manifest(path)
    manifest = read[0]
    if path.name != step_name(manifest.step):
        raise CheckpointError(f"{path / NAME}: describes step {manifest.step}")
    if not require_files(path, *read, part=part):
        for file in manifest.all_files:
            check_file(path / file.name, file.size)
        check_base(path, manifest)
    return read


def is_sound(step: Path, *, part: bool = False) -> bool:
    """Whether `read_sound` accepts the step. Raises `StorageError` where that cannot be told."""
    with despite_damage():
        read_sound(step, part=part)
        return True
    return False


def stated_checksum(step: Path) -> int | None:
    """The CRC-32 in a step's manifest; None if there is none. Raises `StorageError`."""
    with despite_damage(), opened(step / NAME) as fd, explained(step / NAME, "read"):
        return own_checksum(os.pread(fd, 64, 0))
    return None


def superseded(step: Path) -> bool:
    """Whether the step is marked as one of a training that was begun anew before it."""
    return is_there(step / SUPERSEDED_NAME)


def require_run(run: Path) -> Path:
    """The directory `run`, or the nearest one above it that is there.

    Raises `CheckpointError` for a path through a file, and for a step's directory or one in it: files would damage it.
    """
    run = run.absolute()
    for folder in (run, run.parent):
        if is_step(folder):
            where = "is a checkpoint itself" if folder == run else f"lies in the checkpoint {folder}"
            raise CheckpointError(
                f"{run}: {where}, not a run's directory: name the directory that holds the steps, such as "
                f'zerokit.save("{folder.parent}", optimizer, step=...)'
            )
    existing = next(folder for folder in (run, *run.parents) if is_there(folder))
    if not is_directory(existing):
        raise CheckpointError(
            f"{run}: cannot be created: {existing} is not a directory: choose another directory"
        )
    return existing


def is_step(folder: Path) -> bool:
    """Whether the directory has zerokit's manifest; other programs use the same file name."""
    return is_file(folder / NAME) and (
        stated_checksum(folder) is not None or STEP.fullmatch(folder.name) is not None
    )


def list_steps(run_directory: str | os.PathLike[str]) -> list[int]:
    """The steps of a run, ascending, or those that all islands have: `zerokit.list_steps` for one directory."""
    run = files.path_of(run_directory)
    if islands := island_runs(run):
        return sorted(_steps_of_all(islands))
    return [number_of(path) for path in committed(run)]


def committed(run: Path) -> list[Path]:
    """The directories of `list_steps`."""
    paths = [Path(entry.path) for entry in entries_of(run) if STEP.fullmatch(entry.name)]
    return sorted((path for path in paths if status_of(path / NAME) is not None), key=number_of)


def number_of(step: Path) -> int:
    """The step that a step's directory is named after."""
    return int(step.name.removeprefix("step-"))


def later_steps(run: Path, after: int) -> list[int]:
    """The run's steps after step `after`, ascending."""
    return [step for step in map(number_of, committed(run)) if step > after]


def steps_to_supersede(run: Path, name: str) -> list[Path]:
    """Those of a run's steps that are later than the step `name` and not marked yet, ascending."""
    return [
        path for path in committed(run) if number_of(path) > number_of(run / name) and not superseded(path)
    ]


def mark_superseded(steps: list[Path]) -> None:
    """Mark steps, ascending: the last stays the newest until all are marked. Raises `CheckpointError`.

    They stay superseded when the training has passed them.
    """
    for step in steps:
        # Pruned meanwhile, or marked by another job.
        with explained(step / SUPERSEDED_NAME, "created"), suppress(FileNotFoundError, FileExistsError):
            os.close(files.system().create(step / SUPERSEDED_NAME))
            files.system().sync_directory(step)


def unreferenced(step: Path) -> bool:
    """Whether a committed step was never named by `latest`: its writer was killed just before."""
    latest = readable_latest(step.parent)
    if latest is None:
        return not is_there(step.parent / LATEST_NAME)
    return number_of(step.parent / latest.name) < number_of(step) and not superseded(step)
