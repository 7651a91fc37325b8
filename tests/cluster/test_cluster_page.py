"""The commands of the page on clusters, as they are printed there, on clusters made on this machine.

Only what stands for something of the reader's is replaced: IMAGE, R, the number of GPUs and the tracker's address.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from tests.cluster.clusters import ROOT, finish, logged_runs, start
from tests.submit.manifests import require_known
from tests.support.forked import run_forked
from tests.support.namespaces import Hosts, wired_hosts
from tests.support.slurm import Cluster, cluster
from zerokit.bench.record.record import read_record

_CHAPTER = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8")
_ALL = re.findall(r"^```sh\n(.*?)^```$", _CHAPTER, re.MULTILINE | re.DOTALL)
_BLOCKS = [block for block in _ALL if "train.py" not in block]
NODES = ("node-0", "node-1")
GPUS = 8
SMALL = {
    "ZEROKIT_BENCH_MODEL": "gpt-tiny",
    "ZEROKIT_BENCH_SEQ_LEN": "16",
    "ZEROKIT_BENCH_STEPS": "4",
    "ZEROKIT_BENCH_WARMUP": "1",
    "ZEROKIT_BENCH_TWIN": "false",
    "ZEROKIT_BENCH_DEVICE": "cpu",
    "OMP_NUM_THREADS": "1",
}
UNTRACKED = os.environ | {"ZEROKIT_BENCH_NO_MLFLOW": "1"}
INSTALLED = {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def commands(beginning: str) -> list[str]:
    """Those of the block whose first line begins so, each behind the variables that the block exports."""
    (block,) = (block for block in _BLOCKS if block.startswith(beginning))
    lines = [line for line in block.splitlines() if line and not line.startswith("#")]
    exports = [line for line in lines if line.startswith("export ")]
    return ["\n".join([*exports, line]) for line in lines if line not in exports]


SSH = commands("# Machines with ssh.")
SLURM = commands("# Slurm.")
KUBERNETES = commands("# Kubernetes,")
JOINING = commands("# torchrun, mpirun:")


(_OWN,) = (block for block in _ALL if "train.py" in block)
OWN = [line.partition("  #")[0].strip() for line in _OWN.splitlines() if "zerokit launch " in line]
"""Those that start a program of one's own."""


def test_no_other_commands_are_printed() -> None:
    assert (len(_ALL), len(_BLOCKS)) == (5, 4)
    assert len(OWN) == 6  # tests/test_docs.py calls torchrun


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with wired_hosts(NODES) as made:
        yield made


@pytest.fixture(scope="module")
def slurm() -> Iterator[Cluster]:
    with cluster(GPUS) as made:
        yield made


def begin(command: str, variables: Mapping[str, str], inside: Sequence[str] = ()) -> subprocess.Popen[str]:
    assert re.search("zerokit (doctor|bench|launch) ", command), (
        "this test does not know what is to come of it"
    )
    return start([*inside, "bash", "-euo", "pipefail", "-c", command], {**variables, **SMALL, **INSTALLED})


@cache
def loss_here(ranks_a_node: int) -> Sequence[float]:
    """The losses of two nodes simulated on this machine."""
    with TemporaryDirectory() as folder:
        words = ["bench", "--stage", "2", "--nodes", "2", "--nproc-per-node", str(ranks_a_node), "--json"]
        done = run_forked(Path(folder), words, {**UNTRACKED, **SMALL})
    assert done.returncode == 0, done.stderr
    losses: Sequence[float] = json.loads(done.stdout)["loss"]
    return losses


def judge(command: str, printed: str, folder: Path, *, tracked: bool = True) -> None:
    """Whether the command has done what it says."""
    if "zerokit doctor " in command:
        assert "2 nodes × 1 rank" in printed
        return
    each = GPUS if re.search(f"-per-node {GPUS} | -n {2 * GPUS} ", command) else 1
    (path,) = (*folder.glob("zerokit-bench/*.json"), *folder.glob("bench-runs/slurm-*/record.json"))
    record = read_record(path)
    assert (record.status, record.settings.stage) == ("ok", 2)
    assert [rank.node for rank in record.ranks] == [0] * each + [1] * each
    assert record.loss == loss_here(each)
    if tracked:
        assert [run.info.status for run in logged_runs(folder)] == ["FINISHED"]


@pytest.mark.sshd
@pytest.mark.parametrize("command", SSH)
def test_machines_with_ssh(hosts: Hosts, tmp_path: Path, command: str) -> None:
    command = command.replace("http://tracker:5000", f"sqlite:///{tmp_path}/mlflow.db")
    judge(command, finish(begin(command, os.environ, hosts.inside("node-0"))), tmp_path)


@pytest.mark.slurm
@pytest.mark.parametrize("command", SLURM)
def test_slurm(slurm: Cluster, tmp_path: Path, command: str) -> None:
    judge(command, finish(begin(command, slurm.environment)), tmp_path)


@pytest.mark.parametrize("command", KUBERNETES)
def test_kubernetes(tmp_path: Path, command: str) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\n[ "$*" = "create -f -" ] && exec cat\n')
    kubectl.chmod(0o755)
    command = command.replace("IMAGE", "registry.example/zerokit:1")
    printed = finish(begin(f"PATH=$PWD:$PATH; {command}", os.environ))
    objects = list(yaml.safe_load_all(printed))
    assert [made["kind"] for made in objects] == ["TrainingRuntime", "TrainJob"]
    for made in objects:
        require_known(made)
    trainer = objects[-1]["spec"]["trainer"]
    assert (trainer["image"], trainer["numNodes"], trainer["numProcPerNode"]) == (
        "registry.example/zerokit:1",
        2,
        GPUS,
    )


@pytest.mark.sshd
@pytest.mark.parametrize("command", [one for one in JOINING if not one.startswith("mpirun ")])
def test_torchrun(hosts: Hosts, tmp_path: Path, command: str) -> None:
    assert command.startswith("torchrun "), "this test does not know how to run it"
    command = command.replace(f" --nproc-per-node {GPUS} ", " --nproc-per-node 1 ")
    both = [
        begin(command.replace(" R ", f" {number} "), UNTRACKED, hosts.inside(node))
        for number, node in enumerate(NODES)
    ]
    judge(command, "".join([finish(one) for one in both]), tmp_path, tracked=False)


@pytest.mark.sshd
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
@pytest.mark.parametrize("command", [one for one in JOINING if one.startswith("mpirun ")])
def test_mpirun(hosts: Hosts, tmp_path: Path, command: str) -> None:
    (tmp_path / "hosts").write_text("".join(f"{node} slots=1\n" for node in NODES))
    command = command.replace(f" -n {2 * GPUS} ", " -n 2 ")
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    printed = finish(begin(command, UNTRACKED | allowed, hosts.inside("node-0")))
    judge(command, printed, tmp_path, tracked=False)


def judge_own(command: str, ranks: int, folder: Path, variables: Mapping[str, str], *inside: str) -> None:
    """Whether the command has started so many ranks of a program."""
    (folder / "train.py").write_text(
        "import os; print('rank {RANK} of {WORLD_SIZE};\\n'.format(**os.environ), end='')"  # at once
    )
    printed = finish(begin(command, variables, inside))
    printed += "".join(path.read_text() for path in folder.glob("zerokit-*.log"))
    assert set(re.findall(r"rank (\d+) of (\d+);", printed)) == {
        (str(rank), str(ranks)) for rank in range(ranks)
    }


def test_a_program_of_ones_own_runs_here(tmp_path: Path) -> None:
    judge_own(OWN[0], GPUS, tmp_path, os.environ)


@pytest.mark.sshd
def test_a_program_of_ones_own_runs_over_ssh(hosts: Hosts, tmp_path: Path) -> None:
    assert "--launcher ssh" in OWN[1]
    judge_own(OWN[1], 2 * GPUS, tmp_path, os.environ, *hosts.inside("node-0"))


@pytest.mark.slurm
@pytest.mark.parametrize("command", OWN[2:4])
def test_a_program_of_ones_own_runs_in_slurm(slurm: Cluster, tmp_path: Path, command: str) -> None:
    """The names of this cluster's nodes do not resolve."""
    judge_own(command, 2 * GPUS, tmp_path, slurm.environment | {"MASTER_ADDR": "127.0.0.1"})


@pytest.mark.sshd
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_a_program_of_ones_own_runs_by_mpirun(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("".join(f"{node} slots={GPUS}\n" for node in NODES))
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    judge_own(OWN[4], 2 * GPUS, tmp_path, os.environ | allowed, *hosts.inside("node-0"))
