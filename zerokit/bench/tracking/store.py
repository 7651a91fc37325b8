"""An MLflow store: runs are found by tags, filled, ended, and read again.

Only the process that launched the ranks talks to MLflow, and never while they run, so that tracking costs the timed
steps nothing. Every failure is a `TrackingError`: losing MLflow loses no measurement.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import sqlite3
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from zerokit.bench.record.record import FORMAT, Record, RecordError, Run, in_folder, is_record, read_record
from zerokit.bench.tracking.content import Point
from zerokit.bench.tracking.limits import Endless, limited
from zerokit.bench.tracking.schema import is_database, sqlite_path, wrong_schema
from zerokit.errors import UsageError, ZerokitError, ZerokitWarning, root_of
from zerokit.text import without_secrets

if TYPE_CHECKING:
    from mlflow.entities import Run as MlflowRun
    from mlflow.tracking import MlflowClient

DEFAULT_URI = "sqlite:///mlflow.db"

# A server that is down must be noticed in seconds: MLflow's own defaults retry for minutes.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",  # a gateway may ask for hours
    "PGCONNECT_TIMEOUT": "10",  # libpq's own, in which it may wait for a server without end
    # What a server calls a run, and where it says that this is.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    # Usage reports to MLflow's makers are the user's choice, and no part of a measurement.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Bars of uploads would be drawn over ours.
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
# MLflow shows experiments of this kind with its pages for training, others with those for language models' traces.
_TRAINING = {"mlflow.experimentKind": "custom_model_development"}
_TRAINING_PAGES = {"workflowType": "machine_learning"}
"""The same of a link: a browser that was never here opens the other pages."""
_OLDEST_FIRST = ["attributes.start_time ASC"]
# A server refuses calls with more than these.
_MOST_A_CALL = {"params": 100, "tags": 100, "metrics": 1000}
_MOST_RUNS = 50_000
_CALL_SECONDS, _FILE_SECONDS = 60.0, 300.0
"""Within which a call to a server ends, whatever it sends; the latter for one that carries a file."""
_LOCK_SECONDS, _QUIET_SECONDS = 60.0, 2.0
_RUN_ID = re.compile(r"[0-9a-f]{32}")


class TrackingError(ZerokitError):
    """MLflow is unreachable or refused a request; the bench itself is not affected."""

    several_lines = True


@dataclass(frozen=True, slots=True)
class Tracking:
    """Where MLflow runs go; raises `UsageError` for an experiment without a name."""

    uri: str
    experiment: str

    def __post_init__(self) -> None:
        if not self.experiment.strip():  # a variable of a script that is not set
            raise UsageError("experiment is empty: give a name, or leave the option out")


def resolve_uri(asked: str | None) -> str:
    """The store: `uri` if given, else MLFLOW_TRACKING_URI, else SQLite in the working directory."""
    return asked or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


@contextmanager
def failing(what: str) -> Iterator[None]:
    """Turns any error inside into a `TrackingError` with a one-line reason.

    For a failed connection that is the innermost error, which libraries wrap up to five times.
    """
    try:
        yield
    except TrackingError:
        raise
    except Endless as error:
        raise TrackingError(without_secrets(f"{what}: {error}")) from None
    except Exception as error:
        root = root_of(error)
        # urllib3's says "too many 503 error responses".
        told = isinstance(root, OSError | sqlite3.Error) or type(root).__name__ == "ResponseError"
        root = root if told else error
        text = str(root).strip().splitlines()
        why = f"{type(root).__name__}: {text[0] if text else 'no message'}"[:300]
        # The cause would show the URI of the store with its password, where somebody prints the trace.
        raise TrackingError(without_secrets(f"{what}: {why}")) from None


@dataclass(frozen=True, slots=True)
class Client:
    """MLflow's client; all errors of its methods are a `TrackingError`."""

    _client: MlflowClient
    uri: str

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            with failing(f"MLflow at {self.uri} cannot be used"):
                if not self.uri.startswith("http"):
                    return getattr(self._client, name)(*arguments, **more)
                with limited(_FILE_SECONDS if "artifact" in name else _CALL_SECONDS):
                    return getattr(self._client, name)(*arguments, **more)

        return call


def connect(uri: str) -> Client:
    """An MLflow client whose requests time out in seconds; raises `TrackingError`, as its methods do.

    A database of another schema is refused: MLflow would upgrade an older one under its other writers.
    """
    client = _import_client()
    # Creating the SQLite file announces every migration otherwise; what fails is said here, without their tracebacks.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    with failing(f"MLflow at {uri} cannot be used"):
        if is_database(uri):  # other stores need no SQLAlchemy
            if (wrong := wrong_schema(uri)) is not None:
                raise TrackingError(f"MLflow at {without_secrets(uri)}: {wrong[0]}. To do: {wrong[1]}")
            from mlflow.store.db import utils

            utils.MAX_RETRY_COUNT = 3  # it has no variable for this, and 10 take two minutes
        return Client(client(tracking_uri=uri), uri)


def _import_client() -> type[MlflowClient]:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise TrackingError(
            f"MLflow is not installed ({error}); use --no-mlflow or install mlflow"
        ) from error
    return MlflowClient


def _file(uri: str) -> Path | None:
    with failing(f"MLflow at {uri} cannot be used"):
        return sqlite_path(uri)


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Inside, no other process is here for the same SQLite file: the jobs of an array would all create its tables.

    Whoever may read the folder can hold the lock for ever. So it is waited for with a warning, and not for long.
    """
    folder = None
    if (file := _file(uri)) is not None:
        with suppress(OSError):  # a folder that does not exist, or a file system without locks
            folder = os.open(file.parent, os.O_RDONLY)
            _await_lock(folder, file.parent)
    try:
        yield
    finally:
        if folder is not None:
            os.close(folder)


def _await_lock(folder: int, path: Path) -> None:
    started, told = time.monotonic(), False
    while True:
        with suppress(BlockingIOError):
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        waited = time.monotonic() - started
        if waited > _LOCK_SECONDS:
            going_on = (
                f"{path} is still locked after {_LOCK_SECONDS:g} s: MLflow's file there is used all the same"
            )
            warnings.warn(going_on, ZerokitWarning, stacklevel=2)
            return
        if waited > _QUIET_SECONDS and not told:
            told = True
            why = f"waiting for another process that holds {path} locked, for at most {_LOCK_SECONDS:g} s"
            warnings.warn(why, ZerokitWarning, stacklevel=2)
        time.sleep(0.05)


def _create(uri: str) -> None:
    """Make a SQLite file with MLflow's tables, whole or not at all: one that was begun MLflow refuses ever after."""
    file = _file(uri)
    if file is None or "?" in uri or file.exists() or not file.parent.is_dir():
        return
    from sqlalchemy.engine import URL

    # MLflow keeps what it has opened by URI, and this process may have been in another directory then.
    begun = file.absolute().with_name(f".{file.name}.begun")
    with failing(f"MLflow at {uri} cannot be created"):
        for left in file.parent.glob(f"{begun.name}*"):  # and its journal
            left.unlink()
        connect(str(URL.create("sqlite", database=str(begun))))
        begun.rename(file)


class Store:
    """One experiment of an MLflow store, created if it does not exist. Only `TrackingError` is ever raised."""

    def __init__(self, tracking: Tracking) -> None:
        self.tracking, name = tracking, tracking.experiment
        _import_client()  # takes seconds
        with _alone(tracking.uri):
            _create(tracking.uri)
            self.client = connect(tracking.uri)
            known = self.client.get_experiment_by_name(name)
            if known is not None and known.lifecycle_stage == "deleted":
                raise TrackingError(
                    f"MLflow at {without_secrets(tracking.uri)}: experiment {name!r} is deleted: restore it, or name "
                    "another"
                )
            made = known.experiment_id if known else self.client.create_experiment(name, tags=_TRAINING)
        self.experiment_id: str = made

    def find(self, tags: Mapping[str, str]) -> MlflowRun | None:
        """The oldest run of the experiment that has all of these tags; deleted runs are ignored."""
        found: list[MlflowRun] = self.client.search_runs(
            [self.experiment_id], _filter(tags), max_results=1, order_by=_OLDEST_FIRST
        )
        return found[0] if found else None

    def create(self, name: str, tags: Mapping[str, str], started_ms: int | None = None) -> str:
        """Create a run with status RUNNING; returns its id."""
        return str(self.client.create_run(self.experiment_id, started_ms, dict(tags), name).info.run_id)

    def write(
        self,
        run_id: str,
        *,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        points: Iterable[Point] = (),
        files: Mapping[str, str | bytes] | None = None,
    ) -> None:
        """Add content to a run. Repeating it changes nothing: points are not doubled, files are replaced."""
        from mlflow.entities import Metric, Param, RunTag

        entities: dict[str, list[Any]] = {
            "params": [Param(*item) for item in (params or {}).items()],
            "tags": [RunTag(*item) for item in (tags or {}).items()],
            "metrics": [Metric(*point) for point in points],
        }
        for kind, every in entities.items():
            for start in range(0, len(every), _MOST_A_CALL[kind]):
                self.client.log_batch(run_id, **{kind: every[start : start + _MOST_A_CALL[kind]]})
        if not files:
            return
        with tempfile.TemporaryDirectory(prefix="zerokit-mlflow-") as folder:
            for name, content in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.encode() if isinstance(content, str) else content)
                inside = None if path.parent == Path(folder) else str(path.parent.relative_to(folder))
                # One by one: `log_artifacts` has threads, which an answer without end would keep.
                self.client.log_artifact(run_id, str(path), inside)

    def link(self, run_id: str) -> str:
        """The URL of a run; for a store without a server, the URL that `mlflow ui` would serve."""
        return f"{self._runs}/{run_id}?{urlencode(_TRAINING_PAGES)}"

    def view(self, tags: Mapping[str, str], order: str) -> str:
        """The URL of charts of all runs with these tags, the smallest value of the metric `order` first.

        MLflow lists child runs by themselves only in the order of a metric; otherwise they are folded into the row
        of their parent, and no chart shows them.
        """
        query = {
            "searchFilter": _filter(tags),
            "orderByKey": f"metrics.`{order}`",
            "orderByAsc": "true",
            "compareRunsMode": "CHART",
            **_TRAINING_PAGES,
        }
        return f"{self._runs}?{urlencode(query, quote_via=quote)}"

    @property
    def _runs(self) -> str:
        uri = without_secrets(self.tracking.uri).replace("***@", "")
        root = uri.rstrip("/") if uri.startswith("http") else "http://127.0.0.1:5000"
        return f"{root}/#/experiments/{self.experiment_id}/runs"


def _filter(tags: Mapping[str, str]) -> str:
    """The tags as MLflow's search takes them."""
    return " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())


def load_run(name: str, tracking_uri: str | None = None) -> Run:
    """The records behind a name: a path, or an MLflow run's id, or an MLflow experiment's name.

    Raises `UsageError` for a name that is none of these, `RecordError` for a file that is no record or a place without
    any, `TrackingError` where MLflow does not answer.
    """
    path = Path(name)
    if name and path.is_dir():
        records = list(in_folder(path))
    elif name and path.exists():
        records = [read_record(path)]
    elif path.suffix == ".json" or "/" in name:
        raise UsageError(f"{name}: no such file or folder")
    else:
        records = _logged(name, resolve_uri(tracking_uri))
    if not records:
        raise RecordError(f"{name} has no bench record ({FORMAT})")
    # One may lie in several places, such as a sweep's folder and a copy.
    return Run(name, tuple({record.id: record for record in records}.values()))


def _logged(name: str, uri: str) -> list[Record]:
    """The records of an MLflow run and its children, or of an experiment, the oldest first."""
    if (file := _file(uri)) is not None and not file.exists():
        raise UsageError(
            f"{name!r} is not a file or folder, and not an MLflow run, because there is no {file}; "
            "give a record, a folder of records, or --tracking-uri"
        )
    client, runs, wanted = connect(uri), [], ""
    if _RUN_ID.fullmatch(name):
        experiment = client.get_run(name).info.experiment_id
        runs, wanted = [name], f"tags.`mlflow.parentRunId` = '{name}'"
    elif known := client.get_experiment_by_name(name) if name else None:
        experiment = known.experiment_id
    else:
        raise UsageError(
            f"{name!r} is not a file or folder, and not a run id or experiment in MLflow at {without_secrets(uri)}"
        )
    found = client.search_runs([experiment], wanted, max_results=_MOST_RUNS, order_by=_OLDEST_FIRST)
    records = []
    with tempfile.TemporaryDirectory(prefix="zerokit-compare-") as folder:
        for run_id in [*runs, *(run.info.run_id for run in found)]:
            names = [one.path for one in client.list_artifacts(run_id) if one.path.endswith(".json")]
            files = [Path(client.download_artifacts(run_id, name, folder)) for name in names]
            records += [read_record(file) for file in files if is_record(file)]
    return records
