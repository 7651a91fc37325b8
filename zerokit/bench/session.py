"""A bench from beginning to end, as the process that launches the ranks sees it.

    check the text -- open the MLflow run -- launch the ranks -- they write the record -- fill the MLflow run

How ranks are started is the caller's: `Launch` is all that is asked of a launcher.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from zerokit.bench.data import STANDARD_LIBRARY, load_corpus, require_length
from zerokit.bench.progress import Progress, ProgressReader
from zerokit.bench.record import Record, RecordError, read_record
from zerokit.bench.schema import to_plain
from zerokit.bench.settings import Settings
from zerokit.bench.tracking import Status, Tracker, TrackingError

DEFAULT_FOLDER = Path("zerokit-bench")


class Launch(Protocol):
    """Runs a module on every rank and returns when all have ended; raises if one failed."""

    def __call__(
        self, module: str, arguments: Sequence[str], *, log_dir: Path, poll: Callable[[], None]
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Tracking:
    """Where the MLflow run goes."""

    uri: str
    experiment: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished bench: its record, the record's file, and the MLflow run that was filled from it, if any."""

    record: Record
    path: Path
    tracker: Tracker | None


def record_path(output: Path | None, settings: Settings, now: datetime) -> Path:
    """The record's file: `output` itself if it ends in .json, else a new file in that folder.

    Raises `RecordError` if the folder cannot be made or written to.
    """
    name = f"{now:%Y%m%d-%H%M%S}-{settings.model}-stage{settings.stage}-world{settings.world}"
    if output is not None and output.suffix == ".json":
        path = output
    else:
        folder = output or DEFAULT_FOLDER
        path = folder / f"{name}.json"
        attempt = 1
        while path.exists():
            attempt += 1
            path = folder / f"{name}-{attempt}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(None, "Is a directory")
    except OSError as error:
        raise RecordError(
            f"the record cannot be written to {path}: {error.strerror}; choose another --output"
        ) from error
    return path


def run_session(
    settings: Settings,
    *,
    path: Path,
    tracking: Tracking | None,
    launch: Launch,
    interrupted: Callable[[], None],
    interruptions: tuple[type[BaseException], ...],
    phase: Callable[[str], None],
    show: Callable[[Progress], None],
    warn: Callable[[str], None],
) -> Outcome:
    """Run the bench.

    Args:
        settings: what to do.
        path: where rank 0 writes the record.
        tracking: None for no MLflow.
        launch: starts the ranks.
        interrupted: raises one of `interruptions` if the user wants no more; called between the parts.
        interruptions: the exceptions that mean KILLED; any other means FAILED.
        phase: told what is going on before the first step.
        show: told of every step.
        warn: told in plain words what went wrong beside the measurement.

    Raises whatever `launch` raises, and `ZerokitError` for bad text or a record that is no record.
    """
    phase("reading the text")
    require_length(load_corpus(settings.data or STANDARD_LIBRARY, seed=settings.seed), settings.seq_len)
    if tracking is not None:
        phase("opening the MLflow run")
    tracker = _open(tracking, settings, warn)
    work = Path(tempfile.mkdtemp(prefix="zerokit-bench-"))
    try:
        interrupted()
        reader = ProgressReader(work / "progress")
        job = work / "job.json"
        job.write_text(
            json.dumps(
                {
                    "settings": to_plain(settings),
                    "record": str(path.resolve()),
                    "progress": str(work / "progress"),
                }
            )
        )

        def poll() -> None:
            if (progress := reader.latest()) is not None:
                show(progress)

        phase(f"starting {settings.world} rank{'s' if settings.world > 1 else ''}")
        launch("zerokit.bench.worker", [str(job)], log_dir=work, poll=poll)
        record = read_record(path)
    except BaseException as error:
        killed = isinstance(error, interruptions)
        _close(tracker, "KILLED" if killed else "FAILED", str(error), warn)
        if killed:
            shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(work, ignore_errors=True)
    if tracker is not None:
        try:
            tracker.fill(record, path)
        except TrackingError as error:
            warn(f"{error}\nthe record is complete: {path}")
            _close(tracker, "FAILED", str(error), lambda again: None)
            tracker = None
    return Outcome(record, path, tracker)


def _open(tracking: Tracking | None, settings: Settings, warn: Callable[[str], None]) -> Tracker | None:
    if tracking is None:
        return None
    tags = {"mlflow.source.name": "zerokit bench", "mlflow.source.type": "LOCAL"}
    try:
        return Tracker.open(tracking.uri, tracking.experiment, settings, tags)
    except TrackingError as error:
        warn(f"{error}\nthe bench goes on without it; its record will be complete")
        return None


def _close(tracker: Tracker | None, status: Status, reason: str, warn: Callable[[str], None]) -> None:
    if tracker is not None:
        try:
            tracker.close(status, reason)
        except TrackingError as error:
            warn(str(error))
