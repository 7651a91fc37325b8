"""A sweep on disk.

DIR/sweep.json                 what was asked, and the cells in the order in which they run
DIR/cells/000-LABEL.json       a record a cell, whatever became of it
DIR/report.html                all of it as a page
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zerokit import files
from zerokit.bench.record.record import Record, read_record, require_writable, write_text
from zerokit.bench.record.schema import Count, from_plain, to_plain
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.words import label, slug, varying
from zerokit.errors import ZerokitError
from zerokit.nesting import require_shallow

FORMAT = "zerokit.sweep/1"
FILE = "sweep.json"
# Lists and objects in each other: options are lists of words.
_DEEPEST = 16


class SweepError(ZerokitError):
    """A folder has no sweep or a damaged one, or another process is using it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A cell in one round of a sweep; `number` counts from 0 in the order of running, `label` is its own."""

    number: Count
    label: str
    key: str
    settings: Settings


@dataclass(frozen=True, slots=True)
class Sweep:
    """The plan of a sweep: its `options` as on the command line, and the resulting `cells`."""

    id: str
    created: str
    options: dict[str, Any]
    cells: list[Trial]
    format: str = field(default=FORMAT)

    @classmethod
    def of(cls, cells: Sequence[Settings], options: dict[str, Any]) -> Sweep:
        """A new one."""
        dimensions = varying(cells)
        made = [
            Trial(number, label(settings, dimensions), settings.key, settings)
            for number, settings in enumerate(cells)
        ]
        return cls(uuid.uuid4().hex, datetime.now(UTC).isoformat(timespec="seconds"), options, made)

    @property
    def title(self) -> str:
        """The sweep's name: the model, and the options with several values; MLflow's tables cut it after 16 letters."""
        several = [
            f"{name} {','.join(map(str, value))}"
            for name, value in self.options.items()
            if isinstance(value, list) and len(value) > 1
        ]
        models = ",".join(dict.fromkeys(cell.settings.model for cell in self.cells))
        return f"{models} sweep of {' × '.join(several) or f'{len(self.cells)} cells'}"

    def same_cells(self, other: Sweep) -> bool:
        """Whether the other sweep has the same cells in the same order."""
        return [asdict(cell.settings) for cell in self.cells] == [
            asdict(cell.settings) for cell in other.cells
        ]


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A sweep of one cell that runs once; `identity` is the record's if it is known before.

    `finished`: the record of an elastic bench whose launcher was killed after it was written.
    """

    path: Path
    identity: str | None = None
    finished: Record | None = None

    def record(self, cell: Trial) -> Path:
        """The path of the cell's record."""
        return self.path

    def existing(self, cell: Trial) -> Record | None:
        """The bench's record, if it has finished already."""
        return self.finished


class SweepFolder:
    """The folder of a sweep and its files."""

    identity: None = None

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def report(self) -> Path:
        """The path of the HTML page."""
        return self.path / "report.html"

    def record(self, cell: Trial) -> Path:
        """The path of a cell's record."""
        return self.path / "cells" / f"{cell.number:03d}-{slug(cell.label)}.json"

    def exists(self) -> bool:
        """Whether the folder has a sweep."""
        return (self.path / FILE).exists()

    def write(self, sweep: Sweep) -> None:
        """Start a sweep in this folder; raises `RecordError` if it cannot be written."""
        require_writable(self.path)
        try:
            write_text(sweep_json(sweep), self.path / FILE)
        except OSError as error:
            raise SweepError(f"{self.path / FILE} cannot be written: {error.strerror}") from error

    def read(self) -> Sweep:
        """Read the sweep of this folder; raises `SweepError`."""
        path = self.path / FILE
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            require_shallow(value, _DEEPEST)
        except FileNotFoundError as error:
            raise SweepError(f"{self.path} has no sweep: there is no {FILE} in it") from error
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
        """The existing records, in the order of the cells; raises `RecordError` for a damaged one."""
        return [record for cell in sweep.cells if (record := self.existing(cell)) is not None]

    def existing(self, cell: Trial) -> Record | None:
        """The record of a cell, if it exists; raises `RecordError` if it cannot be read."""
        path = self.record(cell)
        return read_record(path) if path.exists() else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder against other processes; raises `SweepError` if one is running cells in it."""
        with files.locked(self.path / FILE) as alone:
            if not alone:
                raise SweepError(f"another zerokit bench is running the sweep in {self.path}")
            yield


def sweep_json(sweep: Sweep) -> str:
    """The content of sweep.json."""
    return json.dumps(to_plain(sweep), indent=1, ensure_ascii=False) + "\n"
