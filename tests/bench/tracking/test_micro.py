"""Files of pytest-benchmark in a real MLflow store, pushed by the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.cli.commands import zerokit
from zerokit.bench.tracking.push import Mirror, find_records, push
from zerokit.bench.tracking.store import Store, Tracking, TrackingError

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

# MLflow and what it imports warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")

PROGRAM = """
import pytest

@pytest.mark.benchmark(group="sums | all")
@pytest.mark.parametrize("how", ["sum", "loop's"])
def test_sum(benchmark, how):
    benchmark.pedantic(sum, ([1, 2],), rounds=3)

def test_alone(benchmark):
    benchmark.pedantic(len, ([],), rounds=2)
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the plug-in writes, of three benchmarks."""
    folder = tmp_path_factory.mktemp("benchmarks")
    (folder / "test_sums.py").write_text(PROGRAM)
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command: list[str | Path] = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", folder]
    command += ["-p", "no:cacheprovider", "--benchmark-json", folder / "found.json", folder]
    subprocess.run(command, check=True, env=own, cwd=folder)
    return folder / "found.json"


def runs_of(client: MlflowClient, tracking: Tracking) -> tuple[Run, dict[str, Run]]:
    """The file's run, and those of its benchmarks by name."""
    experiment = client.get_experiment_by_name(tracking.experiment)
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    (parent,) = (run for run in found if "mlflow.parentRunId" not in run.data.tags)
    children = [run for run in found if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {run.info.status for run in found} == {"FINISHED"}
    by_name = {run.data.params["name"]: run for run in children}
    assert len(by_name) == len(children)
    return parent, by_name


def test_a_file_is_a_run_and_each_benchmark_one_below_it(
    written: Path, tracking: Tracking, client: MlflowClient, place: Path
) -> None:
    words = ["--tracking-uri", tracking.uri, "--experiment", tracking.experiment]
    for told in ("pushed", "already there"):
        done = zerokit(place, "push", str(written), *words)
        assert (done.returncode, done.stderr) == (0, f"{told:<14}{written}\n")
        assert done.stdout.startswith(f"1 {told}: experiment {tracking.experiment} at {tracking.uri}\n")
    plain = json.loads(written.read_text())
    parent, children = runs_of(client, tracking)
    assert children.keys() == {"test_sum[sum]", "test_sum[loop's]", "test_alone"}
    for one in plain["benchmarks"]:
        data = children[one["name"]].data
        assert data.metrics == {
            **{f"{name}_s": one["stats"][name] for name in ("median", "mean", "stddev", "min", "max")},
            "rounds": one["stats"]["rounds"],
            "iterations": 1,
        }
        assert data.params["group"] == (one["group"] or "")
        assert data.params["fullname"] == one["fullname"]
        assert data.params["commit"].startswith(plain["commit_info"]["id"])
        assert data.params["machine"] == plain["machine_info"]["node"]
        assert data.params["processor"] == plain["machine_info"]["cpu"]["brand_raw"]
        assert data.params["cores"] == str(plain["machine_info"]["cpu"]["count"])
    assert children["test_sum[sum]"].data.metrics["rounds"] == 3
    assert [artifact.path for artifact in client.list_artifacts(parent.info.run_id)] == ["benchmark.json"]
    rows = parent.data.tags["mlflow.note.content"].splitlines()
    assert len(rows) == 2 + 3
    assert sum("| sums &#124; all | test_sum[" in row for row in rows) == 2


@pytest.mark.parametrize("calls", [0, 1, 2, 4, 7, 9])
def test_a_push_that_was_cut_off_is_completed(
    written: Path, tracking: Tracking, client: MlflowClient, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """After so many calls that write."""
    asked = 0

    def wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            nonlocal asked
            asked += 1
            if asked > calls:
                raise TrackingError("gone")
            return method(*arguments, **more)

        return call

    with monkeypatch.context() as patch:
        for name in ("create", "write"):
            patch.setattr(Store, name, wrapped(getattr(Store, name)))
        with pytest.raises(TrackingError):
            push(find_records([written]), Mirror(tracking))
    (done,) = push(find_records([written, written.parent]), Mirror(tracking))
    assert done.outcome == ("completed" if calls else "new")
    _, children = runs_of(client, tracking)
    assert len(children) == 3
    assert all(run.data.metrics.keys() >= {"median_s", "rounds"} for run in children.values())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda plain: plain["benchmarks"][0]["stats"].pop("median"), "benchmarks[0].stats.median: missing"),
        (
            lambda plain: plain["benchmarks"][1].update(name=3),
            "benchmarks[1].name: expected a valid string, found 3",
        ),
        (lambda plain: plain.update(benchmarks={}), "benchmarks: expected a list, found dict"),
        (
            lambda plain: plain["benchmarks"][0]["stats"].update(mean=float("nan")),
            "benchmarks[0].stats.mean: ",
        ),
        (lambda plain: plain["benchmarks"][0].update(group="\ud800"), "surrogates not allowed"),
        (lambda plain: plain.pop("benchmarks"), "not a bench record"),
    ],
)
def test_a_damaged_file_is_refused_by_name(
    written: Path, tmp_path: Path, change: Callable[[Any], object], told: str
) -> None:
    change(plain := json.loads(written.read_text()))
    (tmp_path / "found.json").write_text(json.dumps(plain))
    (done,) = find_records([tmp_path / "found.json"]).damaged
    assert done.outcome == "failed"
    assert told in str(done.reason)
