"""Sweeps as a user runs them: interrupted, killed and continued."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from click.testing import CliRunner

from tests.cli.commands import processes_of, training
from tests.cli.elastic import MODEL, let_go, prepare
from tests.cli.inside import Strike, zerokit_inside
from zerokit.bench.record.record import Record, read_record
from zerokit.bench.run.sweep import SweepFolder
from zerokit.cli import cli

# MLflow and what it imports warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")


def statuses(folder: Path) -> list[str]:
    return [read_record(path).status for path in sorted((folder / "sweep" / "cells").iterdir())]


def test_a_sweep_survives_an_interruption_and_a_killed_rank(tmp_path: Path) -> None:
    """Ctrl-C in the first cell, SIGKILL to its rank the next time, and then to the end."""
    seen = prepare(tmp_path, hold=5)
    options = ("--engine", "zerokit,ddp", "--stage", "2", "--repeats", "1", "--output", "sweep", *MODEL)

    def sweep(*words: str, action: Callable[[int], object] | None = None) -> CompletedProcess[str]:
        strike = Strike(lambda: training(tmp_path), action) if action else lambda rank: None
        return zerokit_inside(tmp_path, "bench", "--no-mlflow", *words, meanwhile=strike, OMP_NUM_THREADS="1")

    done = sweep(*options, "--steps", "7", action=lambda rank: os.kill(os.getpid(), signal.SIGINT))
    assert done.returncode == 128 + signal.SIGINT
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "zerokit: to continue from here: zerokit bench --continue sweep --no-mlflow",
        "zerokit: interrupted by SIGINT",
    ]
    assert processes_of(tmp_path) == {}
    assert list((tmp_path / "tmp").glob("zerokit-*")) == []
    assert statuses(tmp_path) == ["killed"]

    done = sweep("--continue", "sweep", action=lambda rank: os.kill(rank, signal.SIGKILL))
    assert done.returncode == 1
    assert re.search(
        r"\[1/2\] zerokit 2  failed: rank 0 \(node 0, pid \d+\) was killed by SIGKILL", done.stderr
    )
    assert "[2/2] DDP 2  unsupported: ddp has no stage 2: it has stage 0 only" in done.stderr
    assert "to run the failed cells again: zerokit bench --continue sweep --no-mlflow" in done.stderr
    assert "zerokit 2: failed: rank 0" in done.stdout
    assert statuses(tmp_path) == ["failed", "unsupported"]

    let_go(seen)
    done = sweep("--continue", "sweep", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    records = [Record.from_json(json.dumps(record)) for record in content["records"]]
    assert [record.status for record in records] == ["ok", "unsupported"]
    assert content["sweep"] == json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert SweepFolder(tmp_path / "sweep").read().options["engine"] == ["zerokit", "ddp"]
    assert re.search(
        r"\[1/2\] zerokit 2  [\d.,]+ ms  [\d.,]+ samples/s  [\d.,]+ MiB$", done.stderr, re.MULTILINE
    )
    assert done.stderr.count("(from before)") == 1
    assert "report  sweep/report.html" in done.stderr
    assert (tmp_path / "sweep" / "report.html").read_text().startswith("<!")

    other = sweep(*options, "--steps", "5")
    assert other.returncode == 2
    assert "sweep has a sweep of other cells" in other.stderr


def test_nothing_ran_is_an_exit_code_of_its_own(tmp_path: Path) -> None:
    """Too large, and impossible: told in an instant, kept as records."""
    options = ("--engine", "ddp", "--stage", "3", "--no-mlflow", "--output", "one.json")
    single = zerokit_inside(tmp_path, "bench", *options)
    assert single.returncode == 4
    assert single.stderr.startswith("zerokit: ddp has no stage 3: it has stage 0 only\n")
    assert read_record(tmp_path / "one.json").status == "unsupported"
    large = ("--model", "gpt3-175b", "--device", "cpu")
    sweep = zerokit_inside(
        tmp_path, "bench", *large, "--stage", "0,2", "--repeats", "1", "--no-mlflow", "--output", "sweep"
    )
    assert sweep.returncode == 4
    assert statuses(tmp_path) == ["out of memory", "out of memory"]
    assert "gpt3-175b is too large" in sweep.stdout
    cells = [read_record(path) for path in (tmp_path / "sweep" / "cells").iterdir()]
    assert any("4Ψ + 12Ψ/N bytes" in (record.reason or "") for record in cells)
    assert all(record.ranks == [] for record in cells)
    assert list((tmp_path / "tmp").iterdir()) == []


def completions(line: str, kind: str = "bash_complete") -> str:
    """What a shell is offered for the last word of a line."""
    words = {"_ZEROKIT_COMPLETE": kind, "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    return CliRunner(env=words).invoke(cli, prog_name="zerokit").stdout


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("zerokit b", ["bench"]),
        ("zerokit bench --engine zerokit,fs", ["zerokit,fsdp2"]),
        ("zerokit bench --stage 0,1,", ["0,1,2", "0,1,3"]),
        ("zerokit bench --model gpt2-m", ["gpt2-medium"]),
        ("zerokit bench --repea", ["--repeats"]),
    ],
)
def test_a_shell_completes_commands_options_and_values_after_commas(line: str, offered: list[str]) -> None:
    assert [entry.partition(",")[2] for entry in completions(line).splitlines()] == offered


def test_bash_reads_the_completion() -> None:
    script = completions("", "bash_source")
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "complete -o nosort -F" in script
