"""A sweep: cells that run one after the other, and a folder that knows how far it has come.

    DIR/sweep.json                 what was asked, and the cells in the order in which they run
    DIR/cells/000-LABEL.json       a record a cell, whatever became of it
    DIR/report.html                all of it as a page

Nothing else is remembered: a sweep goes on where the records of its cells end.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from zerokit import files
from zerokit.bench.record import Record, read_record, write_text
from zerokit.bench.record.schema import from_plain, to_plain
from zerokit.bench.record.settings import Settings
from zerokit.bench.run.session import Host, Watch, require_writable, run_cell
from zerokit.bench.sweeps.cells import label, slug, varying
from zerokit.bench.tracking.mirror import Live
from zerokit.bench.tracking.store import Status
from zerokit.errors import UsageError, ZerokitError
from zerokit.nesting import require_shallow

FORMAT = "zerokit.sweep/1"
FILE = "sweep.json"
# Lists and objects in each other: options are lists of words.
_DEEPEST = 16
# The cells that are not run again: their result is known.
DONE = ("ok", "out of memory", "unsupported")


class SweepError(ZerokitError):
    """A folder holds no sweep, or a damaged one, or another process works in it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One of a sweep; `number` counts from 0 in the order of running, `label` tells it from the others."""

    number: int
    label: str
    key: str
    settings: Settings


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a sweep was asked to do: `options` in the command line's words, and the `cells` that follow from them."""

    id: str
    created: str
    options: dict[str, Any]
    cells: list[Cell]
    format: str = field(default=FORMAT)

    @classmethod
    def of(cls, cells: Sequence[Settings], options: dict[str, Any]) -> Sweep:
        """A new one."""
        dimensions = varying(cells)
        made = [
            Cell(number, label(settings, dimensions), settings.key, settings)
            for number, settings in enumerate(cells)
        ]
        return cls(uuid.uuid4().hex, datetime.now(UTC).isoformat(timespec="seconds"), options, made)

    @property
    def title(self) -> str:
        """The options that have several values."""
        several = [
            f"{name} {','.join(map(str, value))}"
            for name, value in self.options.items()
            if isinstance(value, list) and len(value) > 1
        ]
        return "sweep of " + (" × ".join(several) or f"{len(self.cells)} cells")

    def same_cells(self, other: Sweep) -> bool:
        """Whether the other asks for the same, in the same order."""
        return [asdict(cell.settings) for cell in self.cells] == [
            asdict(cell.settings) for cell in other.cells
        ]


class SweepFolder:
    """The places of a sweep."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def report(self) -> Path:
        """The page."""
        return self.path / "report.html"

    def record(self, cell: Cell) -> Path:
        """The file of a cell's record."""
        return self.path / "cells" / f"{cell.number:03d}-{slug(cell.label)}.json"

    def exists(self) -> bool:
        """Whether there is a sweep."""
        return (self.path / FILE).exists()

    def write(self, sweep: Sweep) -> None:
        """Begin a sweep here; raises `RecordError` where nothing can be written."""
        require_writable(self.path)
        try:
            write_text(sweep_json(sweep), self.path / FILE)
        except OSError as error:
            raise SweepError(f"{self.path / FILE} cannot be written: {error.strerror}") from error

    def read(self) -> Sweep:
        """The sweep that was begun here; raises `SweepError`."""
        path = self.path / FILE
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            require_shallow(value, _DEEPEST)
        except FileNotFoundError as error:
            raise SweepError(f"{self.path} holds no sweep: there is no {FILE} in it") from error
        except (OSError, ValueError, RecursionError) as error:
            raise SweepError(f"cannot read the sweep {path}: {error}") from error
        found = value.get("format") if isinstance(value, dict) else None
        if found != FORMAT:
            raise SweepError(f"{path}: format {found!r}, expected {FORMAT!r}")
        try:
            sweep = from_plain(Sweep, value)
        except (ValueError, ZerokitError) as error:
            raise SweepError(f"{path}: malformed sweep: {error}") from error
        if [cell.number for cell in sweep.cells] != list(range(len(sweep.cells))) or not sweep.cells:
            raise SweepError(f"{path}: malformed sweep: its cells are not numbered from 0")
        return sweep

    def records(self, sweep: Sweep) -> list[Record]:
        """The records that are there, in the order of the cells; raises `RecordError` for a damaged one."""
        return [record for cell in sweep.cells if (record := self.existing(cell)) is not None]

    def existing(self, cell: Cell) -> Record | None:
        """The record of a cell, if it has one; raises `RecordError` if that cannot be read."""
        path = self.record(cell)
        return read_record(path) if path.exists() else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other processes from running cells here; raises `SweepError` if one does so now."""
        with files.locked(self.path / FILE) as alone:
            if not alone:
                raise SweepError(f"another zerokit bench is running the sweep in {self.path}")
            yield


class SweepWatch(Watch, Protocol):
    """Who looks on at a sweep."""

    def began(self, cell: Cell) -> None:
        """Told that a cell runs now."""

    def ended(self, cell: Cell, record: Record, *, before: bool) -> None:
        """Told of a cell's record; `before`: it was there already."""


def prepare(folder: SweepFolder, asked: Sweep) -> Sweep:
    """The sweep to run in a folder: the one that was begun there, if it has the same cells, else a new one.

    Raises `UsageError` where a sweep of other cells is in the way.
    """
    if not folder.exists():
        folder.write(asked)
        return asked
    found = folder.read()
    if not found.same_cells(asked):
        raise UsageError(
            f"{folder.path} holds a sweep of other cells: go on with it by --continue {folder.path} alone, "
            "or choose another --output"
        )
    return found


def run_sweep(sweep: Sweep, folder: SweepFolder, host: Host, watch: SweepWatch, live: Live) -> list[Record]:
    """Run the cells that have no result yet, one after the other; the records of all of them, in their order.

    A cell that fails, or does not fit, does not end the sweep. Raises what `run_cell` raises.
    """
    live.open_sweep(sweep.id, sweep.title, sweep.options)
    records = []
    for cell in sweep.cells:
        host.interrupted()
        record = folder.existing(cell)
        done = record is not None and record.status in DONE
        if record is None or not done:
            watch.began(cell)
            record = live.during(
                cell.settings,
                sweep.id,
                lambda identity, cell=cell: run_cell(  # type: ignore[misc]
                    cell.settings, folder.record(cell), host, sweep=sweep.id, identity=identity
                ),
            )
        else:
            live.ensure(record)
        watch.ended(cell, record, before=done)
        records.append(record)
    return records


def exit_code(records: Sequence[Record]) -> int:
    """Of the command: 1 if a cell failed, 4 if none ran, else 0."""
    statuses = {record.status for record in records}
    if statuses & {"failed", "killed"}:
        return 1
    return 0 if "ok" in statuses else 4


def sweep_status(sweep: Sweep, records: Sequence[Record]) -> Status:
    """Of the sweep's MLflow run: KILLED while cells are missing, FAILED if one failed."""
    statuses = [record.status for record in records]
    if len(records) < len(sweep.cells) or "killed" in statuses:
        return "KILLED"
    return "FAILED" if "failed" in statuses else "FINISHED"


def sweep_files(
    sweep: Sweep, folder: SweepFolder, pictures: Callable[[], Mapping[str, bytes]]
) -> dict[str, str | bytes]:
    """What the sweep's MLflow run keeps: what was asked, the page if there is one, plots of all cells together."""
    files: dict[str, str | bytes] = {FILE: sweep_json(sweep)}
    if folder.report.exists():
        files[folder.report.name] = folder.report.read_bytes()
    return files | {f"plots/{name}": content for name, content in pictures().items()}


def sweep_json(sweep: Sweep) -> str:
    """The content of sweep.json."""
    return json.dumps(to_plain(sweep), indent=1, ensure_ascii=False) + "\n"


def write_report(records: Sequence[Record], path: Path, warn: Callable[[str], None]) -> bool:
    """The page of a sweep; False, with a warning, where it cannot be made."""
    from zerokit.bench.comparison.runs import Run
    from zerokit.bench.report.render import write_comparison

    try:
        write_comparison([Run("", tuple(records))], path)
    except Exception as error:  # a page is no reason to end a sweep whose records are whole
        warn(f"the report was not written: {type(error).__name__}: {error}")
        return False
    return True
