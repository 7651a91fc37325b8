"""Writes records on disk to MLflow, one run per record and one parent run per sweep; repeating it writes nothing twice.

`zerokit push` and `zerokit bench` both do this and nothing else; a bench does it between its cells and after the last,
never while ranks run. Runs are found again by their tags, so a push completes what an earlier one began.
"""

from __future__ import annotations

import getpass
import hashlib
import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from zerokit.bench.record.record import Record, is_record, json_below, read_record
from zerokit.bench.run.sweep import FILE, Sweep, SweepFolder, sweep_json
from zerokit.bench.run.traces import read_trace
from zerokit.bench.tracking import content
from zerokit.bench.tracking.content import Status, Tag, moment_ms, sweep_status
from zerokit.bench.tracking.micro import MAIN, SuiteFile, push_suite, read_suite
from zerokit.bench.tracking.store import Store, Tracking, TrackingError
from zerokit.errors import UsageError, ZerokitError
from zerokit.text import without_secrets

Pushed = Literal["new", "completed", "there", "left out"]
# "Out of memory" and "unsupported" are results.
_STATUSES: Mapping[str, Status] = {"failed": "FAILED", "killed": "KILLED"}


@dataclass(frozen=True, slots=True)
class Done:
    """The outcome of one record: "new", "completed", "there", "left out" (unsupported: its sweep's run says so), or
    "failed" with the reason. `page` of MLflow shows its run, or that of its sweep, and then `view` the sweep's cells.
    """

    path: Path
    outcome: Pushed | str
    run_id: str | None
    reason: str | None = None
    page: str | None = None
    view: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """The records to push, with their sweeps if the folders have them."""

    records: list[tuple[Path, Record]]
    sweeps: dict[str, tuple[Sweep, SweepFolder]]
    damaged: list[Done]
    suites: list[tuple[Path, SuiteFile]] = field(default_factory=list)
    """Files of pytest-benchmark."""


def find_records(paths: Sequence[Path]) -> Found:
    """Find the records and files of pytest-benchmark in these files and folders, each once.

    Other .json files below a folder are left out.

    Raises `UsageError` for a path that is not there, or a folder without any record.
    """
    records, folders = dict[str, tuple[Path, Record]](), dict[Path, SweepFolder]()
    sweeps, damaged = dict[str, tuple[Sweep, SweepFolder]](), list[Done]()
    suites = dict[str, tuple[Path, SuiteFile]]()
    for path in paths:
        if not path.exists():
            raise UsageError(f"{path} does not exist; give a record, or a folder of records")
        empty = path.is_dir()
        for file in json_below(path) if path.is_dir() else [path]:
            try:
                if (suite := read_suite(file)) is not None:
                    suites.setdefault(suite.digest, (file, suite))
                elif path.is_dir() and not is_record(file):
                    continue
                else:
                    record = read_record(file)
                    records.setdefault(record.id, (file, record))
                    folders[file.parent.parent] = SweepFolder(file.parent.parent)
            except ZerokitError as error:
                damaged.append(Done(file, "failed", None, str(error).removeprefix(f"{file}: ")))
            empty = False
        if empty:
            raise UsageError(f"{path} has no record")
    for folder in folders.values():
        if folder.exists():
            try:
                sweep = folder.read()
            except ZerokitError as error:
                damaged.append(Done(folder.path / FILE, "failed", None, str(error)))
            else:
                sweeps[sweep.id] = (sweep, folder)
    return Found(list(records.values()), sweeps, damaged, list(suites.values()))


class Mirror(Store):
    """Runs of benches in one experiment. Every method raises `TrackingError` and nothing else."""

    def __init__(self, tracking: Tracking) -> None:
        super().__init__(tracking)
        self._parents: dict[str, str] = {}
        self._varying: dict[str, list[str]] = {}
        """By sweep, the settings of which it has several values."""
        self._own = {**content.SOURCE_TAGS}
        with suppress(OSError, KeyError):  # in some containers the user has no name
            self._own["mlflow.user"] = getpass.getuser()

    def parent(self, sweep: str, plan: Sweep | None = None) -> str:
        """Find or create the run of a sweep, with its options if its `plan` is there; returns the run's id."""
        if sweep not in self._parents:
            tags = {Tag.SWEEP: sweep, Tag.KIND: "sweep"}
            name = plan.title if plan else f"sweep {sweep[:8]}"
            started = moment_ms(plan) or None if plan else None
            found = self.find(tags)
            made = found.info.run_id if found else self.create(name, {**tags, **self._own}, started)
            self._parents[sweep] = made
        if plan is not None and plan.options:
            lists = {
                key: value if isinstance(value, list) else [value] for key, value in plan.options.items()
            }
            self._varying[sweep] = [key.replace("-", "_") for key, values in lists.items() if len(values) > 1]
            params = {key: ",".join(map(str, values)) for key, values in lists.items()}
            self.write(self._parents[sweep], params=params)
        return self._parents[sweep]

    def end_sweep(self, sweep: Sweep, folder: SweepFolder) -> None:
        """Write a sweep's outcome to its run: its table as a note and as metrics, counts by status, and files.

        The same once more changes nothing.
        """
        run_id, records = self.parent(sweep.id), folder.records(sweep)
        counts = Counter(record.status for record in records)
        tags = {f"zerokit.cells.{name.replace(' ', '_')}": str(count) for name, count in counts.items()}
        tags |= {content.NOTE: content.sweep_note(records, sweep.baseline)} if records else {}
        files: dict[str, str | bytes] = {FILE: sweep_json(sweep)}
        if folder.report.exists():
            files[folder.report.name] = folder.report.read_bytes()
        self.write(run_id, tags=tags, points=content.sweep_points(records), files=files)
        ended = max(map(moment_ms, records), default=None)
        self.client.set_terminated(run_id, sweep_status(sweep, records), ended)

    def push(self, record: Record) -> tuple[Pushed, str]:
        """Write a record to its run and end it; returns what was done, and the run's id."""
        if record.status == "unsupported" and record.sweep is not None:
            # MLflow has no status that says so: the sweep's own run counts them.
            return "left out", ""
        text = record.to_json()
        digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        begun = self.find({Tag.RECORD: record.id})
        if begun is not None:
            run_id, started = str(begun.info.run_id), int(begun.info.start_time)
            if begun.data.tags.get(Tag.COMPLETE) == digest:
                return "there", run_id
        else:
            tags = {Tag.RECORD: record.id, Tag.STATUS: "running", **self._own}
            name = content.run_name(record.settings, self._varying.get(record.sweep or "", ()))
            steps_ms = sum(record.ranks[0].warmup_ms + record.ranks[0].step_ms) if record.ranks else 0.0
            started = max(0, moment_ms(record) - round(steps_ms))
            run_id = self.create(name, tags, started or None)
        tags = content.run_tags(record)
        if record.sweep is not None:
            tags[Tag.PARENT] = self.parent(record.sweep)
        params, points = content.run_params(record), content.run_points(record)
        timeline = read_trace(record)
        files: dict[str, str | bytes] = {"record.json": text} | (dict([timeline]) if timeline else {})
        self.write(run_id, params=params, tags=tags, points=points, files=files)
        ended = max(moment_ms(record), started)  # of a cell that was refused the record is older than the run
        self.client.set_terminated(run_id, _STATUSES.get(record.status, "FINISHED"), ended)
        self.write(run_id, tags={Tag.COMPLETE: digest})
        return "new" if begun is None else "completed", run_id

    def push_suite(self, file: SuiteFile) -> tuple[Pushed, str]:
        """Write a file of pytest-benchmark to its runs; returns what was done, and the id of the file's run."""
        return push_suite(self, file, self._own)


def push(
    found: Found,
    mirror: Mirror,
    *,
    going_on: bool = False,
    interrupted: Callable[[], None] = lambda: None,
    show: Callable[[Done], None] = lambda done: None,
) -> list[Done]:
    """Write the missing parts of the records to MLflow.

    With `going_on` more cells of the sweeps follow, so that their own runs have no end yet. `interrupted` is called
    between the records and raises if the user wants no more, `show` with every record that is done.

    Raises `TrackingError` as soon as the store fails; what was written by then stays, and the next push completes it.
    """
    results = list(found.damaged)
    for done in results:
        show(done)
    for sweep, _ in found.sweeps.values():
        mirror.parent(sweep.id, sweep)
    for path, record in found.records:
        interrupted()
        outcome, run_id = mirror.push(record)
        known = record.sweep is not None and record.sweep in found.sweeps
        shown = mirror.parent(str(record.sweep)) if known else run_id
        view = mirror.view({Tag.PARENT: shown}, content.MAIN) if known else None
        results.append(Done(path, outcome, run_id or None, page=mirror.link(shown), view=view))
        show(results[-1])
    for path, suite in found.suites:
        interrupted()
        outcome, run_id = mirror.push_suite(suite)
        view = mirror.view({Tag.PARENT: run_id}, MAIN)
        results.append(Done(path, outcome, run_id, page=mirror.link(run_id), view=view))
        show(results[-1])
    if going_on:
        return results
    for sweep, folder in found.sweeps.values():
        mirror.end_sweep(sweep, folder)
    for identity in {record.sweep for _, record in found.records if record.sweep} - found.sweeps.keys():
        parent = mirror.parent(identity)  # of which only some records are here
        if mirror.client.get_run(parent).info.status == "RUNNING":
            mirror.client.set_terminated(parent, "FINISHED")
    return results


@dataclass(slots=True)
class Tracker:
    """`push` for a bench: a failure is reported once, does not end the bench, and stops further attempts.

    `later` tells how to push when the bench has ended; `run_id`, `page` and `view` are of the bench or its sweep.
    """

    tracking: Tracking | None
    warn: Callable[[str], None]
    later: str
    lost: bool = field(default=False, init=False)
    run_id: str | None = field(default=None, init=False)
    page: str | None = field(default=None, init=False)
    view: str | None = field(default=None, init=False)
    _mirror: Mirror | None = field(default=None, init=False)

    def push(self, found: Found, *, going_on: bool = False) -> None:
        """Write the missing parts of these records to MLflow."""
        if self.tracking is None or self.lost:
            return
        try:
            self._mirror = self._mirror or Mirror(self.tracking)
            for done in push(found, self._mirror, going_on=going_on):
                self.run_id, self.page, self.view = done.run_id, done.page, done.view
            for sweep in found.sweeps:
                self.run_id = self._mirror.parent(sweep)
        except TrackingError as error:
            self.lost = True
            self.warn(
                f"{error}\nno result is lost, because records are on disk. When MLflow is reachable: {self.later}"
            )

    @property
    def lines(self) -> list[str]:
        """How to open the MLflow run, or to repeat a failed write; empty without MLflow."""
        if self.lost:
            return [f"MLflow  not complete; later: {self.later}"]
        if self.tracking is None or self.run_id is None:
            return []
        return [f"MLflow  run {self.run_id}", *open_lines(self.tracking.uri, self.page, self.view)]


def open_lines(uri: str, page: str | None, view: str | None = None) -> list[str]:
    """How to view the runs: the command that serves the store, the page of the run, and the cells of a sweep."""
    uri = without_secrets(uri)
    serve = [] if uri.startswith("http") else [f"serve   mlflow ui --backend-store-uri {shlex.quote(uri)}"]
    return [*serve, f"open    {page or uri}", *([f"cells   {view}"] if view else [])]
