"""A sweep: the product of its options in the order in which they run, on disk, and how its cells are run.

    DIR/sweep.json                 what was asked, and the cells in the order in which they run
    DIR/cells/000-LABEL.json       a record a cell, whatever became of it
    DIR/report.html                all of it as a page
    DIR/.lock                      held by the process that runs the cells

Nothing but records is remembered: a sweep goes on where the records of its cells end.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from zerokit.bench.catalogue.engines import ENGINES, label_of, require_known, unsupported
from zerokit.bench.catalogue.workloads import WORKLOADS
from zerokit.bench.record.options import DEFAULT_REPEATS, STEPS_A_ROUND
from zerokit.bench.record.record import Record, RecordError, read_record, require_writable, write_text
from zerokit.bench.record.schema import Count, SchemaError, from_plain, parse, to_plain
from zerokit.bench.record.settings import DIMENSIONS, Settings
from zerokit.bench.record.status import Status
from zerokit.bench.record.words import slug, varying
from zerokit.bench.run.session import Host, refusal, run_cell
from zerokit.documents import read_text
from zerokit.errors import UsageError, ZerokitError

FORMAT = "zerokit.sweep/1"
FILE = "sweep.json"


class SweepError(ZerokitError):
    """A folder has no sweep or a damaged one, or another process is using it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A cell in one round of a sweep; `number` counts from 0 in the order of running, `label` is its own."""

    number: Count
    label: str
    key: str
    settings: Settings

    def trace(self, path: Path | None) -> Path | None:
        """The file of its timeline, in the first round: `path` with its number and label before the suffixes."""
        if path is None or self.settings.repeat:
            return None
        suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
        name = f"{path.name.removesuffix(suffix)}-{self.number:03d}-{slug(self.label)}"
        return path.with_name(f"{name}{suffix}")


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
            Trial(number, ", ".join(label_of(settings, dimensions, rounds=True)), settings.key, settings)
            for number, settings in enumerate(cells)
        ]
        return cls(uuid.uuid4().hex, datetime.now(UTC).isoformat(timespec="seconds"), options, made)

    @property
    def baseline(self) -> str | None:
        """The label of the cell that the others are compared with; None for the first."""
        return self.options.get("baseline")

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


def _check(sweep: Sweep) -> None:
    if [cell.number for cell in sweep.cells] != list(range(len(sweep.cells))) or not sweep.cells:
        raise ValueError("its cells are not numbered from 0")
    for cell in sweep.cells:
        require_known(cell.settings)
        if cell.settings.save:  # into any directory of this machine
            raise ValueError(f"cell {cell.number} saves checkpoints, as no cell of a sweep does")


class SweepFolder:
    """The folder of a sweep and its files."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def report(self) -> Path:
        """The path of the HTML page."""
        return self._own("report.html")

    def record(self, cell: Trial) -> Path:
        """The path of a cell's record."""
        return self._own(f"cells/{cell.number:03d}-{slug(cell.label)}.json")

    def _own(self, name: str) -> Path:
        """A file of the folder; raises `SweepError` for a link that leads out of it: a received one may have any."""
        path = self.path / name
        if not path.resolve().is_relative_to(self.path.resolve()):
            raise SweepError(f"{path} is a link that leads out of the sweep's folder: remove it")
        return path

    def exists(self) -> bool:
        """Whether the folder has a sweep."""
        return (self.path / FILE).exists()

    def write(self, sweep: Sweep) -> None:
        """Start a sweep in this folder; raises `SweepError` if it cannot be written."""
        try:
            write_text(sweep_json(sweep), self._own(FILE))
        except OSError as error:
            raise SweepError(f"{self.path / FILE} cannot be written: {error.strerror}") from error

    def read(self) -> Sweep:
        """Read the sweep of this folder.

        Raises `UsageError` if there is no such folder, `SweepError` for no sweep in it or one with unknown engines or
        models.
        """
        path = self.path / FILE
        if not self.path.exists():
            raise UsageError(f"{self.path} does not exist; give the folder of a sweep")
        try:
            return parse(Sweep, read_text(self._own(FILE)), "sweep", SweepError, _check)
        except FileNotFoundError as error:
            raise SweepError(f"{self.path} has no sweep: there is no {FILE} in it") from error
        except (OSError, ValueError, SweepError) as error:
            raise SweepError(f"cannot read the sweep {path}: {error}") from error

    def records(self, sweep: Sweep) -> list[Record]:
        """The existing records, in the order of the cells, without those that cannot be read."""
        found = []
        for cell in sweep.cells:
            with suppress(RecordError):
                found.append(self.existing(cell))
        return [record for record in found if record is not None]

    def existing(self, cell: Trial) -> Record | None:
        """The record of a cell, if it exists; raises `RecordError` if it cannot be read."""
        path = self.record(cell)
        return read_record(path) if path.exists() else None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock the folder against other processes; raises `SweepError` if one is running cells in it.

        Without effect on a file system without locks. Raises `RecordError` if the folder cannot be written.
        """
        require_writable(self.path)
        with self._own(".lock").open("a") as file:  # NFS locks only files that are open for writing
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SweepError(f"another zerokit bench is running the sweep in {self.path}") from None
            except OSError:
                pass
            yield


def sweep_json(sweep: Sweep) -> str:
    """The content of sweep.json."""
    return json.dumps(to_plain(sweep), indent=1, ensure_ascii=False) + "\n"


_DEFAULTS = Settings()


def product(
    options: Mapping[str, Sequence[Any]],
    fixed: Mapping[str, Any],
    repeats: int | None = 1,
    *,
    devices: int = 0,
    shared: bool = True,
) -> list[Settings]:
    """Every combination of `options`, in rounds.

    Args:
        options: values by dimension, of which a value counts once; one that is left out, or empty, has its default.
            Without a stage an engine takes its own; a model of fewer positions than the default has sequences of them.
        fixed: the other fields of `Settings`, equal in all cells.
        repeats: rounds through all cells, None for the usual number. Every second one goes backwards, so that a steady
            drift of the machine weighs equally on the first and the last. Several have fewer steps each by default.
        devices: of this machine; nodes have equal shares of them as their ranks (if not `shared`, each has as many).

    Raises `UsageError` for settings that do not fit together, or that no record could hold.
    """
    values = [tuple(dict.fromkeys(options.get(name) or (None,))) for name in DIMENSIONS]
    once = []
    for combination in itertools.product(*values):
        chosen = {
            name: value for name, value in zip(DIMENSIONS, combination, strict=True) if value is not None
        }
        engine = chosen.setdefault("engine", _DEFAULTS.engine)
        if "stage" not in chosen and engine in ENGINES:
            chosen["stage"] = ENGINES[engine].default_stage
        if "nproc_per_node" not in chosen:
            chosen["nproc_per_node"] = max(1, devices // (chosen.get("nodes", 1) if shared else 1))
        given = {**fixed, **chosen}
        workload = WORKLOADS.get(given.get("model", _DEFAULTS.model))
        if "seq_len" not in given and workload is not None and workload.text is not None:
            given["seq_len"] = min(_DEFAULTS.seq_len, workload.text.positions)
        settings = Settings(**given)
        try:
            from_plain(Settings, asdict(settings))
        except SchemaError as error:
            raise UsageError(str(error)) from error
        once.append(require_known(settings))
    once = list(dict.fromkeys(once))
    repeats = repeats or (DEFAULT_REPEATS if len(once) > 1 else 1)
    if repeats > 1 and "steps" not in fixed:
        once = [replace(cell, steps=STEPS_A_ROUND) for cell in once]
    rounds = []
    for number in range(repeats):
        cells = once if number % 2 == 0 else once[::-1]
        # What cannot run has one record.
        rounds += [replace(cell, repeat=number) for cell in cells if number == 0 or unsupported(cell) is None]
    return rounds


def prepare(folder: SweepFolder, asked: Sweep) -> Sweep:
    """The sweep to run in a folder: the one started there if it has the same cells, otherwise a new one.

    Raises `UsageError` where a sweep of other cells is in the way.
    """
    if not folder.exists():
        folder.write(asked)
        return asked
    begun = folder.read()
    if [cell.settings for cell in begun.cells] != [cell.settings for cell in asked.cells]:
        raise UsageError(
            f"{folder.path} has a sweep of other cells: continue it by --continue {folder.path} alone, "
            "or choose another --output"
        )
    return begun


def run_sweep(
    sweep: Sweep,
    folder: SweepFolder,
    host: Host,
    track: Callable[[Path, Record], None] = lambda path, record: None,
    trace: Path | None = None,
) -> list[Record]:
    """Run the cells that have no result yet; returns the records of all cells, in order. Raises what `run_cell` raises.

    `track` receives each new record; timelines are named after `trace`. A cell that fails, or does not fit, ends no
    sweep.
    """
    records = []
    for cell in sweep.cells:
        host.interrupted()
        record = folder.existing(cell)
        done = record is not None and record.status.final
        if (
            record is not None and record.status is Status.UNSUPPORTED
        ):  # its package may have been installed since
            done = refusal(cell.settings, host) is not None
        if record is None or not done:
            host.watch.began(cell.number, cell.label)
            path, identity = folder.record(cell), None if record is None else record.id
            record = run_cell(
                cell.settings, path, host, sweep=sweep.id, identity=identity, trace=cell.trace(trace)
            )
            track(path, record)
        host.watch.ended(cell.number, cell.label, record, before=done)
        records.append(record)
    return records


def exit_code(records: Sequence[Record]) -> int:
    """The command's exit code: 1 if a cell failed, 4 if none ran, else 0."""
    statuses = {record.status for record in records}
    if not all(status.final for status in statuses):
        return 1
    return 0 if Status.OK in statuses else 4
