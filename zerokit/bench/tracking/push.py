"""Records on disk to MLflow, later and as often as one likes: what is there already is not written again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zerokit.bench.record import Record, read_record
from zerokit.bench.record.sweep import FILE, Sweep, SweepFolder
from zerokit.bench.tracking.content import milliseconds, sweep_files, sweep_status
from zerokit.bench.tracking.mirror import Mirror, Pushed
from zerokit.bench.tracking.store import Store, Tracking
from zerokit.errors import UsageError, ZerokitError


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one record: "new", "completed", "there", "left out" (unsupported: its sweep's run says so), or
    "failed" with the reason. `page` of MLflow shows its run, or the cells of its sweep.
    """

    path: Path
    outcome: Pushed | str
    run_id: str | None
    reason: str | None = None
    page: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The records to push, with their sweeps as far as the folders tell of them."""

    records: list[tuple[Path, Record]]
    sweeps: dict[str, tuple[Sweep, SweepFolder]]
    damaged: list[Done]


def find_records(paths: Sequence[Path]) -> Found:
    """The records in these files and folders, each once.

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
            raise UsageError(f"{path} holds no record")
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
    tracking: Tracking,
    pictures: Callable[[Sequence[Record]], Mapping[str, bytes]],
    *,
    interrupted: Callable[[], None] = lambda: None,
    show: Callable[[Done], None] = lambda done: None,
) -> list[Done]:
    """Bring MLflow to where the records are.

    Args:
        found: by `find_records`.
        tracking: where to.
        pictures: makes plots of records by file name.
        interrupted: raises if the user wants no more; called between the records.
        show: called with every record that is done.

    Raises `TrackingError` as soon as the store fails; what was written by then stays, and the next push completes it.
    """
    mirror = Mirror(Store.open(tracking))
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
    for sweep, folder in found.sweeps.values():
        records = folder.records(sweep)
        files = sweep_files(sweep, folder, partial(pictures, records))
        mirror.end_sweep(sweep.id, records, files, sweep_status(sweep, records))
    for identity in {record.sweep for _, record in found.records if record.sweep} - found.sweeps.keys():
        mirror.end_sweep(identity, [], {}, "FINISHED")  # only these records are here to tell of it
    return results
