"""`zerokit bench` under a real Slurm of two nodes: sbatch, srun inside the job, and as srun's own ranks."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.slurm import Cluster, cluster, refusal

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parents[2]
ZEROKIT = [sys.executable, "-m", "zerokit.cli"]
BENCH = [
    "bench",
    "--model",
    "gpt-tiny",
    "--seq-len",
    "16",
    "--warmup",
    "1",
    "--no-mlflow",
    "--no-twin",
    "--json",
]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    why = refusal()
    if why is not None:
        pytest.skip(why)
    with cluster() as made:
        made.environment["PYTHONPATH"] = str(ROOT)
        yield made


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def start(slurm: Cluster, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, env=slurm.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    record: dict[str, Any] = json.loads(out)
    return record


def test_a_job_and_srun_give_the_losses_of_two_nodes_here(slurm: Cluster, tmp_path: Path) -> None:
    short = [*BENCH, "--steps", "4"]
    submitted = finish(start(slurm, *ZEROKIT, *short, "--launcher", "slurm", "--nodes", "2", "--time", "5"))
    stepped = finish(start(slurm, "srun", "-N2", "--ntasks-per-node=1", *ZEROKIT, *short))
    here = finish(start(slurm, *ZEROKIT, *short, "--nodes", "2"))
    assert submitted["loss"] == stepped["loss"] == here["loss"]
    assert [rank["node"] for rank in submitted["ranks"]] == [0, 1]
    assert [rank["node"] for rank in stepped["ranks"]] == [0, 1]
    written = [path for path in tmp_path.rglob("*.json") if path.name != "arguments.json"]
    assert len(written) == 3
    assert slurm.run("squeue", "--noheader").stdout == ""


def _running_job(slurm: Cluster) -> str:
    deadline = time.monotonic() + 60
    while True:
        listed = slurm.run("squeue", "--noheader", "--states=RUNNING", "--format=%i").stdout.split()
        if listed and _ranks():
            return listed[0]
        assert time.monotonic() < deadline, slurm.logs()
        time.sleep(0.2)


def _ranks() -> list[str]:
    done = subprocess.run(
        ["pgrep", "-f", "zerokit.launch.rank zerokit.bench.worker"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.split()


def _require_no_job(slurm: Cluster) -> None:
    deadline = time.monotonic() + 60
    while slurm.run("squeue", "--noheader").stdout:
        assert time.monotonic() < deadline, slurm.logs()
        time.sleep(0.2)


def test_a_cancelled_job_is_said_and_leaves_nothing(slurm: Cluster) -> None:
    words = [*ZEROKIT, *BENCH, "--steps", "100000", "--launcher", "slurm", "--nodes", "2", "--time", "5"]
    process = start(slurm, *words)
    slurm.run("scancel", _running_job(slurm))
    _, err = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "job" in err
    _require_no_job(slurm)


def test_an_interrupted_submission_cancels_its_job(slurm: Cluster) -> None:
    words = [*ZEROKIT, *BENCH, "--steps", "100000", "--launcher", "slurm", "--nodes", "2", "--time", "5"]
    process = start(slurm, *words)
    _running_job(slurm)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT
    _require_no_job(slurm)


def test_a_partition_that_does_not_exist_is_told_at_once(slurm: Cluster) -> None:
    process = start(slurm, *ZEROKIT, *BENCH, "--launcher", "slurm", "--nodes", "2", "--partition", "none")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "invalid partition" in err.lower()
