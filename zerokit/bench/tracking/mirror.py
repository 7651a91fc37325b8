"""Benches in MLflow, each once: a run a record, a parent run a sweep, found again by tags.

`Mirror` brings an MLflow store to where a record is, however far an earlier attempt came. `Live` uses it beside a
running bench: a store that fails is told of once and then left alone until `zerokit push`.
"""

from __future__ import annotations

import getpass
import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from zerokit.bench.record import Record
from zerokit.bench.record.settings import Settings
from zerokit.bench.tracking.content import (
    CELL_TAG,
    COMPLETE_TAG,
    KIND_TAG,
    NOTE_TAG,
    PARENT_TAG,
    RECORD_TAG,
    SOURCE_TAGS,
    STATUS_TAG,
    SWEEP_TAG,
    TAG_LENGTH,
    Status,
    columns,
    moment_ms,
    run_files,
    run_name,
    run_params,
    run_points,
    run_tags,
    sweep_note,
)
from zerokit.bench.tracking.store import Store, Tracking, TrackingError
from zerokit.process import Process

LAUNCHER_TAG, HOST_TAG = "zerokit.launcher", "zerokit.launcher.host"
"""The process that launched a bench, by which a later one sees that it was killed: nobody else ends its run."""

Pushed = Literal["new", "completed", "there", "left out"]
# "Out of memory" and "unsupported" are results.
_STATUSES: Mapping[str, Status] = {"failed": "FAILED", "killed": "KILLED"}


class Mirror:
    """Runs of benches in one experiment. Every method raises `TrackingError` and nothing else."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._parents: dict[str, str] = {}
        self._varying: dict[str, list[str]] = {}
        """By sweep, the settings of which it has several values."""
        self._here = Process.current()
        self._own = {**SOURCE_TAGS, **_user(), LAUNCHER_TAG: str(self._here), HOST_TAG: self._here.host}
        """Tags of every run that this process leaves RUNNING for a while."""

    def close_orphans(self) -> int:
        """End, as KILLED, the runs that say RUNNING although this host's process that launched them is gone; how many.

        Runs of other hosts, and of processes that cannot be seen from here, stay as they are.
        """
        closed = 0
        for run in self.store.running({HOST_TAG: self._here.host}):
            text, run_id = run.data.tags.get(LAUNCHER_TAG, ""), str(run.info.run_id)
            launcher = Process.parse(text)
            if launcher is None or launcher.lives() is not False:
                continue
            if self.store.tags(run_id).get(LAUNCHER_TAG) != text:
                continue  # another bench has gone on with it meanwhile
            reason = f"its launcher, process {launcher.pid} on {launcher.host}, was killed"
            self.store.write(run_id, tags={STATUS_TAG: "killed", "zerokit.reason": reason})
            self.store.status(run_id, "KILLED")
            closed += 1
        return closed

    def parent(
        self,
        sweep: str,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        started_ms: int | None = None,
    ) -> str:
        """The run of a sweep: the one that is there, or a new one (started now, if not said); its id."""
        if sweep not in self._parents:
            found = self.store.find({SWEEP_TAG: sweep, KIND_TAG: "sweep"})
            if found is None:
                tags = {SWEEP_TAG: sweep, KIND_TAG: "sweep", **self._own}
                run_id = self.store.create(name or f"sweep {sweep[:8]}", tags, started_ms)
            else:
                run_id = found.info.run_id
            self._parents[sweep] = run_id
        if options:
            several = (key for key, value in options.items() if isinstance(value, list) and len(value) > 1)
            self._varying[sweep] = [key.replace("-", "_") for key in several]
            params = {key: _words(value) for key, value in options.items()}
            self.store.write(self._parents[sweep], params=params)
        return self._parents[sweep]

    def end_sweep(
        self, sweep: str, records: Sequence[Record], files: Mapping[str, str | bytes], status: Status
    ) -> str:
        """Write a sweep's outcome to its run: how many cells ended how, their results, and files. The run's id.

        The same once more changes nothing.
        """
        run_id = self.parent(sweep)
        known = self.store.tags(run_id)
        digest = _digest("".join([status, *(record.to_json() for record in records)]))
        if known.get(COMPLETE_TAG) == digest or (not records and known.get(COMPLETE_TAG)):
            return run_id
        counts = Counter(record.status for record in records)
        tags = {f"zerokit.cells.{name.replace(' ', '_')}": str(count) for name, count in counts.items()}
        if records:
            title = f"{len(records)} cells: {', '.join(f'{count} {name}' for name, count in counts.items())}"
            tags[NOTE_TAG] = sweep_note(title, records, self._varying.get(sweep, ()))
            self.store.show_columns(sweep, columns(records), {SWEEP_TAG: sweep, RECORD_TAG: None})
        self.store.write(run_id, tags=tags, files=files)
        self.store.status(run_id, status, max(map(moment_ms, records), default=None))
        self.store.write(run_id, tags={COMPLETE_TAG: digest})
        return run_id

    def begin(self, settings: Settings, identity: str, sweep: str | None) -> str:
        """The run of a bench that is about to start, RUNNING; its id.

        In a sweep a cell keeps its run when it is run again after it failed, and so does an elastic bench.
        """
        tags = {RECORD_TAG: identity, CELL_TAG: settings.key, STATUS_TAG: "running", **self._own}
        if sweep is not None:
            found = self._unfinished(sweep, settings.key)
        else:
            begun = self.store.find({RECORD_TAG: identity}) if settings.elastic else None
            found = None if begun is None else str(begun.info.run_id)
        if found is not None:
            self.store.write(found, tags=tags)
            self.reopen(found)
            return found
        if sweep is None:
            return self.store.create(self._name(settings, None), tags)
        tags |= {SWEEP_TAG: sweep, PARENT_TAG: self.parent(sweep)}
        return self.store.create(self._name(settings, sweep), tags)

    def _name(self, settings: Settings, sweep: str | None) -> str:
        return run_name(settings, self._varying.get(sweep or "", ()))

    def reopen(self, run_id: str) -> None:
        """Show a run as RUNNING, by this process."""
        self.store.write(run_id, tags={**self._own, COMPLETE_TAG: ""})
        self.store.status(run_id, "RUNNING")

    def _unfinished(self, sweep: str, cell: str) -> str | None:
        """The run of a cell that was begun and has no result."""
        for status in ("running", "failed", "killed"):
            if (found := self.store.find({SWEEP_TAG: sweep, CELL_TAG: cell, STATUS_TAG: status})) is not None:
                return str(found.info.run_id)
        return None

    def push(self, record: Record, pictures: Callable[[Record], Mapping[str, bytes]]) -> tuple[Pushed, str]:
        """Bring the run of a record to its end: what was done, and the run's id.

        Args:
            record: any, whatever its status.
            pictures: makes plots by file name; asked only when they are needed.
        """
        digest = _digest(record.to_json())
        found = self.store.find({RECORD_TAG: record.id})
        if record.status == "unsupported" and record.sweep is not None:
            # It never began, and has no status of MLflow's that says so: the sweep's own run tells of it.
            for begun in [found.info.run_id] if found else [self._unfinished(record.sweep, record.cell)]:
                if begun is not None:
                    self.store.delete(begun)
            return "left out", ""
        done: Pushed = "completed"
        if found is not None:
            run_id = str(found.info.run_id)
            if found.data.tags.get(COMPLETE_TAG) == digest:
                return "there", run_id
        elif (
            record.sweep is not None
            and (unfinished := self._unfinished(record.sweep, record.cell)) is not None
        ):
            run_id = unfinished
        else:
            done = "new"
            tags = {RECORD_TAG: record.id, STATUS_TAG: "running", **self._own}
            run_id = self.store.create(self._name(record.settings, record.sweep), tags, _started_ms(record))
        tags = run_tags(record)
        if record.sweep is not None:
            tags[PARENT_TAG] = self.parent(record.sweep)
        files: dict[str, str | bytes] = {**run_files(record)}
        files |= {f"plots/{name}": content for name, content in pictures(record).items()}
        self.store.write(run_id, params=run_params(record), tags=tags, points=run_points(record), files=files)
        started = 0 if found is None else found.info.start_time
        ended = max(moment_ms(record), started)  # of a cell that was refused the record is older than the run
        self.store.status(run_id, _STATUSES.get(record.status, "FINISHED"), ended)
        self.store.write(run_id, tags={COMPLETE_TAG: digest})
        return done, run_id


class Live:
    """MLflow beside a running bench. Nothing here raises: what fails is told once, and `lost` is true from then on.

    Args:
        tracking: where to; None for nowhere.
        warn: told what failed, with `later`.
        later: what to do about it when the bench has ended.
        interruptions: the exceptions that mean KILLED, where any other means FAILED.
        pictures: makes plots for a record.
    """

    def __init__(
        self,
        tracking: Tracking | None,
        warn: Callable[[str], None],
        later: str,
        interruptions: tuple[type[BaseException], ...],
        pictures: Callable[[Record], Mapping[str, bytes]],
    ) -> None:
        self.tracking = tracking
        self.lost = False
        self.run_id: str | None = None
        self.page: str | None = None
        """Of MLflow, with this bench's run or its sweep's cells."""
        self._warn = warn
        self._later = later
        self._interruptions = interruptions
        self._pictures = pictures
        self._mirror: Mirror | None = None
        if tracking is not None:
            self._try(lambda: self._reach(tracking))

    def open_sweep(self, sweep: str, name: str, options: Mapping[str, Any]) -> None:
        """Show the sweep as RUNNING."""

        def work(mirror: Mirror) -> None:
            self.run_id = mirror.parent(sweep, name, options)
            mirror.reopen(self.run_id)
            self.page = mirror.store.link(view=sweep)

        self._with(work)

    def end_sweep(
        self,
        sweep: str,
        records: Sequence[Record],
        files: Callable[[], Mapping[str, str | bytes]],
        status: Status,
    ) -> None:
        """Write the sweep's outcome; `files` is asked only if there is a store."""
        self._with(lambda mirror: mirror.end_sweep(sweep, records, files(), status))

    def during(
        self,
        settings: Settings,
        sweep: str | None,
        work: Callable[[str], Record],
        identity: str | None = None,
    ) -> Record:
        """Show a bench as RUNNING while `work`, given the id of the record to be, comes to it; then fill its run.

        The id is a new one, unless the record has one already.

        An exception of `work` ends the run as KILLED, or FAILED if it is an error, and goes on to the caller.
        """
        known, run_id = identity or uuid.uuid4().hex, ""

        def begin(mirror: Mirror) -> None:
            nonlocal run_id
            run_id = mirror.begin(settings, known, sweep)
            if sweep is None:
                self.run_id, self.page = run_id, mirror.store.link(run_id=run_id)

        def abandon(mirror: Mirror) -> None:
            if run_id:
                mirror.store.write(
                    run_id, tags={STATUS_TAG: status.lower(), "zerokit.reason": reason[:TAG_LENGTH]}
                )
                mirror.store.status(run_id, status)

        self._with(begin)
        try:
            record = work(known)
        except BaseException as error:
            status: Status = "KILLED" if isinstance(error, self._interruptions) else "FAILED"
            reason = str(error) or type(error).__name__
            self._with(abandon)
            raise
        self.ensure(record)
        return record

    def ensure(self, record: Record) -> None:
        """Bring the run of a record to its end, if it is not there yet."""
        self._with(lambda mirror: mirror.push(record, self._pictures))

    def _reach(self, tracking: Tracking) -> None:
        self._mirror = Mirror(Store.open(tracking))
        try:
            self._mirror.close_orphans()
        except TrackingError as error:  # of runs that may be another user's; nothing of this bench is lost
            self._warn(f"runs of killed benches are still shown as RUNNING: {error}")

    def _with(self, work: Callable[[Mirror], object]) -> None:
        mirror = self._mirror
        if mirror is not None and not self.lost:
            self._try(lambda: work(mirror))

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except TrackingError as error:
            self.lost = True
            self._warn(
                f"{error}\nno result is lost: records are on disk. When MLflow can be reached: {self._later}"
            )


def _started_ms(record: Record) -> int | None:
    """About when the first step began; None for a record without steps."""
    if not record.ranks:
        return moment_ms(record) or None
    rank = record.ranks[0]
    return max(0, moment_ms(record) - round(sum(rank.warmup_ms + rank.step_ms)))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _user() -> dict[str, str]:
    """What MLflow shows as a run's creator; nothing where the user has no name, as in some containers."""
    try:
        return {"mlflow.user": getpass.getuser()}
    except (OSError, KeyError):
        return {}


def _words(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
