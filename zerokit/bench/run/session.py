"""One cell from start to end, in the process that launches the ranks.

    can it run at all? -- launch the ranks -- rank 0 writes a record -- write it, with the status of the cell

A cell that fails has a record as well, which says why. How ranks are started is the caller's:
`Launch` is all that a launcher has to be.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import signal
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from zerokit.bench.catalogue.engines import ENGINES, Machine, refuse_if_too_large, this_machine, unsupported
from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.record.journal import Journal
from zerokit.bench.record.record import Record, RecordError, read_record, require_writable, write_record
from zerokit.bench.record.schema import to_plain
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.status import Outcome, Progress, Status, oom_kills, read_outcome, read_progress
from zerokit.bench.run.traces import WRITTEN, keep, refusal_of_trace
from zerokit.bench.workloads.inputs import check_inputs
from zerokit.errors import ZerokitError
from zerokit.files import path_of
from zerokit.launch.failures import Failure, WorkerFailed
from zerokit.launch.limits import Limit, missing

_NOT_THE_JOBS = {
    *("nodes", "nproc_per_node", "mesh", "every", "fragments", "delay"),  # as `remaining` changes them
    *("bucket_mb", "warmup", "save", "save_every", "copies", "copy_every", "copy_to", "repeat"),
}


def remaining(settings: Settings, error: WorkerFailed) -> Settings | None:
    """The settings of a launch with the surviving ranks, at least one; None if no rank was killed.

    Every node has the same number of ranks. So where ranks of some nodes were lost, the bench goes on with the other
    nodes, or with as many ranks of each as the node that lost most still has, whichever are more ranks. Islands go on
    without those that were lost; one that is left alone trains without local steps.
    """
    killed = Counter(one.node for one in _killed(error))
    if not killed:
        return None
    whole = (settings.nodes - len(killed), settings.nproc_per_node)
    smaller = (settings.nodes, settings.nproc_per_node - max(killed.values()))
    best = max(whole, smaller, key=lambda shape: min(shape) > 0 and shape[0] * shape[1])
    nodes, ranks = best if min(best) > 0 else (1, 1)
    left: dict[str, Any] = {"nodes": nodes, "nproc_per_node": ranks}
    if settings.every is not None:
        islands = nodes if settings.mesh else nodes * ranks
        if islands == 1:
            left |= {"every": None, "fragments": 1, "delay": 0, "mesh": None}
        elif settings.mesh:
            left["mesh"] = f"{nodes}x{ranks}"
    return replace(settings, **left)


def same_job(asked: Settings, done: Settings) -> bool:
    """Whether the record of a finished elastic bench, with the settings `done`, answers a command.

    Ranks may be others each time, and what the command leaves open was chosen by the job.
    """
    return all(
        value is None or value == getattr(done, name)
        for name, value in asdict(asked).items()
        if name not in _NOT_THE_JOBS
    )


def _killed(error: WorkerFailed) -> list[Failure]:
    """Ranks ended by a signal. Not SIGTERM, by which a rank is asked to end.

    A rank that has lost its peer may abort; of those that did, one alone is the cause where no other signal was.
    """
    killed = [one for one in error.failures if one.exit_code < 0 and one.exit_code != -signal.SIGTERM]
    sent = [one for one in killed if one.exit_code != -signal.SIGABRT]
    return sent or killed[:1]


DEFAULT_FOLDER = Path("zerokit-bench")
JOB = "job.json"
_UNKNOWN = "the cost of communication is unknown"
_NO_TWIN = f"{_UNKNOWN}: the compute-only twin"
# A reason holds the end of a rank's stderr; a record should not hold more of it.
_REASON_LENGTH = 8000


Launch = Callable[..., None]
"""`launch(module, arguments, nodes=, nproc_per_node=, log_dir=, poll=)` runs a module on every rank; with
`limits=`, in rank order, too, where ranks are held to cores or memory.

It returns when all have ended, and raises `ZerokitError` if one failed. `log_dir` is the job's folder: on other
machines ranks see a copy of its files, and what they write beside them is in `log_dir` at the end, or before. `poll` is
called now and then.
"""


class Watch(Protocol):
    """Receives the progress of a bench or a sweep."""

    def phase(self, text: str) -> None:
        """The current phase, while no steps are running."""

    def show(self, progress: Progress) -> None:
        """More steps are done."""

    def warn(self, text: str) -> None:
        """A problem outside the measurement, as text."""

    def began(self, number: int, label: str) -> None:
        """A cell of a sweep starts."""

    def ended(self, number: int, label: str, record: Record, *, before: bool) -> None:
        """A cell of a sweep has its record; `before` if an earlier process wrote it."""


@dataclass(frozen=True, slots=True)
class Host:
    """What starts and watches the ranks.

    `interrupted` is called between the parts and raises one of `interruptions` if the user wants no more: such a cell
    is killed, any other error failed. `memory` tells what ranks have, None where that is not known here, and
    `max_restarts` how often an elastic bench is started again. `unlimited` tells why ranks cannot be held to cores and
    memory, None where they can.
    """

    launch: Launch
    interrupted: Callable[[], None]
    interruptions: tuple[type[BaseException], ...]
    watch: Watch
    memory: Callable[[], Machine] | None = this_machine
    max_restarts: int = 0
    unlimited: Callable[[], str | None] = missing


def record_path(output: Path | None, settings: Settings, now: datetime) -> Path:
    """The record's path: `output` itself if it ends in .json, otherwise a new file in that folder.

    Raises `RecordError` if the folder cannot be made or written to.
    """
    path = output or DEFAULT_FOLDER
    if path.suffix != ".json":
        model = re.sub(r"[^\w.-]|_", "-", settings.model)
        name = f"{now:%Y%m%d-%H%M%S}-{model}-{settings.engine}-stage{settings.stage}-world{settings.world}"
        path = unused(path / f"{name}.json")
    require_writable(path.parent)
    if path.is_dir():
        raise RecordError(f"the record cannot be written to {path}: Is a directory; choose another --output")
    return path


def require_data(settings: Settings, host: Host) -> None:
    """Raise `ZerokitError` if the data is missing or too small, before any rank starts."""
    if refusal(settings, host) is None:
        check_inputs(settings)


def run_cell(
    settings: Settings,
    path: Path,
    host: Host,
    *,
    sweep: str | None = None,
    identity: str | None = None,
    trace: Path | None = None,
) -> Record:
    """Run one cell and write its record to `path`, whether it succeeds or fails.

    A record that is there already is replaced, unless it is of a success and the new one is not. One that another
    bench writes there meanwhile stays: this one then gets a number, and `host.watch` a warning.

    `sweep` is the id of the sweep that the cell belongs to, `identity` that of the record: a new one by default.
    `trace` is the file of a timeline; a cell that can have none has none.

    Raises one of `host.interruptions` after the record of the killed cell is written, and `RecordError` where a record
    cannot be written; the temporary folder that then keeps it is named.
    """
    asked = Record(
        id=identity or uuid.uuid4().hex,
        cell=settings.key,
        sweep=sweep,
        status=Status.FAILED,
        created=_now(),
        settings=settings,
    )
    put = partial(_put, path=path, host=host, fresh=not path.exists())
    host.watch.phase("checking the settings")
    if (refused := refusal(settings, host)) is not None:
        return put(replace(asked, **refused._asdict()))
    journal = Journal(path_of(settings.save)) if settings.elastic and settings.save else None
    work, kept = Path(tempfile.mkdtemp(prefix="zerokit-bench-")), False
    try:
        record, error = _train(asked, work, host, journal, trace)
        # The ranks' output is there; a reason that names it has to be true.
        kept = record.status is Status.FAILED or str(work) in (record.reason or "")
    finally:
        if not kept:
            shutil.rmtree(work, ignore_errors=True)
    put(record)
    if error is not None and (record.status is Status.KILLED or not isinstance(error, ZerokitError)):
        raise error
    return record


def refusal(settings: Settings, host: Host) -> Outcome | None:
    """The status and reason of a cell that cannot run; None if it may run."""
    reason = unsupported(settings)
    if reason is None and (missing := ENGINES[settings.engine].missing) is not None:
        reason = f"engine {settings.engine}: {missing}"
    reason = reason or describe(settings.model).missing
    if reason is None and limits_of(settings):
        reason = host.unlimited()
    if reason is not None:
        return Outcome(Status.UNSUPPORTED, reason)
    too_large = None if host.memory is None else refuse_if_too_large(settings, host.memory())
    return None if too_large is None else Outcome(Status.OUT_OF_MEMORY, too_large)


def limits_of(settings: Settings) -> list[Limit]:
    """What each rank is held to; empty without limits."""
    cores, memory = settings.cores, settings.memory_bytes
    if not cores and not memory:
        return []
    no_limit = (None,) * settings.world
    return [Limit(*each) for each in zip(cores or no_limit, memory or no_limit, strict=True)]


def what_happened(error: BaseException, job: Path, oom_kills_before: int | None) -> Outcome:
    """The status and reason of a cell whose ranks ended with this error; `oom_kills_before` is of before the launch."""
    if (own := read_outcome(job)) is not None:
        return own._replace(reason=own.reason.removeprefix(f"{own.status}: "))
    reason = str(error) or type(error).__name__
    failures = error.failures if isinstance(error, WorkerFailed) else []
    killed = any(one.exit_code == -signal.SIGKILL for one in failures)
    if killed and (oom_kills() or 0) > (oom_kills_before or 0):
        reason = f"the kernel ended processes when out of memory, probably these: {reason}"
        return Outcome(Status.OUT_OF_MEMORY, reason)
    return Outcome(Status.FAILED, reason)


def _train(
    asked: Record, work: Path, host: Host, journal: Journal | None, trace: Path | None
) -> tuple[Record, BaseException | None]:
    """Launch the ranks; those of an elastic bench that remain again, where others were killed.

    Returns the record, and how the last launch failed if it did.
    """
    settings = asked.settings
    for restarts in itertools.count():
        folder = work / f"restart-{restarts}" if restarts else work
        kills, part = oom_kills(), journal.count() if journal else 0
        try:
            record, cut_short = _launch(settings, folder, host, asked, traced=trace is not None)
            record = replace(record, id=asked.id)
            return record if trace is None else keep(record, folder, trace, host.watch.warn), cut_short
        except BaseException as error:
            outcome, failed = what_happened(error, folder / JOB, kills), error
            if isinstance(error, host.interruptions):
                outcome = Outcome(Status.KILLED, str(error) or "interrupted")
        why, left = outcome.reason.partition("\n")[0], None
        if journal is not None:
            journal.end_part(part, why)
        if outcome.status is Status.FAILED and settings.elastic and isinstance(failed, WorkerFailed):
            left = remaining(settings, failed)
        if left is None or restarts >= host.max_restarts:
            break
        settings = left
        host.watch.warn(
            f"{why}\nrestart {restarts + 1} of at most {host.max_restarts}: {_ranks(settings)} left"
        )
    reason, parts = outcome.reason[:_REASON_LENGTH], journal.story().parts if journal else []
    return replace(asked, status=outcome.status, reason=reason, created=_now(), parts=parts), failed


def _launch(
    settings: Settings, work: Path, host: Host, asked: Record, *, traced: bool
) -> tuple[Record, BaseException | None]:
    """Launch the ranks and read what rank 0 has written; also returns what interrupted them after that."""
    host.interrupted()
    work.mkdir(exist_ok=True)
    written, job, progress = work / "record.json", work / JOB, work / "progress"
    files = {"record": written.name, "progress": progress.name}
    content = {"settings": to_plain(settings), **files, "sweep": asked.sweep}
    if traced := traced and refusal_of_trace(settings) is None:
        content["trace"] = WRITTEN
    if settings.copies is not None:  # found again by whoever goes on with this job, and by no other one
        content["memory"] = str(path_of(settings.copy_to) / f"zerokit-{asked.id}")
    job.write_text(json.dumps(content))

    def poll() -> None:
        if (latest := read_progress(progress)) is not None:
            host.watch.show(latest)

    host.watch.phase(f"starting {_ranks(settings)}")
    survivable: tuple[type[BaseException], ...] = (WorkerFailed, *host.interruptions)
    limits = limits_of(settings)
    try:
        host.launch(
            "zerokit.bench.worker",
            [str(job)],
            nodes=settings.nodes,
            nproc_per_node=settings.nproc_per_node,
            log_dir=work,
            poll=poll,
            **({"limits": limits} if limits else {}),
        )
    except survivable as error:
        if settings.elastic or not written.exists():
            raise
        # The measured steps are written, and with zerokit's `bandwidth` all but the twin.
        record = read_record(written)
        before = settings.engine == "zerokit" and not record.bandwidth
        what = _NO_TWIN if not before else f"{_NO_TWIN}, or collectives by themselves before it,"
        if traced and record.trace is None:  # it is made before these
            what = f"there is no timeline, and {_UNKNOWN}: the step that is traced"
        why = str(error).partition("\n")[0]
        host.watch.warn(f"{what} failed: {why}")
        return record, error if isinstance(error, host.interruptions) else None
    record = read_record(written)
    has_twin = settings.world > 1 and not settings.elastic and settings.engine != "compute-only"
    if settings.twin and has_twin and record.twin is None:
        host.watch.warn(f"{_NO_TWIN} had no room in memory beside the cell")
    return record, None


def _put(record: Record, path: Path, host: Host, *, fresh: bool) -> Record:
    """Write the record, unless it is of no success and would replace one of a success.

    Where a `fresh` file has come from another bench meanwhile, the record goes beside it. Where it cannot be written
    it goes to a temporary folder, and the `RecordError` names it.
    """
    there = None
    with contextlib.suppress(RecordError):  # then what is there is no record worth keeping
        there = read_record(path) if path.exists() else None
    if fresh and there is not None and there.id != record.id:
        taken, path = path, unused(path)
        host.watch.warn(f"another bench has written {taken} meanwhile: this record is in {path}")
    elif there is not None and there.status is Status.OK and record.status is not Status.OK:
        return record
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
    return record


def unused(path: Path) -> Path:
    """`path`, or the first of `NAME-2`, `NAME-3`, … where that is there already."""
    numbered = (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2))
    return next(one for one in itertools.chain([path], numbered) if not one.exists())


def _ranks(settings: Settings) -> str:
    return f"{settings.world} rank{'s' if settings.world > 1 else ''}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
