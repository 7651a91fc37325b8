"""One MLflow run for one bench: opened before the ranks start, filled from the record after they have ended.

Only the process that launched the ranks talks to MLflow, and never while they run, so that tracking costs the
timed steps nothing. The run exists from the start, so that a bench that dies is seen as FAILED or KILLED.
Everything in it is computed from the record: losing MLflow loses no measurement.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zerokit.bench.record import Record
from zerokit.bench.settings import Settings
from zerokit.errors import ZerokitError

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

DEFAULT_URI = "sqlite:///mlflow.db"
DEFAULT_EXPERIMENT = "zerokit-bench"
MIB = 2.0**20
Status = Literal["FINISHED", "FAILED", "KILLED"]

# A server that is down must be noticed in seconds: MLflow's own defaults retry for minutes.
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    # Usage reports to MLflow's makers are the user's choice, and no part of a measurement.
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# A server refuses a batch with more metrics than this.
_METRICS_A_CALL = 1000


class TrackingError(ZerokitError):
    """MLflow could not be reached or refused something; the bench itself is not affected."""


def resolve_uri(asked: str | None) -> str:
    """The store: what was asked for, else MLFLOW_TRACKING_URI, else SQLite in the working directory."""
    return asked or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


class Tracker:
    """An open MLflow run. Use `open`; every method raises `TrackingError` and nothing else.

    Args:
        client: of the store that holds the run.
        run_id: MLflow's.
        uri: of that store.
    """

    def __init__(self, client: MlflowClient, run_id: str, uri: str) -> None:
        self._client = client
        self.run_id = run_id
        self.uri = uri

    @classmethod
    def open(cls, uri: str, experiment: str, settings: Settings, tags: dict[str, str]) -> Tracker:
        """Create a run that says RUNNING, and its experiment if there is none."""
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
        try:
            client = MlflowClient(tracking_uri=uri)
            known = client.get_experiment_by_name(experiment)
            experiment_id = known.experiment_id if known else client.create_experiment(experiment)
            name = f"{settings.model} stage {settings.stage} world {settings.world}"
            run = client.create_run(experiment_id, run_name=name, tags=tags)
        except Exception as error:
            raise TrackingError(f"MLflow at {uri} cannot be used: {_first_line(error)}") from error
        return cls(client, run.info.run_id, uri)

    def fill(self, record: Record, path: Path) -> None:
        """Write parameters, metrics, tags and the record file, and mark the run FINISHED."""
        from mlflow.entities import Metric, Param, RunTag

        moment = int(datetime.fromisoformat(record.created).timestamp() * 1000)
        metrics = [Metric(name, value, moment, 0) for name, value in summary_metrics(record).items()]
        for name, values in curves(record).items():
            metrics += [
                Metric(name, value, moment, step)
                for step, value in enumerate(values)
                if value is not None and math.isfinite(value)
            ]
        params = [Param(name, value) for name, value in run_params(record).items()]
        tags = [RunTag(name, value) for name, value in run_tags(record).items()]
        try:
            self._client.log_batch(self.run_id, params=params, tags=tags)
            for start in range(0, len(metrics), _METRICS_A_CALL):
                self._client.log_batch(self.run_id, metrics=metrics[start : start + _METRICS_A_CALL])
            self._client.log_artifact(self.run_id, str(path))
        except Exception as error:
            raise TrackingError(f"MLflow at {self.uri} was not filled: {_first_line(error)}") from error
        self.close("FINISHED")

    def close(self, status: Status, reason: str = "") -> None:
        """End the run with this status; `reason` becomes the tag "zerokit.reason"."""
        try:
            if reason:
                self._client.set_tag(self.run_id, "zerokit.reason", reason[:5000])
            self._client.set_terminated(self.run_id, status)
        except Exception as error:
            raise TrackingError(
                f"MLflow at {self.uri}: run {self.run_id} stays open: {_first_line(error)}"
            ) from error


def summary_metrics(record: Record) -> dict[str, float]:
    """One number a name, all finite; names hold no parentheses, which MLflow rejects."""
    results, traffic = record.results, record.traffic
    if results is None or record.model is None:
        return {}
    unit = record.model.unit
    found: dict[str, float | None] = {
        "step/mean_ms": results.step.mean,
        "step/p10_ms": results.step.p10,
        "step/p50_ms": results.step.p50,
        "step/p90_ms": results.step.p90,
        "step/p99_ms": results.step.p99,
        "step/skew_p50_ms": results.skew.p50,
        f"throughput/{unit}_per_s": results.throughput,
        f"throughput/{unit}_per_s_per_rank": results.throughput_per_rank,
        "memory/peak_host_mib": results.peak_host_bytes / MIB,
        "memory/peak_allocated_mib": _mib(results.peak_allocated_bytes),
        "memory/state_mib": _mib(most_state(record, predicted=False)),
        "memory/state_predicted_mib": _mib(most_state(record, predicted=True)),
        "loss_first": results.loss_first,
        "loss_last": results.loss_last,
        "skipped_steps": record.skipped_steps,
    }
    if traffic is not None:
        found |= {
            "traffic/mib_per_step": traffic.bytes / MIB,
            "traffic/predicted_mib_per_step": traffic.predicted_bytes / MIB,
            "traffic/elements_per_step": traffic.elements,
        }
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


def most_state(record: Record, *, predicted: bool) -> int | None:
    """The bytes of model state of the rank that holds most; None for engines that do not count them."""
    lines = [rank.predicted_memory_bytes if predicted else rank.memory_bytes for rank in record.ranks]
    return max((line["total"] for line in lines if line is not None), default=None)


def curves(record: Record) -> dict[str, Sequence[float | None]]:
    """One number a step; step 0 is the first warm-up step."""
    by_step = zip(*(rank.warmup_ms + rank.step_ms for rank in record.ranks), strict=True)
    return {
        "loss": record.loss,
        "gradient_norm": record.gradient_norm,
        "step_ms": [max(times) for times in by_step],
    }


def run_params(record: Record) -> dict[str, str]:
    """The settings as they were resolved, and what was trained."""
    found = {name: str(value) for name, value in asdict(record.settings).items() if value is not None}
    if record.model is not None:
        found["parameters"] = str(record.model.parameters)
    if record.environment is not None:
        found |= {"world": str(record.environment.world), "backend": record.environment.backend}
    return found


def run_tags(record: Record) -> dict[str, str]:
    """Where it ran, and the record's format."""
    tags = {"zerokit.record": record.format, "zerokit.status": record.status}
    if (environment := record.environment) is not None:
        tags |= {
            "zerokit.version": environment.zerokit,
            "torch.version": environment.torch,
            "processor": environment.processor,
        }
    if record.ranks:
        tags["device"] = record.ranks[0].device
    if record.data is not None:
        tags["data.digest"] = record.data.digest
    return tags


def _mib(size_bytes: int | None) -> float | None:
    return None if size_bytes is None else size_bytes / MIB


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else 'no message'}"[:300]
