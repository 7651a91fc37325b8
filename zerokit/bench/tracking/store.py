"""An MLflow store: runs are found by tags, filled, and ended.

Only the process that launched the ranks talks to MLflow, and never while they run, so that tracking costs the timed
steps nothing. Every failure is a `TrackingError`: losing MLflow loses no measurement.
"""

from __future__ import annotations

import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from zerokit.bench.tracking.content import Point, Status
from zerokit.errors import ZerokitError
from zerokit.text import without_secrets

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.store.entities.paged_list import PagedList
    from mlflow.tracking import MlflowClient

DEFAULT_URI = "sqlite:///mlflow.db"
T = TypeVar("T")

# A server that is down must be noticed in seconds: MLflow's own defaults retry for minutes.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    # Usage reports to MLflow's makers are the user's choice, and no part of a measurement.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Bars of uploads would be drawn over ours.
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
# MLflow shows experiments of this kind with its pages for training, others with those for language models' traces.
_TRAINING = {"mlflow.experimentKind": "custom_model_development"}
# A server refuses a batch with more than these.
_METRICS_A_CALL = 1000
_PARAMS_A_CALL = 100


class TrackingError(ZerokitError):
    """MLflow is unreachable or refused a request; the bench itself is not affected."""

    several_lines = True


@dataclass(frozen=True, slots=True)
class Tracking:
    """Where MLflow runs go."""

    uri: str
    experiment: str


def resolve_uri(asked: str | None) -> str:
    """The store: `uri` if given, else MLFLOW_TRACKING_URI, else SQLite in the working directory."""
    return asked or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def connect(uri: str) -> MlflowClient:
    """An MLflow client whose requests time out in seconds; raises `TrackingError`."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise TrackingError(
            f"MLflow is not installed ({error}); use --no-mlflow or install mlflow"
        ) from error
    # Creating the SQLite file announces every migration otherwise; what fails is said here, without their tracebacks.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    with failing(f"MLflow at {uri} cannot be used"):
        return MlflowClient(tracking_uri=uri)


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Inside, no other process is here for the same SQLite file: the jobs of an array would all create its tables."""
    folder = None
    if uri.startswith("sqlite:///"):
        with suppress(OSError):  # a folder that does not exist, or a file system without locks
            folder = os.open(Path(uri.removeprefix("sqlite:///")).parent, os.O_RDONLY)
            fcntl.flock(folder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if folder is not None:
            os.close(folder)


@dataclass(frozen=True, slots=True)
class Store:
    """One experiment of an MLflow store. Use `open`; every method raises `TrackingError` and nothing else."""

    _client: MlflowClient
    _experiment_id: str
    tracking: Tracking

    @classmethod
    def open(cls, tracking: Tracking) -> Store:
        """Connect to the store, and create the experiment if it does not exist."""
        with failing(f"MLflow at {tracking.uri} cannot be used"):
            name = tracking.experiment
            with _alone(tracking.uri):
                client = connect(tracking.uri)
                known = client.get_experiment_by_name(name)
                if known is not None and known.lifecycle_stage == "deleted":
                    raise ValueError(f"experiment {name!r} is deleted: restore it, or name another")
                found = known.experiment_id if known else client.create_experiment(name, tags=_TRAINING)
            return cls(client, found, tracking)

    def find(self, tags: Mapping[str, str]) -> Run | None:
        """The oldest run of the experiment that has all of these tags; deleted runs are ignored."""
        order = ["attributes.start_time ASC"]
        with self._failing("was not searched"):
            wanted = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
            found = self._client.search_runs([self._experiment_id], wanted, max_results=1, order_by=order)
            return found[0] if found else None

    def tags(self, run_id: str) -> dict[str, str]:
        """The current tags of a run."""
        with self._failing("was not read"):
            return dict(self._client.get_run(run_id).data.tags)

    def create(self, name: str, tags: Mapping[str, str], started_ms: int | None = None) -> str:
        """Create a run with status RUNNING; returns its id."""
        with self._failing("takes no run"):
            run = self._client.create_run(self._experiment_id, started_ms, dict(tags), name)
            return str(run.info.run_id)

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

        metrics = [Metric(point.name, point.value, point.moment_ms, point.step) for point in points]
        given = [Param(*item) for item in (params or {}).items()]
        with self._failing("was not filled"):
            for some in _cut(given, _PARAMS_A_CALL):
                self._client.log_batch(run_id, params=some)
            if tags:
                self._client.log_batch(run_id, tags=[RunTag(*item) for item in tags.items()])
            for many in _cut(metrics, _METRICS_A_CALL):
                self._client.log_batch(run_id, metrics=many)
            with tempfile.TemporaryDirectory(prefix="zerokit-mlflow-") as folder:
                for name, content in (files or {}).items():
                    path = Path(folder, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(content.encode() if isinstance(content, str) else content)
                if files:
                    self._client.log_artifacts(run_id, folder)

    def status(self, run_id: str, status: Status, ended_ms: int | None = None) -> None:
        """End the run with a status."""
        with self._failing(f"left run {run_id} as it was"):
            self._client.set_terminated(run_id, status, ended_ms)

    def link(self, run_id: str) -> str:
        """The URL of a run; for a store without a server, the URL that `mlflow ui` would serve."""
        uri = without_secrets(self.tracking.uri).replace("***@", "")
        root = uri.rstrip("/") if uri.startswith("http") else "http://127.0.0.1:5000"
        return f"{root}/#/experiments/{self._experiment_id}/runs/{run_id}"

    def _failing(self, what: str) -> AbstractContextManager[None]:
        return failing(f"MLflow at {self.tracking.uri} {what}")


def _cut(values: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(values), most):
        yield values[start : start + most]


def pages(search: Callable[..., PagedList[T]]) -> Iterator[T]:
    """All results of an MLflow search."""
    page = search()
    yield from page
    while page.token:
        page = search(page_token=page.token)
        yield from page


@contextmanager
def failing(what: str) -> Iterator[None]:
    """Turns any error inside into a `TrackingError` with a one-line reason.

    Of a connection that failed that is its root, which libraries wrap up to five times.
    """
    try:
        yield
    except TrackingError:
        raise
    except Exception as error:
        root: BaseException = error
        while (below := root.__cause__ or root.__context__) is not None:
            root = below
        root = root if isinstance(root, OSError) else error
        text = str(root).strip().splitlines()
        why = f"{type(root).__name__}: {text[0] if text else 'no message'}"[:300]
        # The cause would show the URI of the store with its password, where somebody prints the trace.
        raise TrackingError(without_secrets(f"{what}: {why}")) from None
