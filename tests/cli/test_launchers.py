"""`zerokit bench --launcher`: what does not fit together is refused, and others' ranks write one record."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tests.cli import commands
from tests.cli.commands import (
    CLI,
    FORKS,
    TINY,
    Torchrun,
    environment,
    processes_of,
    torchrun,
    training,
    zerokit_forked,
)
from tests.cluster.clusters import logged_runs
from tests.launch.ranks import wait_for
from tests.support.processes import alive, children_of
from zerokit.bench.record.record import read_record
from zerokit.cli import cli
from zerokit.cli.launchers import choose_launcher, read_variables
from zerokit.errors import UsageError
from zerokit.network import free_port

BENCH = ("bench", *TINY, "--device", "cpu", "--output", "record.json")
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def bench(*arguments: str, **variables: str) -> Result:
    """The command, refused before it does anything."""
    return CliRunner().invoke(cli, ["bench", *arguments], env=variables)


def test_what_concerns_the_submission_stays_outside_of_the_job() -> None:
    """Ranks that srun has started refuse options of other launchers."""
    options = (
        "--launcher slurm --nodes 2 --nproc-per-node 3 --gpus-per-node 4 --mem 1G --partition p --account a --time 5 "
        "--cpus-per-task 2 --sbatch-option=--qos=q --connect-timeout 9 --master-addr n1 --env A=1 --remote-python py "
        "--stage 3 --dry-run"
    )
    done = bench(*options.split())
    assert done.exit_code == 0, done.output
    (line,) = (line for line in done.output.splitlines() if line.startswith("srun "))
    assert line.endswith(' py -P -m zerokit bench --stage 3 --launcher env --output "$folder"/record.json')
    assert "\nexport A=1\nexport MASTER_ADDR=n1\n" in done.output
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=3\n" in done.output
    # The submitter waits for this file, in a folder too.
    output = [bench(*options.split(), "--output", path).output for path in ("mine.json", "folder")]
    assert " --output mine.json" in output[0]
    assert re.search(r" --output folder/[\d-]+\.json\n", output[1])


@pytest.mark.parametrize("options", ["slurm --dry-run", "kubernetes --container-image i"])
def test_the_command_above_a_job_stays_a_comment(options: str) -> None:
    done = bench("--launcher", *options.split(), "--env", "A=1\nexit 3")
    assert done.exit_code == 0, done.output
    assert r"--env 'A=1\nexit 3'" in done.output
    assert "\nexit 3" not in done.output.replace("\nexport A='1\nexit 3'", "")


def test_pods_get_what_was_asked_for_and_a_module_that_the_image_needs_is_named() -> None:
    asked = (
        "--launcher kubernetes --container-image team/train:1 --nproc-per-node 4 --cpus-per-task 8 --mem 64Gi "
        "--shm-size 8Gi --resource rdma/hca=2 --capability IPC_LOCK --queue q --priority-class high"
    )
    done = bench(*asked.split(), "--model", "tests.planning.models:branching")
    assert done.exit_code == 0, done.output
    assert "cpu: '32'" in done.stdout
    for line in (
        "memory: 64Gi",
        "sizeLimit: 8Gi",
        "rdma/hca: '2'",
        "- IPC_LOCK",
        "kueue.x-k8s.io/queue-name: q",
    ):
        assert f" {line}\n" in done.stdout
    named = "the image team/train:1 must have the module tests.planning.models on its Python path"
    assert named in done.stderr
    assert bench(*asked.split()).stderr == ""


def test_a_variable_for_another_launcher_is_left_alone(tmp_path: Path) -> None:
    """Those of a profile reach the ranks of a job, too."""
    unsupported = ("--engine", "ddp", "--stage", "3", "--output", str(tmp_path), "--no-mlflow")
    done = bench(*unsupported, ZEROKIT_BENCH_PARTITION="p")
    assert done.exit_code == 4, done.output
    # Variables are named as options are.
    script = bench(
        "--launcher", "slurm", "--dry-run", ZEROKIT_BENCH_PARTITION="p", ZEROKIT_BENCH_MEM="3G"
    ).output
    assert "#SBATCH --mem=3G\n#SBATCH --partition=p\n" in script


def test_variables_are_given_or_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "now")
    assert read_variables(["A=1=2", "B=", "HERE"]) == {"A": "1=2", "B": "", "HERE": "now"}
    with pytest.raises(UsageError, match="not a valid variable name"):
        read_variables(["a b=1"])


_BENCH = cli.get_command(click.Context(cli), "bench")
assert _BENCH is not None
CONTEXT = _BENCH.make_context("bench", [])
OPTIONS = CONTEXT.params
"""Those of a bench without arguments."""


@pytest.fixture
def _bench() -> Iterator[None]:
    with CONTEXT.scope(cleanup=False):
        yield


@pytest.mark.usefixtures("_bench")
def test_ranks_that_were_started_are_joined_unless_told_otherwise() -> None:
    joined = choose_launcher(OPTIONS, TORCHRUN)
    assert (joined.name, joined.nodes, joined.nproc_per_node, joined.here) == ("env", 1, 2, True)
    assert choose_launcher(OPTIONS | {"launcher": "local"}, TORCHRUN).member is None
    assert choose_launcher(OPTIONS, {}).name == "local"
    # One process by itself, as a shell inside srun is, has nobody to join; unless it is asked for.
    alone = TORCHRUN | {"WORLD_SIZE": "1"}
    assert choose_launcher(OPTIONS, alone).name == "local"
    assert choose_launcher(OPTIONS | {"launcher": "env"}, alone).name == "env"
    # But the last rank that is left of an elastic job, or its first one, is torchrun's.
    elastic = alone | {"TORCHELASTIC_RUN_ID": "none"}
    assert choose_launcher(OPTIONS, elastic, elastic=True).name == "env"
    assert choose_launcher(OPTIONS, elastic).name == "local"


@pytest.mark.usefixtures("_bench")
def test_unequal_slots_are_asked_about_where_the_user_chooses_no_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zerokit.cluster.ssh.require_ssh", lambda: None)
    file = tmp_path / "hosts"
    file.write_text("a slots=2\nb slots=3\n")
    chosen = choose_launcher(OPTIONS | {"launcher": "ssh", "hostfile": file}, {})
    assert (chosen.nodes, chosen.hosts) == (2, ("a", "b"))
    with pytest.raises(UsageError, match="give --nproc-per-node"):
        _ = chosen.nproc_per_node


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=folder,
        env=environment(folder, OMP_NUM_THREADS="1"),  # the bits depend on it
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def by_torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    port = ("--master-port", str(free_port()))
    return torchrun(folder, "--nproc-per-node", "2", *port, *arguments)


def test_torchruns_ranks_leave_one_record_and_one_run(tmp_path: Path) -> None:
    """One record of all ranks, with the losses of ranks started here, and nothing is left."""
    (here := tmp_path / "here").mkdir()
    (there := tmp_path / "there").mkdir()
    alone = zerokit_forked(here, *BENCH, "--nproc-per-node", "2", "--no-mlflow", OMP_NUM_THREADS="1")
    assert alone.returncode == 0, alone.stderr
    done = by_torchrun(there, "-m", "zerokit", *BENCH)
    assert done.returncode == 0, done.stderr
    assert len(list(there.glob("*.json"))) == 1
    record = read_record(there / "record.json")
    assert record.status == "ok"
    assert [(rank.rank, rank.node, len(rank.step_ms)) for rank in record.ranks] == [(0, 0, 4), (1, 0, 4)]
    assert record.loss == read_record(here / "record.json").loss
    assert done.stderr.count("leads") == 1
    assert list((there / "tmp").glob("zerokit-*")) == []
    assert processes_of(there) == {}
    assert [run.info.status for run in logged_runs(there)] == ["FINISHED"]


def test_a_killed_torchrun_leaves_nothing(tmp_path: Path) -> None:
    """That of the second node: the store in which ranks meet lives on with the first. Its workers are no forks, which
    torch would end with it."""
    long = ("-m", "zerokit", "bench", *TINY, "--steps", "1000000", "--device", "cpu", "--no-mlflow")
    words: tuple[str, ...] = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1")
    words += ("--master-port", str(free_port()))
    with (
        Torchrun(tmp_path, (*words, "--node-rank", "0", *long), OMP_NUM_THREADS="1") as first,
        Torchrun(tmp_path, (*words, "--node-rank", "1", *long), OMP_NUM_THREADS="1") as second,
    ):
        commands.wait_for(lambda: training(tmp_path), first)
        (member,) = children_of(second.pid)
        (rank,) = children_of(member)
        second.kill()
        wait_for(lambda: not alive(member) and not alive(rank))
        _, said = first.communicate(timeout=800)
        assert first.returncode == 1
        assert "rank 1" in said
    assert list((tmp_path / "tmp").glob("zerokit-member-*")) == []


def test_torchruns_ranks_refuse_other_numbers_of_ranks(tmp_path: Path) -> None:
    done = by_torchrun(tmp_path, *FORKS, CLI, *BENCH, "--nproc-per-node", "4")
    assert done.returncode == 1  # torchrun's own
    assert "omit --nodes and --nproc-per-node" in " ".join(done.stderr.split())
    assert not (tmp_path / "record.json").exists()


@pytest.mark.full
def test_the_doctor_looks_at_torchruns_ranks(tmp_path: Path) -> None:
    done = by_torchrun(tmp_path, *FORKS, CLI, "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = json.loads(done.stdout)["facts"]["ranks"]
    assert [one["seat"]["rank"] for one in ranks] == [0, 1]
    assert processes_of(tmp_path) == {}


BENCHES = """
import sys, tempfile
from pathlib import Path
from tests.cli.commands import zerokit_forked
if __name__ == "__main__":
    tempfile.tempdir = "/tmp"  # a socket's path is short
    for route in ("1", "0"):
        output = ("--output", f"{route}.json", "--nproc-per-node", "2", "--no-mlflow")
        done = zerokit_forked(Path(), *sys.argv[1:], *output, ZEROKIT_CMA=route, OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
"""


@pytest.mark.netns
def test_a_full_dev_shm_stops_no_rank(tmp_path: Path) -> None:
    """By any route: ranks share memory that has no name there."""
    fill = 'mount -t tmpfs -o size=16k tmpfs /dev/shm && head -c 16384 /dev/zero >/dev/shm/full && exec "$@"'
    (tmp_path / "benches.py").write_text(BENCHES)
    benches = (sys.executable, "benches.py", "bench", *TINY, "--device", "cpu")
    done = run(tmp_path, "unshare", "--mount", "sh", "-c", fill, "sh", *benches)
    assert done.returncode == 0, done.stderr
    for route in ("1", "0"):
        assert read_record(tmp_path / f"{route}.json").status == "ok"
