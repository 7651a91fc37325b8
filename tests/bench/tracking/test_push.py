"""Records and sweeps in a real MLflow store, each once, however often and however badly they are brought there."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import pytest

from tests.bench.ranks import Ranks, Stopped, Watcher, host
from zerokit.bench.record.record import Record, write_record
from zerokit.bench.record.settings import Settings
from zerokit.bench.run.sweep import Sweep, SweepFolder, prepare, product, run_sweep
from zerokit.bench.tracking.push import Found, Mirror, Tracker, find_records, push
from zerokit.bench.tracking.store import Store, Tracking, TrackingError
from zerokit.launch.failures import WorkerFailed

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

# MLflow and what it imports warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SweepFolder:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return SweepFolder(tmp_path / "sweep")


def make(folder: SweepFolder, **options: Sequence[object]) -> Sweep:
    fixed = {"model": "gpt-tiny", "seq_len": 16, "data": "synthetic", "twin": False}
    sweep = Sweep.of(product(options, fixed), {name: list(values) for name, values in options.items()})
    return prepare(folder, sweep)


def run(
    sweep: Sweep, folder: SweepFolder, tracking: Tracking | None, ranks: Ranks | None = None
) -> tuple[list[Record], Watcher, Tracker]:
    """As `zerokit bench` does: each cell is pushed, and the whole at the end or after an interruption."""
    watcher, sweeps = Watcher(), {sweep.id: (sweep, folder)}
    tracker = Tracker(tracking, watcher.warn, "zerokit push HERE")

    def track(path: Path, record: Record) -> None:
        tracker.push(Found([(path, record)], sweeps, []), going_on=True)

    with contextlib.suppress(Stopped):
        run_sweep(sweep, folder, host(ranks or Ranks(), watcher), track)
    tracker.push(find_records([folder.path]))
    return folder.records(sweep), watcher, tracker


def pushed(tracking: Tracking, *paths: Path) -> Counter[str]:
    done = push(find_records(paths), Mirror(tracking))
    return Counter(one.outcome for one in done)


def runs(client: MlflowClient, tracking: Tracking) -> tuple[list[Run], list[Run]]:
    """Parents and the others."""
    experiment = client.get_experiment_by_name(tracking.experiment)
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time ASC"])
    parents = [run for run in found if run.data.tags.get("zerokit.kind") == "sweep"]
    return parents, [run for run in found if run not in parents]


def assert_mirrored(client: MlflowClient, tracking: Tracking, records: list[Record]) -> None:
    """One parent, and one whole child for each record."""
    (parent,), children = runs(client, tracking)
    assert Counter(child.data.tags["zerokit.record_id"] for child in children) == Counter(
        record.id for record in records if record.status != "unsupported"
    )
    by_id = {record.id: record for record in records}
    for child in children:
        record = by_id[child.data.tags["zerokit.record_id"]]
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        assert child.data.tags["zerokit.status"] == record.status
        assert child.info.status == {"failed": "FAILED", "killed": "KILLED"}.get(record.status, "FINISHED")
        assert len(client.get_metric_history(child.info.run_id, "loss")) == len(record.loss)
        assert [artifact.path for artifact in client.list_artifacts(child.info.run_id)] == ["record.json"]


def test_ten_cells_pushed_twice_are_ten_runs_and_one_parent(
    folder: SweepFolder, tracking: Tracking, client: MlflowClient
) -> None:
    sweep = make(folder, engine=("zerokit", "ddp"), stage=(0, 1), batch_size=(1, 2, 3))
    records, _, _ = run(sweep, folder, None)
    for cell in sweep.cells[11:]:
        folder.record(cell).unlink()
    folder.record(sweep.cells[10]).write_text("{")  # the others' sweep ends all the same
    del records[10:]
    (folder.path / "cells" / ".hidden.json").write_text("not looked at")
    shutil.copytree(folder.path / "cells", folder.path / "twins")  # nor these
    assert pushed(tracking, folder.path) == {"new": 8, "left out": 2, "failed": 2}
    (before,), _ = runs(client, tracking)
    assert pushed(tracking, folder.path) == {"there": 8, "left out": 2, "failed": 2}
    assert runs(client, tracking)[0][0].to_dictionary() == before.to_dictionary()
    assert_mirrored(client, tracking, records)
    (parent,), _ = runs(client, tracking)
    assert parent.info.run_name == "gpt-tiny sweep of engine zerokit,ddp × stage 0,1 × batch_size 1,2,3"
    assert parent.data.params == {"engine": "zerokit,ddp", "stage": "0,1", "batch_size": "1,2,3"}
    assert parent.data.tags["zerokit.cells.ok"] == "8"
    rows = parent.data.tags["mlflow.note.content"].splitlines()  # shown on the run's page
    assert rows[0].startswith("| cell | step p50, ms | ")
    assert len(rows) == 2 + 8 + 2
    assert any(re.match(r"\| zerokit 1 · batch 2 \| [\d.,]+", row) for row in rows)
    assert rows[-1].startswith("Changes are against zerokit 0 · batch 1. ")
    made = {record.settings.key: record for record in records if record.results is not None}
    figures = {name: value for name, value in parent.data.metrics.items() if name.startswith("step/p50_ms/")}
    assert len(figures) == len(made) == 8
    (one,) = (r for r in made.values() if (r.settings.stage, r.settings.batch_size) == (1, 2))
    assert one.results is not None
    assert figures["step/p50_ms/zerokit 1 - batch 2"] == one.results.step.p50
    (link,) = {done.view for done in push(find_records([folder.path]), Mirror(tracking)) if done.view}
    place, _, query = link.partition("?")
    assert place.endswith(f"/#/experiments/{parent.info.experiment_id}/runs")
    asked = dict(parse_qsl(query))
    assert asked["compareRunsMode"] == "CHART"
    ordered = [f"{asked['orderByKey']} {'ASC' if asked['orderByAsc'] == 'true' else 'DESC'}"]
    found = client.search_runs([parent.info.experiment_id], asked["searchFilter"], order_by=ordered)
    times = [run.data.metrics["step/p50_ms"] for run in found]
    assert times == sorted(times)
    assert len(times) == 8
    assert parent.data.tags["zerokit.cells.unsupported"] == "2"
    assert {artifact.path for artifact in client.list_artifacts(parent.info.run_id)} == {
        "sweep.json",
    }
    assert parent.info.status == "KILLED"  # two cells are missing


def test_what_a_bench_tracked_is_not_pushed_again(
    folder: SweepFolder, tracking: Tracking, client: MlflowClient
) -> None:
    """Nor what was not tracked at first, and then went on."""
    sweep = make(folder, stage=(1, 2))
    run(sweep, folder, None)
    folder.record(sweep.cells[1]).unlink()
    records, watcher, tracker = run(sweep, folder, tracking)
    assert (watcher.warnings, tracker.lost) == ([], False)
    assert_mirrored(client, tracking, records)
    assert pushed(tracking, folder.path) == {"there": 2}
    assert pushed(tracking, *(folder.path / "cells").iterdir()) == {"there": 2}
    assert_mirrored(client, tracking, records)
    (parent,), _ = runs(client, tracking)
    assert parent.info.run_id == tracker.run_id
    write_record(
        replace(records[0], skipped_steps=3), folder.record(sweep.cells[0])
    )  # a twin that ran later, say
    assert pushed(tracking, folder.path) == {"completed": 1, "there": 1}


@pytest.mark.parametrize("calls", [0, 5, 9, 14])
def test_a_server_that_goes_away_during_a_sweep_loses_nothing(
    folder: SweepFolder, tracking: Tracking, client: MlflowClient, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """After so many calls of the store; nobody asks it again, and the next push completes what is there."""
    asked = 0

    def wrapped(method: Any) -> Any:
        def call(store: Any, *arguments: Any, **more: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked > calls:
                raise TrackingError("MLflow at http://x was not filled: ConnectionError: gone")
            return method(store, *arguments, **more)

        return call

    with monkeypatch.context() as patch:
        for name in ("find", "create", "write"):
            patch.setattr(Store, name, wrapped(getattr(Store, name)))
        records, watcher, tracker = run(make(folder, stage=(1, 2)), folder, tracking)
    assert [record.status for record in records] == ["ok", "ok"]
    assert (tracker.lost, asked) == (True, calls + 1)
    (warning,) = watcher.warnings
    assert "records are on disk. When MLflow is reachable: zerokit push HERE" in warning
    assert sum(pushed(tracking, folder.path).values()) == 2
    assert_mirrored(client, tracking, records)
    assert runs(client, tracking)[0][0].info.status == "FINISHED"


def test_a_cell_that_is_run_again_keeps_its_run(
    folder: SweepFolder, tracking: Tracking, client: MlflowClient
) -> None:
    def act(settings: Settings, job: Path) -> None:
        if settings.stage == 1:
            raise WorkerFailed("rank 0 failed: no")
        if settings.stage == 3:
            raise Stopped("enough")

    sweep = make(folder, stage=(0, 1, 2, 3))
    records, _, _ = run(sweep, folder, tracking, Ranks(act))
    assert [record.status for record in records] == ["ok", "failed", "ok", "killed"]
    (parent,), children = runs(client, tracking)
    assert parent.info.status == "KILLED"
    by_id = {child.data.tags["zerokit.record_id"]: child for child in children}
    children = [by_id[record.id] for record in records]
    assert [run.info.status for run in children] == ["FINISHED", "FAILED", "FINISHED", "KILLED"]
    assert children[1].data.tags["zerokit.reason"] == "rank 0 failed: no"
    assert children[3].data.tags["zerokit.reason"] == "enough"
    pushed(tracking, folder.path)  # in between: the killed one is completed

    records, _, _ = run(sweep, folder, tracking)
    assert [record.status for record in records] == ["ok"] * 4
    assert_mirrored(client, tracking, records)
    assert {run.info.run_id for run in runs(client, tracking)[1]} == {run.info.run_id for run in children}
    assert runs(client, tracking)[0][0].info.status == "FINISHED"


def test_a_single_record_of_a_sweep_gets_a_parent(
    folder: SweepFolder, tracking: Tracking, client: MlflowClient, tmp_path: Path
) -> None:
    records, _, _ = run(make(folder, stage=(1, 2)), folder, None)
    alone = tmp_path / "alone.json"
    write_record(records[0], alone)
    assert pushed(tracking, alone) == {"new": 1}
    (parent,), (child,) = runs(client, tracking)
    assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert parent.info.status == "FINISHED"
    assert pushed(tracking, folder.path, alone) == {"there": 1, "new": 1}
    assert_mirrored(client, tracking, records)
