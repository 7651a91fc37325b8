"""The records behind a user's name for a run: a file, a folder, an MLflow run or an MLflow experiment."""

from __future__ import annotations

import re
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zerokit.bench.record import FORMAT, Record, RecordError, read_record
from zerokit.bench.record.runs import Run, in_folder, is_record, unique
from zerokit.bench.tracking.store import connect, failing, pages, resolve_uri
from zerokit.errors import UsageError
from zerokit.text import without_secrets

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

_RUN_ID = re.compile(r"[0-9a-f]{32}")


def load_run(name: str, tracking_uri: str | None = None) -> Run:
    """The records behind a name: a path, or an MLflow run's id, or an MLflow experiment's name.

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
        client = _client(name, tracking_uri)
        found = _of_run(client, name) if _RUN_ID.fullmatch(name) else _of_experiment(client, name)
        if found is None:
            raise UsageError(
                f"{name!r} is not a file or folder, and not a run id or experiment in MLflow at "
                f"{without_secrets(resolve_uri(tracking_uri))}"
            )
        records = found
    if not records:
        raise RecordError(f"{name} has no bench record ({FORMAT})")
    return Run(name, tuple(unique(records)))


def load_experiment(name: str, tracking_uri: str | None = None) -> Run:
    """The records of an MLflow experiment; raises as `load_run` does."""
    records = _of_experiment(_client(name, tracking_uri), name)
    if records is None:
        raise UsageError(f"MLflow has no experiment {name!r} at {without_secrets(resolve_uri(tracking_uri))}")
    if not records:
        raise RecordError(f"experiment {name!r} has no bench record ({FORMAT})")
    return Run(name, tuple(unique(records)))


def _client(name: str, tracking_uri: str | None) -> MlflowClient:
    uri = resolve_uri(tracking_uri)
    file = uri.removeprefix("sqlite:///")
    if uri.startswith("sqlite:///") and not Path(file).exists():
        raise UsageError(
            f"{name!r} is not a file or folder, and not an MLflow run, because there is no {file}; "
            "give a record, a folder of records, or --tracking-uri"
        )
    return connect(uri)


def _of_run(client: MlflowClient, run_id: str) -> list[Record]:
    """The records of a run and its children."""
    with failing(f"MLflow run {run_id} cannot be read"):
        experiment = client.get_run(run_id).info.experiment_id
        children = _search(client, experiment, f"tags.`mlflow.parentRunId` = '{run_id}'")
    return [record for found in (run_id, *children) for record in _artifacts(client, found)]


def _of_experiment(client: MlflowClient, name: str) -> list[Record] | None:
    """None where there is no such experiment."""
    with failing(f"MLflow experiment {name!r} cannot be read"):
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            return None
        runs = _search(client, experiment.experiment_id, "")
    return [record for found in runs for record in _artifacts(client, found)]


def _search(client: MlflowClient, experiment: str, wanted: str) -> list[str]:
    """Runs by id, the oldest first."""
    search = partial(client.search_runs, [experiment], wanted, order_by=["attributes.start_time ASC"])
    return [run.info.run_id for run in pages(search)]


def _artifacts(client: MlflowClient, run_id: str) -> list[Record]:
    """The records among a run's artifacts."""
    with tempfile.TemporaryDirectory(prefix="zerokit-compare-") as folder:
        with failing(f"the artifacts of MLflow run {run_id} cannot be read"):
            names = [one.path for one in client.list_artifacts(run_id) if one.path.endswith(".json")]
            files = [Path(client.download_artifacts(run_id, name, folder)) for name in names]
        return [read_record(file) for file in files if is_record(file)]
