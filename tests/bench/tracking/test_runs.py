"""What a user calls a run: files, folders, MLflow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.bench.records import make_cell, make_sweep
from zerokit.bench.record.record import Record, RecordError, write_record
from zerokit.bench.tracking.store import TrackingError, connect, load_run
from zerokit.errors import UsageError


def write_all(folder: Path, records: Sequence[Record]) -> None:
    for place, record in enumerate(records):
        write_record(record, folder / f"{place:03}.json")


def ids(records: Sequence[Record]) -> list[str]:
    return [record.id for record in records]


def test_a_file_and_a_folder(tmp_path: Path) -> None:
    records = make_sweep()
    write_all(tmp_path / "cells", records)
    assert ids(load_run(str(tmp_path)).records) == ids(records)
    assert load_run(str(tmp_path / "cells" / "001.json")).records == (records[1],)


def test_a_sweep_s_plan_and_hidden_files_are_no_cells(tmp_path: Path) -> None:
    write_all(tmp_path / "cells", [make_cell(), make_cell()])  # one record in two places
    write_all(tmp_path / ".old", [make_cell("ddp", 0)])
    (tmp_path / "sweep.json").write_text('{"format": "zerokit.sweep/1"}')
    (tmp_path / "other.json").write_text("[1, 2]")
    assert ids(load_run(str(tmp_path)).records) == [make_cell().id]
    for content in (b"\xff", b'{"format": "zerokit.bench/9"}'):
        (tmp_path / "bad.json").write_bytes(content)
        with pytest.raises(RecordError, match=r"bad\.json"):
            load_run(str(tmp_path))


def test_places_without_records_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(RecordError, match="has no bench record"):
        load_run(str(tmp_path))
    with pytest.raises(UsageError, match="no such file or folder"):
        load_run("missing.json")
    with pytest.raises(UsageError, match=r"there is no mlflow\.db"):
        load_run("0" * 32)
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
