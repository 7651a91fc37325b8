"""`zerokit launch`: a program of the user's on all ranks, as `zerokit bench` starts its own."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner

from tests.cli.commands import processes_of, start, torchrun, wait_for, zerokit
from tests.launch.ranks import wait_for as wait_until
from zerokit.cli import cli
from zerokit.network import free_port

PROGRAM = """
import atexit, json, os, signal, sys, time
import beside

names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
names += ("GROUP_WORLD_SIZE", "ROLE_RANK", "TORCHELASTIC_RUN_ID")
seen = {name: os.environ.get(name) for name in names}
rank = int(os.environ["RANK"])
print(json.dumps(seen | {"rank": rank, "words": sys.argv[1:], "name": __name__}))
if sys.argv[1:] == ["wait"]:
    try:
        time.sleep(1000)
    finally:
        print("saved", rank, file=sys.stderr)
if rank == 1 and sys.argv[1:] == ["raise"]:
    atexit.register(print, "{}", file=open("left", "w"))
    raise ValueError("no luck")
if rank == 1 and sys.argv[1:] == ["exit"]:
    print("a last word", file=sys.stderr)
    sys.exit(7)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the program, and a module beside it, in a folder below."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "train.py").write_text(PROGRAM)
    (tmp_path / "own" / "beside.py").touch()
    return tmp_path


def told(printed: str) -> list[dict[str, Any]]:
    """What each rank has found, by rank."""
    found = [json.loads(line[line.index("{") :]) for line in printed.splitlines()]
    return sorted(found, key=lambda one: int(one["rank"]))


def test_ranks_of_two_nodes_find_torchruns_environment_and_what_is_beside_them(folder: Path) -> None:
    """Simulated nodes have devices of their own, as LOCAL_RANK counts them."""
    words = ("--nodes", "2", "--nproc-per-node", "2", "--log-dir", "logs", "own/train.py", "--nodes", "7")
    done = zerokit(folder, "launch", *words, CUDA_VISIBLE_DEVICES="a,b,c,d", OMP_NUM_THREADS="")
    assert (done.returncode, done.stderr) == (0, "")
    ranks = told(done.stdout)
    assert sorted(line[:8] for line in done.stdout.splitlines()) == [f"rank {rank}: " for rank in range(4)]
    assert [(one["GROUP_RANK"], one["LOCAL_RANK"]) for one in ranks] == [
        ("0", "0"),
        ("0", "1"),
        ("1", "0"),
        ("1", "1"),
    ]
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"], one["name"]) for one in ranks} == {
        ("4", "2", "__main__")
    }
    roles = {(one["GROUP_WORLD_SIZE"], one["ROLE_RANK"], one["TORCHELASTIC_RUN_ID"]) for one in ranks}
    assert roles == {("2", str(rank), "zerokit") for rank in range(4)}
    assert [one["CUDA_VISIBLE_DEVICES"] for one in ranks] == ["a,b", "a,b", "c,d", "c,d"]
    assert {one["OMP_NUM_THREADS"] for one in ranks} == {str(max(1, len(os.sched_getaffinity(0)) // 4))}
    assert ranks[0]["words"] == ["--nodes", "7"]
    assert json.loads((folder / "logs" / "rank-3" / "stdout.log").read_text()) == ranks[3]
    again = CliRunner().invoke(cli, ["launch", "--log-dir", str(folder / "logs"), __file__])
    assert (again.exit_code, "is not empty" in again.output) == (2, True)


@pytest.mark.parametrize("words", [["-m", "train", "a b"], ["--", "-m", "train", "a b"]])
def test_a_module_is_found_in_the_working_directory(folder: Path, words: list[str]) -> None:
    (folder / "own" / "tmp").mkdir()
    done = zerokit(folder / "own", "launch", *words)
    assert done.returncode == 0, done.stderr
    assert [one["words"] for one in told(done.stdout)] == [["a b"]]
    assert list((folder / "own" / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("what", "said"), [("raise", r"failed: ValueError: no luck"), ("exit", r"failed: exit code 7")]
)
def test_a_failed_rank_is_named_and_its_logs_are_kept(folder: Path, what: str, said: str) -> None:
    done = zerokit(folder, "launch", "--nodes", "2", "--", "own/train.py", what)
    assert done.returncode == 1
    assert re.search(rf"^zerokit: rank 1 \(node 1, pid \d+\) {said}$", done.stderr, re.MULTILINE)
    assert f"  | {'ValueError: no luck' if what == 'raise' else 'a last word'}\n" in done.stderr
    assert "runpy" not in done.stderr
    assert what == "exit" or f'"{folder}/own/train.py", line ' in done.stderr
    assert what == "exit" or (folder / "left").read_text() == "{}\n"
    (logs,) = (folder / "tmp").glob("zerokit-launch-*")
    assert f"logs: {logs}\n" in done.stderr
    assert told((logs / "rank-1" / "stdout.log").read_text())


def test_an_interruption_ends_all_ranks(folder: Path) -> None:
    with start(folder, ["launch", "--nodes", "2", "--", "own/train.py", "wait"]) as process:
        logs = folder / "tmp"
        wait_for(
            lambda: len([one for one in logs.glob("*/rank-*/stdout.log") if one.stat().st_size]) == 2, process
        )
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=800)
    assert process.returncode == 130
    assert errors.endswith("\nzerokit: interrupted by SIGINT\n")
    assert {f"rank {rank}: saved {rank}" for rank in range(2)} < set(errors.splitlines())
    assert errors.count(": KeyboardInterrupt\n") == 2
    wait_until(lambda: processes_of(folder) == {})
    assert list(logs.iterdir()) == []


def test_torchruns_ranks_become_the_program(folder: Path) -> None:
    port = ("--master-port", str(free_port()))
    words = ("--no-python", sys.executable, "-m", "zerokit", "launch", "--", "own/train.py", "a")
    done = torchrun(folder, "--nproc-per-node", "2", *port, *words)
    assert done.returncode == 0, done.stderr
    assert [(one["LOCAL_RANK"], one["OMP_NUM_THREADS"]) for one in told(done.stdout)] == [
        ("0", "1"),
        ("1", "1"),
    ]


MPI = dict(zip(("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"), "3412", strict=True))


def test_a_process_of_mpirun_becomes_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    def execute(program: str, words: list[str], environment: Mapping[str, str]) -> NoReturn:
        started.append((words, dict(environment)))
        raise SystemExit(0)

    monkeypatch.setattr("os.execve", execute)
    variables = {f"OMPI_COMM_WORLD_{name}": number for name, number in MPI.items()}
    runner = CliRunner(env=variables | {"MASTER_ADDR": "node-0", "OMP_NUM_THREADS": "3"})
    done = runner.invoke(cli, ["launch", "--", "train.py", "--rate", "1"])
    assert done.exit_code == 0, done.output
    ((words, found),) = started
    assert words == [sys.executable, "-u", "train.py", "--rate", "1"]
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK ROLE_RANK MASTER_ADDR OMP_NUM_THREADS"
    assert [found[name] for name in names.split()] == ["3", "4", "1", "2", "1", "3", "node-0", "3"]
    refused = runner.invoke(cli, ["launch", "--nodes", "3", "train.py"])
    assert (refused.exit_code, "omit --nodes" in refused.output) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-m"], "Missing argument"),
        (["--", "-m"], "-m needs a module"),
        (["--", "-c", "0"], "-c is an option of Python: name a script, or a module with -m"),
        (["no/such.py"], "the program no/such.py does not exist"),
        (["--log-dir", __file__, __file__], "is no folder to write to: File exists"),
        (["--launcher", "kubernetes", "--", "train.py"], "needs --container-image"),
        (["--launcher", "slurm", "--log-dir", "a", "--", "b.py"], "--log-dir is for ranks started from here"),
        (["--launcher", "slurm", "--follow", "--", "train.py"], "a job's output is in its log"),
    ],
)
def test_wrong_use_is_refused(words: list[str], said: str) -> None:
    done = CliRunner().invoke(cli, ["launch", *words])
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
