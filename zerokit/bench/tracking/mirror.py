"""Benches in MLflow: one run per record and one parent run per sweep, found again by their tags.

`Mirror` brings an MLflow store to where a record is, however far an earlier attempt came.
"""

from __future__ import annotations

import getpass
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from zerokit.bench.record import Record
from zerokit.bench.record.settings import Settings
from zerokit.bench.tracking import content
from zerokit.bench.tracking.content import Status, Tag, moment_ms
from zerokit.bench.tracking.store import Store

if TYPE_CHECKING:
    from mlflow.entities import Run

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
        self._own = {**content.SOURCE_TAGS, **_user()}

    def parent(
        self,
        sweep: str,
        name: str | None = None,
        options: Mapping[str, Any] | None = None,
        started_ms: int | None = None,
    ) -> str:
        """Find or create the run of a sweep (started now by default); returns its id."""
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
        """Write a sweep's outcome to its run: counts by status, results and files; returns the run's id.

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

    def _name(self, settings: Settings, sweep: str | None) -> str:
        return content.run_name(settings, self._varying.get(sweep or "", ()))

    def _unfinished(self, sweep: str | None, cell: str) -> Run | None:
        """The run of a sweep's cell that was begun and has no result."""
        for status in ("running", "failed", "killed") if sweep is not None else ():
            found = self.store.find({Tag.SWEEP: sweep or "", Tag.CELL: cell, Tag.STATUS: status})
            if found is not None:
                return found
        return None

    def push(self, record: Record, pictures: Callable[[Record], Mapping[str, bytes]]) -> tuple[Pushed, str]:
        """Write a record to its run and end it; returns what was done, and the run's id.

        Args:
            record: any, whatever its status.
            pictures: makes plots by file name; asked only when they are needed.
        """
        digest = _digest(record.to_json())
        begun = self.store.find({Tag.RECORD: record.id}) or self._unfinished(record.sweep, record.cell)
        if record.status == "unsupported" and record.sweep is not None:
            # MLflow has no status that says so: the sweep's own run tells of it.
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
