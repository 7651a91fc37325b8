"""What goes to MLflow, read back through its own client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.bench.records import make_record
from zerokit.bench.record import Record, read_record, write_record
from zerokit.bench.settings import Settings
from zerokit.bench.tracking import (
    DEFAULT_URI,
    Tracker,
    TrackingError,
    curves,
    resolve_uri,
    run_params,
    summary_metrics,
)

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# MLflow and what it imports warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")

SETTINGS = Settings(model="gpt-tiny", seq_len=16)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("mlflow"))  # MLflow puts artifacts in the working directory
        yield "sqlite:///mlflow.db"


@pytest.fixture(scope="module")
def client(store: str) -> MlflowClient:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=store)


def test_a_filled_run_holds_the_record(store: str, client: MlflowClient, tmp_path: Path) -> None:
    record = make_record(loss=[5.5, None, 4.0, 3.5])
    path = tmp_path / "the-record.json"
    write_record(record, path)
    tracker = Tracker.open(store, "tests", SETTINGS, {"mlflow.source.name": "a test"})
    assert client.get_run(tracker.run_id).info.status == "RUNNING"
    tracker.fill(record, path)

    run = client.get_run(tracker.run_id)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "gpt-tiny stage 2 world 1"
    assert run.data.metrics["step/p50_ms"] == 200.0
    assert run.data.metrics["throughput/tokens_per_s"] == pytest.approx(640.0)
    assert run.data.metrics["memory/peak_host_mib"] == 301.0
    assert run.data.metrics["memory/state_predicted_mib"] == 9.0
    assert run.data.metrics["traffic/mib_per_step"] == 4.0
    assert run.data.params == run_params(record)
    assert run.data.params["nodes"] == "2"
    assert run.data.tags["zerokit.record"] == "zerokit.bench/1"
    assert run.data.tags["mlflow.source.name"] == "a test"
    curve = client.get_metric_history(tracker.run_id, "loss")
    assert [(point.step, point.value) for point in curve] == [(0, 5.5), (2, 4.0), (3, 3.5)]
    downloaded = client.download_artifacts(tracker.run_id, "the-record.json")
    assert read_record(Path(downloaded)) == record


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_a_run_that_did_not_finish_says_so_and_why(store: str, client: MlflowClient, status: str) -> None:
    tracker = Tracker.open(store, "tests", SETTINGS, {})
    tracker.close(status, "rank 1 was killed")  # type: ignore[arg-type]  # the parameters above are statuses
    run = client.get_run(tracker.run_id)
    assert run.info.status == status
    assert run.data.tags["zerokit.reason"] == "rank 1 was killed"


def test_a_store_that_does_not_exist_is_told_in_one_line() -> None:
    with pytest.raises(TrackingError, match=r"MLflow at nonsense://x cannot be used: \w+.*") as caught:
        Tracker.open("nonsense://x", "tests", SETTINGS, {})
    assert "\n" not in str(caught.value)


def test_names_are_few_and_such_as_mlflow_accepts(tmp_path: Path) -> None:
    record: Record = make_record()
    names = [*summary_metrics(record), *curves(record)]
    assert len(names) == len(set(names)) < 60
    assert all(re.fullmatch(r"[A-Za-z0-9_\-./: ]+", name) for name in names)


def test_numbers_that_are_not_finite_are_left_out() -> None:
    record = make_record(loss=[5.5, 5.0, 4.0, None])
    assert "loss_last" not in summary_metrics(record)
    assert "memory/peak_allocated_mib" not in summary_metrics(record)


def test_the_flag_goes_before_the_variable_before_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert resolve_uri(None) == DEFAULT_URI
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    assert resolve_uri(None) == "http://server"
    assert resolve_uri("sqlite:///mine.db") == "sqlite:///mine.db"
