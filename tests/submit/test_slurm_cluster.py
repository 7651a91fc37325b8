"""Jobs under a real Slurm of two nodes: their cores and their time limit. `test_cluster_page` runs whole benches."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.clusters import LONG, ROOT, ZEROKIT, finish, start
from tests.launch.ranks import wait_for
from tests.support.slurm import Cluster, cluster
from zerokit.submit.slurm import Request, log_of, render_script

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster() as made:
        made.environment["PYTHONPATH"] = str(ROOT)
        yield made


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_ranks_share_all_cores_of_their_node(slurm: Cluster, tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    program = "import os; print(len(os.sched_getaffinity(0)), flush=True)"
    for ranks in {1, cores}:
        script = tmp_path / f"{ranks}.sbatch"
        script.write_text(
            render_script(Request(nodes=2, ranks=ranks, time="5"), [sys.executable, "-c", program])
        )
        done = slurm.run("sbatch", "--wait", "--parsable", str(script))
        assert done.returncode == 0, done.stderr + slurm.logs()
        assert log_of(done.stdout.strip()).read_text().split() == [str(cores // ranks)] * 2 * ranks


def test_a_job_at_its_time_limit_says_so_and_leaves_its_record(slurm: Cluster, tmp_path: Path) -> None:
    """Slurm warns the ranks a minute before, and up to another minute earlier."""
    words = [*ZEROKIT, *LONG, "--launcher", "slurm", "--nodes", "2", "--time", "2"]
    _, err = start(words, slurm.environment).communicate(timeout=800)
    assert "at its time limit (--time)" in err
    (path,) = tmp_path.glob("bench-runs/slurm-*/record.json")
    record = json.loads(path.read_text())
    assert (record["status"], record["reason"]) == ("killed", "interrupted by SIGTERM")
    wait_for(lambda: not slurm.run("squeue", "--noheader").stdout, 60)


TRAIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(total)
print(os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"], total.item(), flush=True)
dist.destroy_process_group()
"""


def test_a_program_of_ones_own_trains_on_both_nodes(slurm: Cluster, tmp_path: Path) -> None:
    """As a job of torchruns, in an allocation, and as srun's own tasks."""
    (tmp_path / "train.py").write_text(TRAIN)
    launch, program = [*ZEROKIT, "launch"], ["--", "train.py"]
    job = [
        *launch,
        "--launcher",
        "slurm",
        "--nodes",
        "2",
        "--nproc-per-node",
        "2",
        "--env",
        "OMP_NUM_THREADS=1",
    ]
    here = [*job, "--master-addr", "127.0.0.1", *program]
    for words, ranks in (
        (here, 2),
        (["salloc", "--nodes=2", *here], 2),
        (["srun", "--nodes=2", "--ntasks-per-node=1", *launch, *program], 1),
    ):
        printed = finish(start(words, slurm.environment))
        found = sorted(re.findall(r"(\d) (\d) (\d+)$", printed, re.MULTILINE))
        total = str(sum(range(2 * ranks + 1)))
        assert found == [(node, str(rank), total) for node in "01" for rank in range(ranks)], printed
