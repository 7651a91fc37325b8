"""What goes to MLflow and comes back: computed from a record, written to a real store, found by its names."""

from __future__ import annotations

import contextlib
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from tests.bench.records import make_cell, make_record, make_sweep
from zerokit.bench.record.journal import Part
from zerokit.bench.record.measured import Samples
from zerokit.bench.record.record import Record, RecordError, write_record
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.status import Status
from zerokit.bench.tracking.content import (
    MOST_KEYS,
    Point,
    curves,
    run_name,
    run_params,
    run_points,
    run_tags,
)
from zerokit.bench.tracking.store import (
    DEFAULT_URI,
    Store,
    Tracking,
    TrackingError,
    connect,
    load_run,
    resolve_uri,
)
from zerokit.errors import UsageError

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

# MLflow and what it imports warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def store(uri: str) -> Store:
    return Store(Tracking(uri, "tests"))


def test_writing_twice_is_writing_once(store: Store, client: MlflowClient) -> None:
    run_id = store.create("a run", {"a": "b"})
    points = [Point("loss", 5.5, 1000, 0), Point("loss", 4.0, 1000, 1), Point("step/p50_ms", 2.0, 1000, 0)]
    files: dict[str, str | bytes] = {"a.txt": "text", "folder/b.bin": b"\0"}
    for _ in range(2):
        store.write(run_id, params={"stage": "2"}, tags={"c": "d"}, points=points, files=files)
    run = client.get_run(run_id)
    assert (run.info.run_name, run.info.status) == ("a run", "RUNNING")
    assert (run.data.params, run.data.metrics) == ({"stage": "2"}, {"loss": 4.0, "step/p50_ms": 2.0})
    assert {"a": "b", "c": "d"}.items() <= run.data.tags.items()
    history = client.get_metric_history(run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(0, 5.5), (1, 4.0)]
    assert Path(client.download_artifacts(run_id, "folder/b.bin")).read_bytes() == b"\0"
    store.write(run_id, points=[Point("long", float(step), 1000, step) for step in range(2500)])
    assert len(client.get_metric_history(run_id, "long")) == 2500  # more than a call takes
    store.client.set_terminated(run_id, "KILLED", 5000)
    assert (client.get_run(run_id).info.status, client.get_run(run_id).info.end_time) == ("KILLED", 5000)


def test_runs_are_found_by_all_of_their_tags(store: Store, client: MlflowClient) -> None:
    first = store.create("first", {"zerokit.x": "1", "zerokit.y": "1"})
    store.create("second", {"zerokit.x": "1", "zerokit.y": "2"})
    for tags in ({"zerokit.x": "1", "zerokit.y": "1"}, {"zerokit.x": "1"}):
        run = store.find(tags)
        assert run is not None
        assert run.info.run_id == first
    assert store.find({"zerokit.x": "2"}) is None
    client.delete_run(first)
    assert store.find({"zerokit.x": "1", "zerokit.y": "1"}) is None
    client.delete_experiment(client.create_experiment("gone"))
    with pytest.raises(TrackingError, match="experiment 'gone' is deleted: restore it"):
        Store(Tracking(store.tracking.uri, "gone"))


def test_a_database_that_cannot_be_opened_is_noticed_in_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    # The module's own `time`: other threads of this process go on sleeping.
    its_own = SimpleNamespace(**{**vars(time), "sleep": waited.append})
    monkeypatch.setattr("mlflow.store.db.utils.time", its_own)
    with pytest.raises(TrackingError, match="unable to open database file"):
        Store(Tracking("sqlite:////proc/mlflow.db", "x"))
    assert sum(waited) < 5


def test_a_database_that_may_not_be_written_is_named_as_such(store: Store, place: Path) -> None:
    reader = Store(Tracking(f"sqlite:///file:{place}/mlflow.db?mode=ro&uri=true", "tests"))
    with pytest.raises(TrackingError, match="Error: attempt to write a readonly database"):
        reader.create("a run", {})


OF_AN_ARRAY = """
import os, sys
from zerokit.bench.tracking.store import Store, Tracking
import mlflow.tracking
jobs = []
for _ in range(4):
    jobs.append(os.fork())
    if jobs[-1] == 0:
        Store(Tracking("sqlite:///" + sys.argv[1], "x")).create("a run", {})
        os._exit(0)
sys.exit(any([os.waitpid(job, 0)[1] for job in jobs]))
"""


def test_jobs_that_begin_together_on_a_fresh_store_lose_no_run(tmp_path: Path) -> None:
    """As those of a Slurm array: the first one creates the tables, and the others wait."""
    file = tmp_path / "mlflow.db"
    command = [sys.executable, "-c", OF_AN_ARRAY, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    with contextlib.closing(sqlite3.connect(file)) as database:
        assert database.execute("select count(*) from runs").fetchone() == (4,)


def test_a_store_whose_making_was_killed_is_made_anew(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from alembic.ddl.impl import DefaultImpl
from zerokit.bench.tracking.store import Store, Tracking
create = DefaultImpl.create_table
def kill(*given, **more):
    create(*given, **more)
    os.kill(os.getpid(), signal.SIGKILL)
DefaultImpl.create_table = kill
Store(Tracking(sys.argv[1], "tests"))
"""
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    killed = subprocess.run([sys.executable, "-c", program, uri], check=False, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert Store(Tracking(uri, "tests")).create("a run", {})
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_what_is_not_finite_is_left_out_and_names_are_such_as_mlflow_accepts() -> None:
    record = make_record(loss=[5.5, None, 4.0, None])
    assert "loss_last" not in {point.name for point in run_points(record)}
    assert [point.step for point in run_points(record) if point.name == "loss"] == [0, 2]
    for nodes in (1, 2, 16):
        names = {point.name for point in run_points(make_cell(device="cuda", nodes=nodes))}
        assert len(names) <= MOST_KEYS
        assert all(re.fullmatch(r"[A-Za-z0-9_\-./: ]+", name) for name in names)


def test_system_metrics_have_moments_and_leave_out_whole_nodes() -> None:
    """The samples end when the measured steps do, which is when the record was created."""
    series: dict[str, list[float | None]] = {"cpu": [1.0, None, 3.0], "gpu": [None, None, None]}
    samples = Samples(0, "here", 1.0, [0.0, 1.0, 2.0], series, 0.1)
    alone = [
        point for point in run_points(replace(make_record(), system=[samples])) if "system" in point.name
    ]
    ended = 1893553445000
    assert alone == [Point("system/cpu", 1.0, ended - 2000, 0), Point("system/cpu", 3.0, ended, 2)]
    many = [replace(samples, node=node, series={f"m{n}": [1.0] * 3 for n in range(20)}) for node in range(3)]
    names = {
        point.name for point in run_points(replace(make_record(), system=many)) if "system" in point.name
    }
    assert names == {f"system/node0/m{n}" for n in range(20)}


def test_params_and_tags_tell_what_was_asked_and_where_it_ran() -> None:
    record = make_cell(nodes=2)
    params = run_params(record)
    assert [params[name] for name in ("engine", "stage", "world", "backend")] == ["zerokit", "2", "2", "gloo"]
    assert "repeat" not in params
    assert record.environment is not None
    tags = run_tags(replace(record, environment=replace(record.environment, git_commit="abc-dirty")))
    known = [tags[f"zerokit.{name}"] for name in ("record_id", "sweep_id", "cell", "status", "environment")]
    assert known == [record.id, record.sweep, record.cell, "ok", record.environment.digest]
    assert (tags["zerokit.git_commit"], tags["mlflow.source.git.commit"]) == ("abc-dirty", "abc")


def test_an_elastic_job_has_one_run_whose_curves_begin_with_its_first_step() -> None:
    parts = [Part(4, 2, 1, 3, 0, 16, "rank 1 was killed"), Part(2, 2, 3, 6, 32, 8, "finished")]
    record = make_record()
    job = replace(
        record,
        parts=parts,
        loss=[9.0, 8.0, *record.loss],
        settings=replace(record.settings, elastic=True, save="run"),
    )
    assert (job.restarts, job.untimed_steps) == (1, 2)
    assert curves(job)["loss"] == [9.0, 8.0, *record.loss]
    assert curves(job)["step_ms"] == [None, None, *curves(record)["step_ms"]]
    assert run_tags(job)["zerokit.restarts"] == "1"
    assert run_tags(job)["zerokit.reason"] == ""  # a former end is none
    # MLflow keeps a parameter as it was first: a job that may go on at another world size has none yet.
    assert run_params(job)["world"] == "2"
    assert run_params(replace(job, status=Status.FAILED)) == {}


def test_a_runs_name_begins_with_what_is_compared() -> None:
    assert run_name(Settings(nodes=2)) == "zerokit 2, gpt-5m, batch 4, world 2"
    assert run_name(Settings(wire="bf16")) == "zerokit 2, gpt-5m, batch 4, bf16 wire, world 1"
    assert run_name(Settings(), ["seq_len"]) == "zerokit 2, 128 positions, gpt-5m, batch 4, world 1"
    long = Settings(engine="fsdp2", stage=3, precision="bf16", accumulate=2, bucket_mb=0.5, repeat=1)
    assert run_name(long) == "FSDP2 3 #2, gpt-5m, batch 4, bf16, 2 micro-batches, bucket 0.5 MiB, world 1"


def test_the_flag_goes_before_the_variable_before_sqlite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert resolve_uri(None) == DEFAULT_URI
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    assert resolve_uri(None) == "http://server"
    assert resolve_uri("sqlite:///mine.db") == "sqlite:///mine.db"


def ids(records: Sequence[Record]) -> list[str]:
    return [record.id for record in records]


def test_a_folder_s_records_without_a_sweep_s_plan_and_hidden_files(tmp_path: Path) -> None:
    records = make_sweep()
    for place, record in enumerate([*records, records[0]]):  # one is in two places
        write_record(record, tmp_path / "cells" / f"{place:03}.json")
    write_record(make_cell(seed=1), tmp_path / ".old" / "000.json")
    (tmp_path / "sweep.json").write_text('{"format": "zerokit.sweep/1"}')
    (tmp_path / "other.json").write_text("[1, 2]")
    assert ids(load_run(str(tmp_path)).records) == ids(records)
    assert load_run(str(tmp_path / "cells" / "001.json")).records == (records[1],)
    for content in (b"\xff", b'{"format": "zerokit.bench/9"}'):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(RecordError, match=r"bad\.json"):
            load_run(str(tmp_path))


def test_places_without_records_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(RecordError, match="has no bench record"):
        load_run(str(tmp_path))
    for name, told in (
        ("missing.json", "no such file"),
        ("0" * 32, r"no mlflow\.db"),
        ("", r"no mlflow\.db"),
    ):
        with pytest.raises(UsageError, match=told):
            load_run(name)
    assert list(tmp_path.iterdir()) == []


# MLflow's own dependencies warn of each other.
@pytest.mark.filterwarnings("ignore")
def test_runs_children_and_experiments_of_mlflow(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    client = connect(uri)
    experiment = client.create_experiment("bench", artifact_location=(tmp_path / "artifacts").as_uri())
    parent = client.create_run(experiment).info.run_id
    records = make_sweep()[:2]
    children = []
    for place, record in enumerate(records):
        path = tmp_path / f"record-{place}.json"
        write_record(record, path)
        run_id = client.create_run(experiment, tags={"mlflow.parentRunId": parent}).info.run_id
        client.log_artifact(run_id, str(path))
        client.log_text(run_id, "[]", "configuration.json")
        children.append(run_id)
    assert load_run(children[1], uri).records == (records[1],)
    assert set(ids(load_run(parent, uri).records)) == set(ids(records))
    assert set(ids(load_run("bench", uri).records)) == set(ids(records))
    with pytest.raises(UsageError, match="not a run id or experiment"):
        load_run("benches", uri)
    with pytest.raises(TrackingError, match="cannot be used"):
        load_run("0" * 32, uri)
    empty = client.create_run(experiment).info.run_id
    with pytest.raises(RecordError, match="has no bench record"):
        load_run(empty, uri)
