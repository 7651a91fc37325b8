"""Writes records on disk to MLflow; repeating it writes nothing twice.

`zerokit push` and `zerokit bench` both do this and nothing else; a bench does it between its cells and after the last,
never while ranks run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from zerokit.bench.record import Record, read_record
from zerokit.bench.record.sweep import FILE, Sweep, SweepFolder
from zerokit.bench.tracking.content import milliseconds, sweep_files, sweep_status
from zerokit.bench.tracking.mirror import Mirror, Pushed
from zerokit.bench.tracking.store import Store, Tracking, TrackingError
from zerokit.errors import UsageError, ZerokitError


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of one record: "new", "completed", "there", "left out" (unsupported: its sweep's run says so), or
    "failed" with the reason. `page` of MLflow shows its run, or the cells of its sweep.
    """

    path: Path
    outcome: Pushed | str
    run_id: str | None
    reason: str | None = None
    page: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The records to push, with their sweeps if the folders have them."""

    records: list[tuple[Path, Record]]
    sweeps: dict[str, tuple[Sweep, SweepFolder]]
    damaged: list[Done]


def find_records(paths: Sequence[Path]) -> Found:
    """Find the records in these files and folders, each once.

    Every .json file below a folder is looked at, but for sweep.json and the compute-only twins of a sweep.

    Raises `UsageError` for a path that is not there, or a folder without any record.
    """
    records, folders = dict[str, tuple[Path, Record]](), dict[Path, SweepFolder]()
    sweeps, damaged = dict[str, tuple[Sweep, SweepFolder]](), list[Done]()
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist; give a record, or a folder of records")
        files = _records_below(path) if path.is_dir() else [path]
        if not files:
            raise UsageError(f"{path} has no record")
        for file in files:
            try:
                record = read_record(file)
            except ZerokitError as error:
                damaged.append(Done(file, "failed", None, str(error).removeprefix(f"{file}: ")))
                continue
            records.setdefault(record.id, (file, record))
            folders[file.parent.parent] = SweepFolder(file.parent.parent)
    for folder in folders.values():
        if folder.exists():
            try:
                sweep = folder.read()
            except ZerokitError as error:
                damaged.append(Done(folder.path / FILE, "failed", None, str(error)))
            else:
                sweeps[sweep.id] = (sweep, folder)
    return Found(list(records.values()), sweeps, damaged)


def _records_below(folder: Path) -> list[Path]:
    """Not hidden, and not the twins of a sweep."""
    return [
        path
        for path in sorted(folder.rglob("*.json"))
        if path.name != FILE
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and not (path.parent.name == "twins" and (path.parent.parent / FILE).exists())
    ]


def push(
    found: Found,
    mirror: Mirror,
    pictures: Callable[[Sequence[Record]], Mapping[str, bytes]],
    *,
    going_on: bool = False,
    interrupted: Callable[[], None] = lambda: None,
    show: Callable[[Done], None] = lambda done: None,
) -> list[Done]:
    """Write the missing parts of the records to MLflow.

    Args:
        found: by `find_records`.
        mirror: of the experiment.
        pictures: makes plots of records by file name.
        going_on: whether more cells of the sweeps follow, so that their own runs have no end yet.
        interrupted: raises if the user wants no more; called between the records.
        show: called with every record that is done.

    Raises `TrackingError` as soon as the store fails; what was written by then stays, and the next push completes it.
    """
    results = list(found.damaged)
    for done in results:
        show(done)
    for sweep, _ in found.sweeps.values():
        mirror.parent(sweep.id, sweep.title, sweep.options, milliseconds(sweep.created))
    for path, record in found.records:
        interrupted()
        outcome, run_id = mirror.push(record, lambda one: pictures([one]))
        shown = {"view": record.sweep} if record.sweep in found.sweeps else {"run_id": run_id}
        results.append(Done(path, outcome, run_id or None, page=mirror.store.link(**shown)))
        show(results[-1])
    if going_on:
        return results
    for sweep, folder in found.sweeps.values():
        records = folder.records(sweep)
        files = sweep_files(sweep, folder, partial(pictures, records))
        mirror.end_sweep(sweep.id, records, files, sweep_status(sweep, records))
    for identity in {record.sweep for _, record in found.records if record.sweep} - found.sweeps.keys():
        mirror.end_sweep(identity, [], {}, "FINISHED")  # only these records are here to tell of it
    return results


@dataclass(slots=True)
class Tracker:
    """`push` for a bench: a failure is reported once, does not end the bench, and stops further attempts.

    Attributes:
        tracking: where to; None for nowhere.
        pictures: makes plots of records by file name.
        warn: called with what failed, and `later`.
        later: how to push when the bench has ended.
        lost: whether it failed.
        run_id, page: of the bench or its sweep.
    """

    tracking: Tracking | None
    pictures: Callable[[Sequence[Record]], Mapping[str, bytes]]
    warn: Callable[[str], None]
    later: str
    lost: bool = field(default=False, init=False)
    run_id: str | None = field(default=None, init=False)
    page: str | None = field(default=None, init=False)
    _mirror: Mirror | None = field(default=None, init=False)

    def push(self, found: Found, *, going_on: bool = False) -> None:
        """Write the missing parts of these records to MLflow."""
        if self.tracking is None or self.lost:
            return
        try:
            self._mirror = self._mirror or Mirror(Store.open(self.tracking))
            for done in push(found, self._mirror, self.pictures, going_on=going_on):
                self.run_id, self.page = done.run_id, done.page
            for sweep in found.sweeps:
                self.run_id = self._mirror.parent(sweep)
        except TrackingError as error:
            self.lost = True
            self.warn(
                f"{error}\nno result is lost, because records are on disk. When MLflow is reachable: {self.later}"
            )
