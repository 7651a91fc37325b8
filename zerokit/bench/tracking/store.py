"""An MLflow store, as far as benches need one: runs that are found by tags, filled, and ended.

Only the process that launched the ranks talks to MLflow, and never while they run, so that tracking costs the timed
steps nothing. Every failure is a `TrackingError`: losing MLflow loses no measurement.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from zerokit.bench.tracking.content import Point, Status
from zerokit.errors import ZerokitError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mlflow.entities import Run
    from mlflow.store.entities.paged_list import PagedList
    from mlflow.tracking import MlflowClient

DEFAULT_URI = "sqlite:///mlflow.db"
DEFAULT_EXPERIMENT = "zerokit-bench"
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
    """MLflow could not be reached or refused something; the bench itself is not affected."""

    several_lines = True


@dataclass(frozen=True, slots=True)
class Tracking:
    """Where MLflow runs go."""

    uri: str
    experiment: str


def resolve_uri(asked: str | None) -> str:
    """The store: what was asked for, else MLFLOW_TRACKING_URI, else SQLite in the working directory."""
    return asked or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def connect(uri: str) -> MlflowClient:
    """A client that gives up on a silent server in seconds; raises `TrackingError`."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise TrackingError(
            f"MLflow is not installed ({error}); use --no-mlflow or install mlflow"
        ) from error
    # Creating the SQLite file announces every migration otherwise.
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return _told(f"MLflow at {uri} cannot be used", lambda: MlflowClient(tracking_uri=uri))


class Store:
    """One experiment of an MLflow store. Use `open`; every method raises `TrackingError` and nothing else."""

    def __init__(self, client: MlflowClient, experiment_id: str, tracking: Tracking) -> None:
        self._client = client
        self._experiment_id = experiment_id
        self.tracking = tracking

    @classmethod
    def open(cls, tracking: Tracking) -> Store:
        """Reach the store, and create the experiment if there is none."""

        def reach() -> tuple[MlflowClient, str]:
            client = connect(tracking.uri)
            known = client.get_experiment_by_name(tracking.experiment)
            if known is not None and known.lifecycle_stage == "deleted":
                raise ValueError(
                    f"experiment {tracking.experiment!r} is deleted: restore it, or name another"
                )
            return client, known.experiment_id if known else client.create_experiment(
                tracking.experiment, tags=_TRAINING
            )

        return cls(*_told(f"MLflow at {tracking.uri} cannot be used", reach), tracking)

    def find(self, tags: Mapping[str, str]) -> Run | None:
        """The oldest run of the experiment that has all of these tags; deleted runs are not looked at."""
        wanted = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())

        def search() -> Run | None:
            found = self._client.search_runs(
                [self._experiment_id], wanted, max_results=1, order_by=["attributes.start_time ASC"]
            )
            return found[0] if found else None

        return self._ask("was not searched", search)

    def running(self, tags: Mapping[str, str]) -> list[Run]:
        """The runs that say RUNNING and have all of these tags, of every experiment of the store."""
        wanted = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())

        def search() -> list[Run]:
            experiments = [one.experiment_id for one in _pages(self._client.search_experiments)]
            status = "attributes.status = 'RUNNING'"
            return list(_pages(partial(self._client.search_runs, experiments, f"{status} and {wanted}")))

        return self._ask("was not searched", search)

    def tags(self, run_id: str) -> dict[str, str]:
        """Of a run, as they are now."""
        return self._ask("was not read", lambda: dict(self._client.get_run(run_id).data.tags))

    def create(self, name: str, tags: Mapping[str, str], started_ms: int | None = None) -> str:
        """A new run that says RUNNING; its id."""

        def create() -> str:
            run = self._client.create_run(
                self._experiment_id, start_time=started_ms, run_name=name, tags=dict(tags)
            )
            return str(run.info.run_id)

        return self._ask("takes no run", create)

    def write(
        self,
        run_id: str,
        *,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        points: Iterable[Point] = (),
        files: Mapping[str, str | bytes] | None = None,
    ) -> None:
        """Add to a run. The same once more changes nothing: points are not doubled, files are replaced."""
        from mlflow.entities import Metric, Param, RunTag

        def write() -> None:
            given = [Param(name, value) for name, value in (params or {}).items()]
            for start in range(0, len(given), _PARAMS_A_CALL):
                self._client.log_batch(run_id, params=given[start : start + _PARAMS_A_CALL])
            if tags:
                self._client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
            metrics = [Metric(point.name, point.value, point.moment_ms, point.step) for point in points]
            for start in range(0, len(metrics), _METRICS_A_CALL):
                self._client.log_batch(run_id, metrics=metrics[start : start + _METRICS_A_CALL])
            if files:
                self._upload(run_id, files)

        self._ask("was not filled", write)

    def _upload(self, run_id: str, files: Mapping[str, str | bytes]) -> None:
        with tempfile.TemporaryDirectory(prefix="zerokit-mlflow-") as folder:
            for name, content in files.items():
                path = Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.encode() if isinstance(content, str) else content)
            self._client.log_artifacts(run_id, folder)

    def delete(self, run_id: str) -> None:
        """Move a run to MLflow's bin."""
        self._ask(f"left run {run_id} as it was", lambda: self._client.delete_run(run_id))

    def show_columns(self, view: str, metrics: Sequence[str], tags: Mapping[str, str | None]) -> None:
        """Make the view that `link` opens: runs that have these tags (None: with any value), beside these metrics.

        MLflow keeps a view that somebody shares as a tag of the experiment, in this form.
        """
        wanted = [
            f"tags.`{name}` {'LIKE' if value is None else '='} '{value or '%'}'"
            for name, value in tags.items()
        ]
        state = {
            "searchFilter": " and ".join(wanted),
            "orderByKey": f"metrics.`{metrics[0]}`",  # by time, MLflow would hide them behind their parent
            "orderByAsc": True,
            "startTime": "ALL",
            "lifecycleFilter": "Active",
            "datasetsFilter": [],
            "selectedColumns": [f"metrics.`{name}`" for name in metrics],
            "columnOrder": [f"metrics.`{name}`" for name in metrics],
        }

        def share() -> None:
            self._client.set_experiment_tag(
                self._experiment_id, f"mlflow.sharedViewState.{view}", json.dumps(state)
            )

        self._ask("takes no view", share)

    def link(self, *, run_id: str | None = None, view: str | None = None) -> str:
        """The page of a run, or of the runs of a view; of a store without a server, as `mlflow ui` would serve it."""
        uri = self.tracking.uri
        root = uri.rstrip("/") if uri.startswith("http") else "http://127.0.0.1:5000"
        page = f"{root}/#/experiments/{self._experiment_id}/runs"
        return f"{page}?viewStateShareKey={view}" if run_id is None else f"{page}/{run_id}"

    def status(self, run_id: str, status: Status, ended_ms: int | None = None) -> None:
        """End the run, or open it again with RUNNING."""

        def change() -> None:
            if status == "RUNNING":
                self._client.update_run(run_id, status)
            else:
                self._client.set_terminated(run_id, status, ended_ms)

        self._ask(f"left run {run_id} as it was", change)

    def _ask(self, what: str, question: Callable[[], T]) -> T:
        return _told(f"MLflow at {self.tracking.uri} {what}", question)


def _pages(search: Callable[..., PagedList[T]]) -> Iterator[T]:
    """Everything that a search of MLflow's finds."""
    token: str | None = None
    while True:
        page = search(page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _told(what: str, question: Callable[[], T]) -> T:
    try:
        return question()
    except TrackingError:
        raise
    except Exception as error:
        raise TrackingError(f"{what}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """The error in a line; of a connection that failed its root, which libraries wrap up to five times."""
    root = error
    while (below := root.__cause__ or root.__context__) is not None:
        root = below
    if isinstance(root, OSError):
        error = root
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"[:300]
