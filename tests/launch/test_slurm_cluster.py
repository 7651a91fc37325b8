"""`zerokit bench` under a real Slurm of two nodes: sbatch, srun inside the job, and as srun's own ranks."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.clusters import LONG, ROOT, SHORT, ZEROKIT, finish, logged_runs, start
from tests.support.forked import run_forked
from tests.support.slurm import Cluster, cluster
from zerokit.launch.slurm import Request, log_of, render_script

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as made:
        made.environment["PYTHONPATH"] = str(ROOT)
        yield made


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def record_of(slurm: Cluster, *words: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(finish(start(words, slurm.environment)))
    return record


def test_a_job_and_srun_give_the_losses_of_two_nodes_here(slurm: Cluster, tmp_path: Path) -> None:
    # A node of a cluster has its cores to itself, nodes simulated here share them; the bits depend on a rank's threads.
    slurm.environment["OMP_NUM_THREADS"] = "1"
    submitted = record_of(slurm, *ZEROKIT, *SHORT, "--launcher", "slurm", "--nodes", "2", "--time", "5")
    stepped = record_of(slurm, "srun", "-N2", "--ntasks-per-node=1", *ZEROKIT, *SHORT, "--no-mlflow")
    words = [*SHORT, "--nodes", "2", "--no-mlflow", "--output", "here"]
    done = run_forked(tmp_path, words, slurm.environment)
    assert done.returncode == 0, done.stderr
    here = json.loads(done.stdout)
    assert submitted["loss"] == stepped["loss"] == here["loss"]
    assert [rank["node"] for rank in submitted["ranks"]] == [0, 1]
    assert [rank["node"] for rank in stepped["ranks"]] == [0, 1]
    written = [path for path in tmp_path.rglob("*.json") if path.name != "arguments.json"]
    assert len([path for path in written if "mlruns" not in path.parts]) == 3
    assert [run.info.status for run in logged_runs(tmp_path)] == ["FINISHED"]
    assert slurm.run("squeue", "--noheader").stdout == ""


def test_ranks_share_all_cores_of_their_node(slurm: Cluster, tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    program = "import os; print(len(os.sched_getaffinity(0)), flush=True)"
    for ranks in {1, cores}:
        script = tmp_path / f"{ranks}.sbatch"
        script.write_text(render_script(Request(2, ranks, time="5"), [sys.executable, "-c", program]))
        job = submit_and_wait(slurm, script)
        assert log_of(job).read_text().split() == [str(cores // ranks)] * 2 * ranks


def submit_and_wait(slurm: Cluster, script: Path) -> str:
    done = slurm.run("sbatch", "--wait", "--parsable", str(script))
    assert done.returncode == 0, done.stderr + slurm.logs()
    return done.stdout.strip()


def _require_no_job(slurm: Cluster) -> None:
    deadline = time.monotonic() + 60
    while slurm.run("squeue", "--noheader").stdout:
        assert time.monotonic() < deadline, slurm.logs()
        time.sleep(0.2)


def test_a_job_at_its_time_limit_says_so_and_leaves_its_record(slurm: Cluster, tmp_path: Path) -> None:
    """Slurm warns the ranks a minute before, and up to another minute earlier."""
    words = [*ZEROKIT, *LONG, "--launcher", "slurm", "--nodes", "2", "--time", "2"]
    _, err = start(words, slurm.environment).communicate(timeout=800)
    assert "at its time limit (--time)" in err
    (path,) = tmp_path.glob("bench-runs/slurm-*/record.json")
    record = json.loads(path.read_text())
    assert (record["status"], record["reason"]) == ("killed", "interrupted by SIGTERM")
    _require_no_job(slurm)
