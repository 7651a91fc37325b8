"""`zerokit bench` end to end: real ranks, a real MLflow store."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import pytest
import torch

import zerokit
from tests.bench.trace.reading import require_form, require_traffic, spans_of
from tests.cli.commands import TINY, processes_of, rank_pid, start, training, wait_for, zerokit_forked
from tests.cli.inside import Strike, zerokit_inside
from zerokit.bench.catalogue.workloads import describe
from zerokit.bench.record.record import Record, read_record

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

# MLflow and what it imports warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")


@dataclass(frozen=True)
class Finished:
    """A bench of two nodes that ended well."""

    folder: Path
    process: subprocess.CompletedProcess[str]
    uri: str

    @property
    def record_path(self) -> Path:
        (path,) = (self.folder / "zerokit-bench").iterdir()
        return path

    @property
    def record(self) -> Record:
        return read_record(self.record_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, mlflow_uri: str) -> Finished:
    folder = tmp_path_factory.mktemp("finished")
    options = ("--stage", "2", "--nodes", "2", "--accumulate", "2", *TINY, "--twin", "--tracking-uri")
    process = zerokit_inside(folder, "bench", *options, mlflow_uri, OMP_NUM_THREADS="1")
    assert process.returncode == 0, process.stderr
    return Finished(folder, process, mlflow_uri)


@pytest.fixture(scope="module")
def client(finished: Finished) -> MlflowClient:
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=finished.uri)


def only_run(client: MlflowClient, experiment: str) -> Run:
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    (run,) = client.search_runs([found.experiment_id])
    return run


def test_the_record_holds_every_ranks_every_step(finished: Finished) -> None:
    record = finished.record
    assert (record.settings.stage, record.settings.nodes, record.settings.accumulate) == (2, 2, 2)
    assert (record.settings.precision, record.settings.device) == ("fp32", "cpu")
    assert record.model is not None
    assert record.results is not None
    assert record.model.parameters == describe("gpt-tiny").parameters
    assert [(rank.rank, rank.node) for rank in record.ranks] == [(0, 0), (1, 1)]
    assert all(len(rank.step_ms) == 4 and len(rank.warmup_ms) == 2 for rank in record.ranks)
    assert all(rank.peak_host_bytes > 50 * 2**20 for rank in record.ranks)
    assert len(record.loss) == len(record.gradient_norm) == 6
    assert record.results.step.count == 4
    assert record.results.throughput > 0
    assert record.results.loss_first is not None
    assert record.results.loss_last is not None
    assert record.results.loss_last < record.results.loss_first - 0.05
    assert all(rank.memory_bytes == rank.predicted_memory_bytes for rank in record.ranks)
    assert record.traffic is not None
    assert record.traffic.elements == record.traffic.predicted_elements == 2 * record.model.parameters
    assert record.traffic.bytes == record.traffic.predicted_bytes == 8 * record.model.parameters
    assert record.environment is not None
    assert (record.environment.zerokit, record.environment.torch) == (zerokit.__version__, torch.__version__)
    assert (record.environment.backend, record.environment.world, record.environment.threads) == (
        "gloo",
        2,
        1,
    )
    # And nothing is left behind.
    assert processes_of(finished.folder) == {}
    assert list((finished.folder / "tmp").glob("zerokit-*")) == []


def test_communication_is_the_step_less_its_twin_s_beside_it(finished: Finished) -> None:
    record = finished.record
    assert record.twin is not None
    assert record.results is not None
    count = record.twin.step.count
    assert record.twin.stage == 1
    assert 6 <= count <= 160  # pairs, until their mean is exact enough
    assert len(record.twin.own_ms) == len(record.twin.pace_ms) == count
    assert all(pace < step for pace, step in zip(record.twin.pace_ms, record.twin.step_ms, strict=True))
    assert record.results.communication_ms == pytest.approx(median(record.twin.costs_ms))


def test_the_table_tells_what_was_asked_for(finished: Finished) -> None:
    shown = finished.process.stdout
    for wanted in ("gpt-tiny", "2 ranks on 2 nodes", "loss", "step p50", "tokens/s", "moved a step"):
        assert wanted in shown
    assert finished.record.traffic is not None
    assert "(N−1)·2Ψ elements, through sockets" in shown  # nodes on one machine are nodes
    assert finished.record.traffic.route == "sockets"
    assert f"record  {finished.record_path.relative_to(finished.folder)}" in shown
    assert f"serve   mlflow ui --backend-store-uri {finished.uri}" in shown
    assert "open    http://127.0.0.1:5000/#/experiments/" in shown
    # Only progress, where the machine was slow.
    assert re.sub(r"^\w[\w-]*: step .*\n", "", finished.process.stderr, flags=re.MULTILINE) == ""


def test_mlflow_holds_the_record(finished: Finished, client: MlflowClient) -> None:
    run, record = only_run(client, "zerokit-bench"), finished.record
    assert record.results is not None
    assert run.info.status == "FINISHED"
    assert f"MLflow  run {run.info.run_id}" in finished.process.stdout
    assert run.data.metrics["step/p50_ms"] == pytest.approx(record.results.step.p50)
    assert run.data.metrics["memory/peak_host_mib"] == pytest.approx(record.results.peak_host_bytes / 2**20)
    assert run.data.params["stage"] == "2"
    curve = client.get_metric_history(run.info.run_id, "loss")
    assert [point.value for point in curve] == pytest.approx(record.loss)
    names = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert names == {"record.json"}
    assert read_record(Path(client.download_artifacts(run.info.run_id, "record.json"))) == record
    assert run.data.tags["zerokit.record_id"] == record.id


def test_muon_is_named_with_its_share_of_the_step_and_its_figures_are_the_formulas(
    tmp_path: Path, mlflow_uri: str
) -> None:
    from mlflow.tracking import MlflowClient

    options = ("--stage", "3", "--optimizer", "muon", "--nproc-per-node", "2", "--experiment", "muon", *TINY)
    process = zerokit_inside(tmp_path, "bench", *options, "--tracking-uri", mlflow_uri, OMP_NUM_THREADS="1")
    assert process.returncode == 0, process.stderr
    record = Finished(tmp_path, process, mlflow_uri).record
    assert (record.settings.optimizer, record.settings.stage) == ("muon", 3)
    assert all(rank.memory_bytes == rank.predicted_memory_bytes for rank in record.ranks)
    traffic, model, phases = record.traffic, record.model, record.phases
    assert traffic is not None
    assert model is not None
    assert phases is not None
    assert traffic.elements == traffic.predicted_elements
    # A layer has four matrices, of 12·width² elements; at most half of them move to owners, and back.
    width, layers = model.config["width"], model.config["layers"]
    to_owners, back = (traffic.by_operation[name]["elements"] for name in ("to_owners", "from_owners"))
    assert 0 < to_owners == back <= 12 * width**2 * layers / 2
    assert phases.optimizer_share is not None
    assert 0.0 < phases.optimizer_share < 1.0
    for wanted in ("fp32, muon, 2 ranks", "optimizer's share", "Muon's matrices to their owners and back"):
        assert wanted in process.stdout
    run = only_run(MlflowClient(tracking_uri=mlflow_uri), "muon")
    assert run.data.params["optimizer"] == "muon"
    assert run.data.metrics["phase/optimizer_share"] == pytest.approx(phases.optimizer_share)


@pytest.mark.full
def test_states_on_a_disk_have_the_same_losses_and_their_bytes_are_the_formulas(
    tmp_path: Path, mlflow_uri: str
) -> None:
    from mlflow.tracking import MlflowClient

    (tmp_path / "nvme").mkdir()
    options = ("--stage", "3", "--nproc-per-node", "2", "--experiment", "homes", *TINY)
    words = ("--states", "device,./nvme", "--repeats", "1", "--output", "sweep", "--tracking-uri", mlflow_uri)
    process = zerokit_inside(tmp_path, "bench", *options, *words, OMP_NUM_THREADS="1")
    assert process.returncode == 0, process.stderr
    assert "Losses of cells with equal training are bitwise identical." in process.stdout
    assert "states elsewhere" in process.stdout
    found = {one.settings.states: one for one in map(read_record, (tmp_path / "sweep/cells").glob("*.json"))}
    assert set(found) == {"device", "./nvme"}
    for there, here in zip(found["./nvme"].ranks, found["device"].ranks, strict=True):
        assert there.memory_bytes == there.predicted_memory_bytes
        assert there.memory_bytes is not None
        assert here.memory_bytes is not None
        assert there.memory_bytes["disk"] >= here.memory_bytes["optimizer"] > 0
        assert there.memory_bytes["optimizer"] == 0 < there.memory_bytes["visiting"]
        assert there.memory_bytes["total"] == here.memory_bytes["total"] - there.memory_bytes["disk"]
    planned = found["./nvme"].planned
    assert planned is not None
    assert planned.peak_bytes["optimizer"] < found["device"].planned.peak_bytes["optimizer"]  # type: ignore[union-attr]
    assert list((tmp_path / "nvme").iterdir()) == []
    client = MlflowClient(tracking_uri=mlflow_uri)
    experiment = client.get_experiment_by_name("homes")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id], "params.states = './nvme'")
    assert runs[0].data.metrics["memory/elsewhere_mib"] > 0


def test_a_tracking_server_that_is_down_loses_nothing_and_json_is_alone_on_stdout(tmp_path: Path) -> None:
    """Stage 3 on one rank and other options on the way."""
    process = zerokit_inside(
        tmp_path,
        *("bench", "--json", "--output", "mine.json"),
        *("--stage", "3", "--precision", "bf16", "--wire", "bf16", "--clip", "0", "--data", "synthetic"),
        *TINY,
        *("--tracking-uri", "http://me:s3cret@127.0.0.1:1"),
        OMP_NUM_THREADS="1",
        ZEROKIT_BENCH_SEED="7",
    )
    assert process.returncode == 0, process.stderr
    record = Record.from_json(process.stdout)
    assert record == read_record(tmp_path / "mine.json")
    assert (record.settings.stage, record.settings.precision, record.settings.seed) == (3, "bf16", 7)
    assert record.settings.wire == "bf16"
    assert record.gradient_norm == []
    assert record.bandwidth == []  # one rank has no wire
    assert json.loads(process.stdout)["settings"]["clip"] is None
    assert "MLflow at http://***@127.0.0.1:1 cannot be used: ConnectionRefusedError" in process.stderr
    assert "s3cret" not in process.stdout + process.stderr
    assert not any(b"s3cret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert "MLflow  not complete; later: zerokit push mine.json" in process.stderr
    assert "record  mine.json" in process.stderr


def test_a_killed_rank_ends_the_command_and_is_named(tmp_path: Path) -> None:
    with start(tmp_path, ["bench", "--nodes", "2", *TINY, "--steps", "1000000", "--no-mlflow"]) as process:
        wait_for(lambda: training(tmp_path), process)
        victim = rank_pid(tmp_path, 1)
        os.kill(victim, signal.SIGKILL)
        stdout, stderr = process.communicate(timeout=800)
    assert process.returncode == 1
    assert stdout == ""
    assert f"zerokit: rank 1 (node 1, pid {victim}) was killed by SIGKILL" in stderr
    assert processes_of(tmp_path) == {}
    (path,) = (tmp_path / "zerokit-bench").iterdir()
    assert read_record(path).status == "failed"
    (logs,) = re.findall(r"logs: (.*)", stderr)
    assert (Path(logs) / "rank-1" / "stderr.log").exists()


def test_an_interrupt_ends_everything_and_the_run_is_killed(
    finished: Finished, client: MlflowClient, tmp_path: Path
) -> None:
    interrupt = Strike(lambda: training(tmp_path), lambda rank: os.kill(os.getpid(), signal.SIGINT))
    options = (*TINY, "--steps", "1000000", "--tracking-uri", finished.uri, "--experiment", "interrupted")
    done = zerokit_inside(tmp_path, "bench", "--nproc-per-node", "2", *options, meanwhile=interrupt)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == "zerokit: interrupted by SIGINT\n"
    assert list((tmp_path / "tmp").glob("zerokit-*")) == []
    assert only_run(client, "interrupted").info.status == "KILLED"


def test_a_bench_resumes_with_the_same_bits_and_at_another_world_size_and_stage(tmp_path: Path) -> None:
    def run(name: str, steps: str, *options: str) -> Record:
        output = ("--output", f"{name}.json", "--no-mlflow")
        words = ("bench", *TINY, "--warmup", "0", "--steps", steps, *output, *options)
        done = zerokit_forked(tmp_path, *words, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        said.append(done.stderr)
        return read_record(tmp_path / f"{name}.json")

    said: list[str] = []
    save = ("--save", "run")
    whole = run("whole", "4")
    half = run("half", "2", *save, "--save-every", "1", "--resume")
    assert said[-1].count("\n") == 1
    assert said[-1].startswith("zerokit: --resume: run has no checkpoint yet: the bench started at step 0")
    (tmp_path / "run" / "latest").write_text("damaged")
    rest = run("rest", "2", *save, "--resume", "--save-every", "1", "--background")
    assert half.loss + rest.loss == whole.loss
    assert [entry.step for entry in half.checkpoints.saves] == [1, 2]
    assert rest.checkpoints.resumed_from == 2
    assert [entry.step for entry in rest.checkpoints.saves] == [3, 4]
    assert [f"zerokit: {note}" for note in rest.checkpoints.notes] == said[-1].splitlines()
    assert said[-1].startswith("zerokit: run/latest: damaged: expected ")
    assert "step-00000002 is taken as the newest of run" in said[-1]
    # A run that was cut for other ranks is a run like any other.
    cut = zerokit_forked(tmp_path, "reshard", "run", "--to", "3", "-o", "cut")
    assert cut.returncode == 0, cut.stderr
    two = run("two", "1", "--stage", "3", "--nproc-per-node", "2", "--save", "cut", "--resume")
    assert two.checkpoints.resumed_from == 4
    assert (tmp_path / "cut" / "latest").read_text().startswith("step-00000005 ")
    anew = zerokit_forked(tmp_path, "bench", "--no-mlflow", *TINY, *save, "--steps", "100000")
    assert anew.returncode == 1
    assert "run already has step 4, and this bench starts after step 0" in anew.stderr
    refused = zerokit_forked(tmp_path, "bench", "--no-mlflow", *TINY, *save, "--resume", "--seed", "5")
    assert refused.returncode == 1
    assert "trained with --seed 0, not 5" in refused.stderr
    assert zerokit_inside(tmp_path, "bench", "--resume", *TINY).returncode == 2


def test_a_timeline_of_each_of_zerokits_cells(tmp_path: Path, mlflow_uri: str) -> None:
    """Beside the sweep's records and page, and in MLflow; the measured steps are as many as without."""
    from mlflow.tracking import MlflowClient

    options = ("--engine", "zerokit,ddp", "--stage", "0", "--repeats", "1", "--nproc-per-node", "2", *TINY)
    places = ("--output", "sweep", "--timeline", "sweep/step.json.gz", "--experiment", "timelines")
    done = zerokit_inside(
        tmp_path, "bench", *options, *places, "--tracking-uri", mlflow_uri, OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "sweep").glob("step*")
    records = [read_record(path) for path in sorted((tmp_path / "sweep" / "cells").iterdir())]
    (record,) = (one for one in records if one.trace is not None)
    assert record.trace is not None
    assert record.trace.file == str(file)
    assert f"trace   {file}  open in https://ui.perfetto.dev" in done.stdout
    assert record.settings.engine == "zerokit"
    assert all(len(rank.step_ms) == 4 for rank in record.ranks)
    content = json.loads(gzip.decompress(file.read_bytes()))
    assert content["otherData"]["record"] == record.id
    require_form(content, 2)
    require_traffic(content, 2)
    assert len(spans_of(content)) == record.trace.spans
    assert record.traffic is not None
    traffic = content["otherData"]["traffic"]
    assert traffic == record.traffic.by_operation
    assert f'href="{file.name}"' in (tmp_path / "sweep" / "report.html").read_text()
    client = MlflowClient(tracking_uri=mlflow_uri)
    experiment = client.get_experiment_by_name("timelines")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id], f"tags.`zerokit.record_id` = '{record.id}'")
    assert "timeline.json.gz" in [one.path for one in client.list_artifacts(run.info.run_id)]
