"""One cell from beginning to end, as the process that launches the ranks sees it.

    can it run at all? -- launch the ranks -- rank 0 writes a record -- write it, with the status of the cell

A cell that fails has a record as well, which says why. How ranks are started is the caller's:
`Launch` is all that is asked of a launcher.
"""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from zerokit.bench.catalogue.check import unsupported
from zerokit.bench.catalogue.engines import ENGINES
from zerokit.bench.catalogue.fit import refuse_if_too_large, this_machine
from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.record import Record, RecordError, read_record, require_writable, write_record
from zerokit.bench.record.journal import Journal
from zerokit.bench.record.progress import Progress, ProgressReader
from zerokit.bench.record.schema import to_plain
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.status import oom_kills, read_status
from zerokit.bench.run.elastic import remaining
from zerokit.bench.workloads.inputs import check_inputs
from zerokit.errors import ZerokitError
from zerokit.launch.failures import WorkerFailed

DEFAULT_FOLDER = Path("zerokit-bench")
JOB = "job.json"
_NO_TWIN = "what communication costs is not known: the compute-only twin"
# A reason holds the end of a rank's stderr; a record is no place for more of it.
_REASON_LENGTH = 8000


class Launch(Protocol):
    """Runs a module on every rank and returns when all have ended; raises `ZerokitError` if one failed.

    `log_dir` is the job's folder: on other machines ranks see a copy of its files, in whose place the arguments'
    paths then lie, and what they write beside them is in `log_dir` at the end, or before.
    """

    def __call__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        nodes: int,
        nproc_per_node: int,
        log_dir: Path,
        poll: Callable[[], None],
    ) -> None: ...


class Watch(Protocol):
    """Receives the progress of a bench."""

    def phase(self, text: str) -> None:
        """Told what is going on while no steps are made."""

    def show(self, progress: Progress) -> None:
        """Told of steps."""

    def warn(self, text: str) -> None:
        """Told in plain words what went wrong beside the measurement."""


@dataclass(frozen=True, slots=True)
class Host:
    """Where cells run.

    Attributes:
        launch: starts the ranks.
        interrupted: raises one of `interruptions` if the user wants no more; called between the parts.
        interruptions: the exceptions that mean "killed"; any other error means "failed".
        watch: is told of everything.
        fits: why a cell cannot fit into the memory there is, in words; None where it may.
        max_restarts: how often an elastic bench is started again with the ranks that remain.
    """

    launch: Launch
    interrupted: Callable[[], None]
    interruptions: tuple[type[BaseException], ...]
    watch: Watch
    fits: Callable[[Settings], str | None] = lambda settings: refuse_if_too_large(settings, this_machine())
    max_restarts: int = 0


def record_path(output: Path | None, settings: Settings, now: datetime) -> Path:
    """The record's file: `output` itself if it ends in .json, else a new file in that folder.

    Raises `RecordError` if the folder cannot be made or written to.
    """
    name = f"{now:%Y%m%d-%H%M%S}-{_model_slug(settings)}-{settings.engine}-stage{settings.stage}-world{settings.world}"
    if output is not None and output.suffix == ".json":
        path = output
    else:
        folder = output or DEFAULT_FOLDER
        path = folder / f"{name}.json"
        attempt = 1
        while path.exists():
            attempt += 1
            path = folder / f"{name}-{attempt}.json"
    require_writable(path.parent)
    if path.is_dir():
        raise RecordError(f"the record cannot be written to {path}: Is a directory; choose another --output")
    return path


def require_data(settings: Settings, host: Host) -> None:
    """Raises `ZerokitError` if the data is missing or too little, before any rank is started."""
    if refusal(settings, host) is None:
        check_inputs(settings)


def run_cell(
    settings: Settings, path: Path, host: Host, *, sweep: str | None = None, identity: str | None = None
) -> Record:
    """Run one cell and write its record to `path`, whatever becomes of it.

    A record that is there already is replaced, unless it is of a success and the new one is not.

    Args:
        settings: what to do.
        path: of the record.
        host: where, and what receives the progress.
        sweep: the id of the sweep that the cell belongs to.
        identity: of the record; a new one by default.

    Raises one of `host.interruptions` after the record of the killed cell is written, and `RecordError` where a record
    cannot be written; the temporary folder that then keeps it is named.
    """
    identity = identity or uuid.uuid4().hex
    failed = Record(
        id=identity, cell=settings.key, sweep=sweep, status="failed", created=_now(), settings=settings
    )
    host.watch.phase("looking at what is asked")
    if (refused := refusal(settings, host)) is not None:
        record = replace(failed, status=refused[0], reason=refused[1])
        _put(record, path)
        return record
    work = Path(tempfile.mkdtemp(prefix="zerokit-bench-"))
    keep, journal = False, _journal(settings)
    try:
        outcome = _train(settings, work, host, sweep)
        if isinstance(outcome, Record):
            record = replace(outcome, id=identity)
        else:
            keep = outcome.status == "failed"  # the ranks' output is there
            record = replace(
                failed, status=outcome.status, reason=outcome.reason[:_REASON_LENGTH], created=_now()
            )
            if journal is not None:
                record = replace(record, parts=journal.story().parts)
            if outcome.status == "killed" or not isinstance(outcome.error, ZerokitError):
                _put(record, path)
                raise outcome.error
    finally:
        if not keep:
            shutil.rmtree(work, ignore_errors=True)
    _put(record, path)
    if journal is not None and record.status == "ok":
        journal.finish()
    return record


def refusal(settings: Settings, host: Host) -> tuple[str, str] | None:
    """The status and the reason of a cell that need not be tried; None for one that may run."""
    if (reason := unsupported(settings)) is not None:
        return "unsupported", reason
    if (missing := ENGINES[settings.engine].missing) is not None:
        return "unsupported", f"engine {settings.engine}: {missing}"
    if (missing := describe(settings.model).missing) is not None:
        return "unsupported", missing
    if (too_large := host.fits(settings)) is not None:
        return "out of memory", too_large
    return None


def what_happened(error: BaseException, job: Path, oom_kills_before: int | None) -> tuple[str, str]:
    """The status and the reason of a cell whose ranks ended with this error.

    Args:
        error: what `Launch` raised.
        job: the file of the job, beside which a rank that ran out of memory says so.
        oom_kills_before: `oom_kills()` before the launch: a rank that the kernel killed could not say anything.
    """
    if (told := read_status(job)) is not None:
        return told.status, told.reason.removeprefix(f"{told.status}: ")
    reason = str(error) or type(error).__name__
    killed = isinstance(error, WorkerFailed) and any(
        one.exit_code == -signal.SIGKILL for one in error.failures
    )
    if killed and (oom_kills() or 0) > (oom_kills_before or 0):
        return (
            "out of memory",
            f"the kernel ended processes for want of memory meanwhile, probably ours: {reason}",
        )
    return "failed", reason


@dataclass(frozen=True, slots=True)
class _Unsuccessful:
    """What became of a cell whose ranks ended with this error."""

    status: str
    reason: str
    error: BaseException


def _journal(settings: Settings) -> Journal | None:
    return Journal(Path(settings.save)) if settings.elastic and settings.save else None


def _train(settings: Settings, work: Path, host: Host, sweep: str | None) -> Record | _Unsuccessful:
    """Launch the ranks; those of an elastic bench that remain again, where others were killed."""
    journal, restarts = _journal(settings), 0
    while True:
        folder = work / f"restart-{restarts}" if restarts else work
        kills, part = oom_kills(), journal.count() if journal else 0
        try:
            return _launch(settings, folder, host, sweep)
        except BaseException as error:
            if isinstance(error, host.interruptions):
                end = _Unsuccessful("killed", str(error) or "interrupted", error)
            else:
                end = _Unsuccessful(*what_happened(error, folder / JOB, kills), error)
        why = end.reason.partition("\n")[0]
        if journal is not None:
            journal.end_part(part, why)
        left = None
        if end.status == "failed" and settings.elastic and isinstance(end.error, WorkerFailed):
            left = remaining(settings, end.error)
        if left is None or restarts >= host.max_restarts:
            return end
        settings, restarts = left, restarts + 1
        many = "s" if settings.world > 1 else ""
        host.watch.warn(
            f"{why}\nrestart {restarts} of at most {host.max_restarts}: {settings.world} rank{many} left"
        )


def _launch(settings: Settings, work: Path, host: Host, sweep: str | None) -> Record:
    """Launch the ranks and read what rank 0 has written."""
    host.interrupted()
    work.mkdir(exist_ok=True)
    written, progress, job = work / "record.json", work / "progress", work / JOB
    job.write_text(
        json.dumps(
            {
                "settings": to_plain(settings),
                "record": written.name,
                "progress": progress.name,
                "sweep": sweep,
            }
        )
    )
    reader = ProgressReader(progress)

    def poll() -> None:
        if (latest := reader.latest()) is not None:
            host.watch.show(latest)

    host.watch.phase(f"starting {settings.world} rank{'s' if settings.world > 1 else ''}")
    try:
        host.launch(
            "zerokit.bench.worker",
            [str(job)],
            nodes=settings.nodes,
            nproc_per_node=settings.nproc_per_node,
            log_dir=work,
            poll=poll,
        )
    except WorkerFailed as error:
        if settings.elastic or not written.exists():
            raise
        # All but the twin had been measured and written.
        why = str(error).partition("\n")[0]
        host.watch.warn(f"{_NO_TWIN} failed: {why}")
        return read_record(written)
    record = read_record(written)
    has_twin = settings.world > 1 and not settings.elastic and settings.engine != "compute-only"
    if settings.twin and has_twin and record.twin is None:
        host.watch.warn(f"{_NO_TWIN} found no room in memory beside the cell")
    return record


def put_record(record: Record, path: Path) -> None:
    """Write it; where that fails it goes to a temporary folder, and the `RecordError` says which."""
    try:
        write_record(record, path)
    except OSError as error:
        rescue = Path(tempfile.mkdtemp(prefix="zerokit-record-")) / path.name
        try:
            write_record(record, rescue)
            kept = f"it is kept in {rescue}"
        except OSError as again:
            kept = f"nor to {rescue}: {again.strerror}"
        raise RecordError(f"the record cannot be written to {path}: {error.strerror}; {kept}") from error


def _put(record: Record, path: Path) -> None:
    if record.status != "ok" and path.exists():
        try:
            if read_record(path).status == "ok":
                return
        except RecordError:
            pass  # what is there is no record worth keeping
    put_record(record, path)


def _model_slug(settings: Settings) -> str:
    return "".join(letter if letter.isalnum() or letter in ".-" else "-" for letter in settings.model)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
