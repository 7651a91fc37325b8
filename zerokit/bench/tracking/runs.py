"""What a user calls a run, and the records that it means: a file, a folder, an MLflow run or an MLflow experiment."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from zerokit.bench.record import FORMAT, Record, RecordError, read_record
from zerokit.bench.record.runs import Run, in_folder, is_record, unique
from zerokit.bench.tracking.store import TrackingError, connect, resolve_uri
from zerokit.errors import UsageError

if TYPE_CHECKING:
    from mlflow.entities import Run as MlflowRun
    from mlflow.tracking import MlflowClient

_RUN_ID = re.compile(r"[0-9a-f]{32}")
# Artifacts lie at most this many folders deep; a run of something else may hold thousands of files.
_DEPTH = 2


def load_run(name: str, tracking_uri: str | None = None) -> Run:
    """The records behind a name: a path where there is one, else an MLflow run's id, else an MLflow experiment's name.

    Raises `UsageError` for a name that is none of these, `RecordError` for a file that is no record or a place without
    any, `TrackingError` where MLflow does not answer.
    """
    path = Path(name)
    if path.is_dir():
        records = list(in_folder(path))
    elif path.exists():
        records = [read_record(path)]
    elif path.suffix == ".json" or "/" in name:
        raise UsageError(f"{name}: no such file or folder")
    else:
        records = _in_mlflow(name, tracking_uri)
    if not records:
        raise RecordError(f"{name} holds no bench record ({FORMAT})")
    return Run(name, tuple(unique(records)))


def load_experiment(name: str, tracking_uri: str | None = None) -> Run:
    """The records of an MLflow experiment; raises as `load_run` does."""
    client = _client(name, tracking_uri)
    records = _of_experiment(client, name)
    if records is None:
        raise UsageError(f"MLflow has no experiment {name!r} at {resolve_uri(tracking_uri)}")
    if not records:
        raise RecordError(f"experiment {name!r} holds no bench record ({FORMAT})")
    return Run(name, tuple(unique(records)))


def _client(name: str, tracking_uri: str | None) -> MlflowClient:
    uri = resolve_uri(tracking_uri)
    file = uri.removeprefix("sqlite:///")
    if uri.startswith("sqlite:///") and not Path(file).exists():
        raise UsageError(
            f"{name!r} is no file or folder here, and no MLflow run either: there is no {file}; "
            "give a record, a folder of records, or --tracking-uri"
        )
    return connect(uri)


def _in_mlflow(name: str, tracking_uri: str | None) -> list[Record]:
    client = _client(name, tracking_uri)
    from mlflow.exceptions import MlflowException

    if not _RUN_ID.fullmatch(name):
        found = _of_experiment(client, name)
        if found is None:
            raise UsageError(
                f"{name!r} is no file or folder here, and neither a run id nor an experiment of MLflow at "
                f"{resolve_uri(tracking_uri)}"
            )
        return found
    try:
        run = client.get_run(name)
        children = client.search_runs(
            [run.info.experiment_id],
            f"tags.`mlflow.parentRunId` = '{name}'",
            order_by=["attributes.start_time ASC"],
        )
    except MlflowException as error:
        raise TrackingError(f"MLflow run {name} cannot be read: {error}") from error
    found = _of_run(client, name)
    for child in children:
        found += _of_run(client, child.info.run_id)
    return found


def _of_experiment(client: MlflowClient, name: str) -> list[Record] | None:
    """None where there is no such experiment."""
    from mlflow.exceptions import MlflowException

    try:
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            return None
        runs: list[MlflowRun] = []
        token: str | None = None
        while True:
            page = client.search_runs(
                [experiment.experiment_id], order_by=["attributes.start_time ASC"], page_token=token
            )
            runs += page
            token = page.token
            if not token:
                break
    except MlflowException as error:
        raise TrackingError(f"MLflow experiment {name!r} cannot be read: {error}") from error
    return [record for run in runs for record in _of_run(client, run.info.run_id)]


def _of_run(client: MlflowClient, run_id: str) -> list[Record]:
    """The records among a run's artifacts."""
    from mlflow.exceptions import MlflowException

    found = []
    try:
        with tempfile.TemporaryDirectory(prefix="zerokit-compare-") as folder:
            for path in _json_artifacts(client, run_id, None, _DEPTH):
                local = Path(client.download_artifacts(run_id, path, folder))
                if is_record(local):
                    found.append(read_record(local))
    except (MlflowException, OSError) as error:
        raise TrackingError(f"the artifacts of MLflow run {run_id} cannot be read: {error}") from error
    return found


def _json_artifacts(client: MlflowClient, run_id: str, folder: str | None, depth: int) -> Iterator[str]:
    for entry in client.list_artifacts(run_id, folder):
        if entry.is_dir and depth:
            yield from _json_artifacts(client, run_id, entry.path, depth - 1)
        elif entry.path.endswith(".json"):
            yield entry.path
