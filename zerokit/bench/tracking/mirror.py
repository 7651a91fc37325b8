"""Benches in MLflow, each once: a run a record, a parent run a sweep, found again by tags.

`Mirror` brings an MLflow store to where a record is, however far an earlier attempt came. `Live` uses it beside a
running bench: a failing store is reported once and then left alone until `zerokit push`.
"""

from __future__ import annotations

import getpass
import hashlib
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from zerokit.bench.catalogue.check import unsupported
from zerokit.bench.record import Record
from zerokit.bench.record.settings import Settings
from zerokit.bench.tracking import content
from zerokit.bench.tracking.content import Status, Tag, moment_ms
from zerokit.bench.tracking.store import Store, Tracking, TrackingError
from zerokit.process import Process

if TYPE_CHECKING:
    from mlflow.entities import Run

Pushed = Literal["new", "completed", "there", "left out"]
# "Out of memory" and "unsupported" are results.
_STATUSES: Mapping[str, Status] = {"failed": "FAILED", "killed": "KILLED"}
T = TypeVar("T")


class Mirror:
    """Runs of benches in one experiment. Every method raises `TrackingError` and nothing else."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._parents: dict[str, str] = {}
        self._varying: dict[str, list[str]] = {}
        """By sweep, the settings of which it has several values."""
        self._here = Process.current()
        self._own = {
            **content.SOURCE_TAGS,
            **_user(),
            Tag.LAUNCHER: str(self._here),
            Tag.HOST: self._here.host,
        }
        """Tags of every run that this process leaves RUNNING for a while."""

    def close_orphans(self) -> int:
        """End, as KILLED, the runs that say RUNNING although this host's process that launched them is gone; how many.

        Runs of other hosts, and of processes that cannot be seen from here, stay as they are.
        """
        closed = 0
        for run in self.store.running({Tag.HOST: self._here.host}):
            text, run_id = run.data.tags.get(Tag.LAUNCHER, ""), str(run.info.run_id)
            launcher = Process.parse(text)
            if launcher is None or launcher.lives() is not False:
                continue
            if self.store.tags(run_id).get(Tag.LAUNCHER) != text:
                continue  # another bench has gone on with it meanwhile
            self.abandon(
                run_id, "KILLED", f"its launcher, process {launcher.pid} on {launcher.host}, was killed"
            )
            closed += 1
        return closed

    def abandon(self, run_id: str, status: Status, reason: str) -> None:
        """End a run that comes to no record."""
        tags = {Tag.STATUS: status.lower(), Tag.REASON: reason[: content.TAG_LENGTH]}
        self.store.write(run_id, tags=tags)
        self.store.status(run_id, status)

    def parent(
        self,
        sweep: str,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        started_ms: int | None = None,
    ) -> str:
        """The run of a sweep: the one that is there, or a new one (started now, if not said); its id."""
        if sweep not in self._parents:
            tags = {Tag.SWEEP: sweep, Tag.KIND: "sweep"}
            if (found := self.store.find(tags)) is not None:
                self._parents[sweep] = found.info.run_id
            else:
                name = name or f"sweep {sweep[:8]}"
                self._parents[sweep] = self.store.create(name, tags | self._own, started_ms)
        if options:
            lists = {
                key: value if isinstance(value, list | tuple) else [value] for key, value in options.items()
            }
            self._varying[sweep] = [key.replace("-", "_") for key, values in lists.items() if len(values) > 1]
            params = {key: ",".join(map(str, values)) for key, values in lists.items()}
            self.store.write(self._parents[sweep], params=params)
        return self._parents[sweep]

    def end_sweep(
        self, sweep: str, records: Sequence[Record], files: Mapping[str, str | bytes], status: Status
    ) -> str:
        """Write a sweep's outcome to its run: how many cells ended how, their results, and files. The run's id.

        The same once more changes nothing.
        """
        run_id = self.parent(sweep)
        known = self.store.tags(run_id).get(Tag.COMPLETE)
        digest = _digest("".join([status, *(record.to_json() for record in records)]))
        if known == digest or (not records and known):
            return run_id
        counts = Counter(record.status for record in records)
        tags = {f"zerokit.cells.{name.replace(' ', '_')}": str(count) for name, count in counts.items()}
        if records:
            title = f"{len(records)} cells: {', '.join(f'{count} {name}' for name, count in counts.items())}"
            tags[Tag.NOTE] = content.sweep_note(title, records, self._varying.get(sweep, ()))
            self.store.show_columns(sweep, content.columns(records), {Tag.SWEEP: sweep, Tag.RECORD: None})
        self.store.write(run_id, tags=tags, files=files)
        self.store.status(run_id, status, max(map(moment_ms, records), default=None))
        self.store.write(run_id, tags={Tag.COMPLETE: digest})
        return run_id

    def begin(self, settings: Settings, identity: str, sweep: str | None) -> str:
        """The run of a bench that is about to start, RUNNING; its id.

        In a sweep a cell keeps its run when it is run again after it failed, and so does an elastic bench.
        """
        tags = {Tag.RECORD: identity, Tag.CELL: settings.key, Tag.STATUS: "running"}
        begun = self._unfinished(sweep, settings.key)
        if sweep is None and settings.elastic:
            begun = self.store.find({Tag.RECORD: identity})
        if begun is not None:
            self.reopen(begun.info.run_id, tags)
            return str(begun.info.run_id)
        if sweep is not None:
            tags |= {Tag.SWEEP: sweep, Tag.PARENT: self.parent(sweep)}
        return self.store.create(self._name(settings, sweep), tags | self._own)

    def _name(self, settings: Settings, sweep: str | None) -> str:
        return content.run_name(settings, self._varying.get(sweep or "", ()))

    def reopen(self, run_id: str, tags: Mapping[str, str] | None = None) -> None:
        """Show a run as RUNNING, by this process."""
        self.store.write(run_id, tags={**(tags or {}), **self._own, Tag.COMPLETE: ""})
        self.store.status(run_id, "RUNNING")

    def _unfinished(self, sweep: str | None, cell: str) -> Run | None:
        """The run of a sweep's cell that was begun and has no result."""
        for status in ("running", "failed", "killed") if sweep is not None else ():
            found = self.store.find({Tag.SWEEP: sweep or "", Tag.CELL: cell, Tag.STATUS: status})
            if found is not None:
                return found
        return None

    def push(self, record: Record, pictures: Callable[[Record], Mapping[str, bytes]]) -> tuple[Pushed, str]:
        """Bring the run of a record to its end: what was done, and the run's id.

        Args:
            record: any, whatever its status.
            pictures: makes plots by file name; asked only when they are needed.
        """
        digest = _digest(record.to_json())
        begun = self.store.find({Tag.RECORD: record.id}) or self._unfinished(record.sweep, record.cell)
        if record.status == "unsupported" and record.sweep is not None:
            # It never began, and has no status of MLflow's that says so: the sweep's own run tells of it.
            if begun is not None:
                self.store.delete(begun.info.run_id)
            return "left out", ""
        if begun is not None and begun.data.tags.get(Tag.COMPLETE) == digest:
            return "there", str(begun.info.run_id)
        if begun is not None:
            run_id, started = str(begun.info.run_id), int(begun.info.start_time)
        else:
            tags = {Tag.RECORD: record.id, Tag.STATUS: "running", **self._own}
            name, started = self._name(record.settings, record.sweep), _started_ms(record)
            run_id = self.store.create(name, tags, started or None)
        tags = content.run_tags(record)
        if record.sweep is not None:
            tags[Tag.PARENT] = self.parent(record.sweep)
        files: dict[str, str | bytes] = {**content.run_files(record)}
        files |= {f"plots/{name}": drawn for name, drawn in pictures(record).items()}
        params, points = content.run_params(record), content.run_points(record)
        self.store.write(run_id, params=params, tags=tags, points=points, files=files)
        ended = max(moment_ms(record), started)  # of a cell that was refused the record is older than the run
        self.store.status(run_id, _STATUSES.get(record.status, "FINISHED"), ended)
        self.store.write(run_id, tags={Tag.COMPLETE: digest})
        return "new" if begun is None else "completed", run_id


@dataclass(slots=True)
class Live:
    """MLflow beside a running bench. Nothing here raises: a failure is reported once, and `lost` is true from then on.

    Attributes:
        tracking: where to; None for nowhere.
        warn: called with what failed, and `later`.
        later: what to do about it when the bench has ended.
        interruptions: the exceptions that mean KILLED, where any other means FAILED.
        pictures: makes plots for a record.
        page: of MLflow, with this bench's run or its sweep's cells.
    """

    tracking: Tracking | None
    warn: Callable[[str], None]
    later: str
    interruptions: tuple[type[BaseException], ...]
    pictures: Callable[[Record], Mapping[str, bytes]]
    lost: bool = field(default=False, init=False)
    run_id: str | None = field(default=None, init=False)
    page: str | None = field(default=None, init=False)
    _mirror: Mirror | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if (tracking := self.tracking) is not None:
            self._mirror = self._try(lambda: Mirror(Store.open(tracking)))
        if self._mirror is not None:
            try:
                self._mirror.close_orphans()
            except (
                TrackingError
            ) as error:  # of runs that may be another user's; nothing of this bench is lost
                self.warn(f"runs of killed benches are still shown as RUNNING: {error}")

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
        known = identity or uuid.uuid4().hex
        if unsupported(settings) is not None:
            return work(known)  # which says so, and trains nothing: there is no run to show

        def begin(mirror: Mirror) -> str:
            run_id = mirror.begin(settings, known, sweep)
            if sweep is None:
                self.run_id, self.page = run_id, mirror.store.link(run_id=run_id)
            return run_id

        run_id = self._with(begin)
        try:
            record = work(known)
        except BaseException as error:
            status: Status = "KILLED" if isinstance(error, self.interruptions) else "FAILED"
            reason = str(error) or type(error).__name__
            if run_id is not None:
                self._with(lambda mirror: mirror.abandon(run_id, status, reason))
            raise
        self.ensure(record)
        return record

    def ensure(self, record: Record) -> None:
        """Bring the run of a record to its end, if it is not there yet."""
        self._with(lambda mirror: mirror.push(record, self.pictures))

    def _with(self, work: Callable[[Mirror], T]) -> T | None:
        mirror = self._mirror
        return None if mirror is None or self.lost else self._try(lambda: work(mirror))

    def _try(self, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except TrackingError as error:
            self.lost = True
            self.warn(
                f"{error}\nno result is lost: records are on disk. When MLflow can be reached: {self.later}"
            )
            return None


def _started_ms(record: Record) -> int:
    """About when the first step began; of a record without steps when it was made, or 0 where it does not say."""
    took = sum(record.ranks[0].warmup_ms + record.ranks[0].step_ms) if record.ranks else 0.0
    return max(0, moment_ms(record) - round(took))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _user() -> dict[str, str]:
    """What MLflow shows as a run's creator; nothing where the user has no name, as in some containers."""
    try:
        return {"mlflow.user": getpass.getuser()}
    except (OSError, KeyError):
        return {}
