"""Sweeps as a user runs them: real processes, interrupted, killed and continued."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.cli.commands import TINY, children_of, processes_of, start, training, wait_for
from tests.cli.inside import Strike, zerokit_inside
from zerokit.bench.record.record import Record, read_record
from zerokit.bench.run.sweep import SweepFolder
from zerokit.cli import cli

# MLflow and what it imports warn of their own deprecations.
pytestmark = pytest.mark.filterwarnings("ignore")

# About two seconds of steps, time enough to strike, with one thread: two spin beside each other on a busy machine.
LONG = (*TINY, "--steps", "2000", "--data", "synthetic")


def statuses(folder: Path) -> list[str]:
    return [read_record(path).status for path in sorted((folder / "sweep" / "cells").iterdir())]


def test_a_sweep_survives_an_interruption_and_a_killed_rank(tmp_path: Path) -> None:
    """Ctrl-C in the first cell, SIGKILL to its rank the next time, and then to the end."""
    options = ["--engine", "zerokit,ddp", "--stage", "2", "--repeats", "1", "--output", "sweep", *LONG]
    with start(tmp_path, ["bench", "--no-mlflow", *options], OMP_NUM_THREADS="1") as process:
        wait_for(lambda: training(tmp_path), process)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=800)
    assert process.returncode == 128 + signal.SIGINT
    assert stdout == ""
    assert stderr.splitlines() == [
        "zerokit: to continue from here: zerokit bench --continue sweep --no-mlflow",
        "zerokit: interrupted by SIGINT",
    ]
    assert processes_of(tmp_path) == {}
    assert list((tmp_path / "tmp").glob("zerokit-*")) == []
    assert statuses(tmp_path) == ["killed"]

    kill = Strike(
        lambda: training(tmp_path), lambda starter: os.kill(children_of(starter)[0], signal.SIGKILL)
    )
    done = zerokit_inside(
        tmp_path, "bench", "--continue", "sweep", "--no-mlflow", meanwhile=kill, OMP_NUM_THREADS="1"
    )
    assert done.returncode == 1
    assert re.search(
        r"\[1/2\] zerokit stage 2  failed: rank 0 \(node 0, pid \d+\) was killed by SIGKILL", done.stderr
    )
    assert "[2/2] ddp stage 2  unsupported: ddp has no stage 2: it has stage 0 only" in done.stderr
    assert "to run the failed cells again: zerokit bench --continue sweep --no-mlflow" in done.stderr
    assert "zerokit 2: failed: rank 0" in done.stdout
    assert statuses(tmp_path) == ["failed", "unsupported"]

    words = ("bench", "--continue", "sweep", "--json", "--no-mlflow")
    done = zerokit_inside(tmp_path, *words, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    records = [Record.from_json(json.dumps(record)) for record in content["records"]]
    assert [record.status for record in records] == ["ok", "unsupported"]
    assert content["sweep"] == json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert SweepFolder(tmp_path / "sweep").read().options["engine"] == ["zerokit", "ddp"]
    assert re.search(
        r"\[1/2\] zerokit stage 2  [\d.,]+ ms  [\d.,]+ tokens/s  [\d.,]+ MiB$", done.stderr, re.MULTILINE
    )
    assert done.stderr.count("(from before)") == 1
    assert "report  sweep/report.html" in done.stderr
    assert (tmp_path / "sweep" / "report.html").read_text().startswith("<!")

    other = zerokit_inside(tmp_path, "bench", *options, "--steps", "5")
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
    alone = zerokit_inside(tmp_path, "bench", *large, "--no-mlflow", "--output", "large.json")
    assert alone.returncode == 4
    assert alone.stderr.startswith("zerokit: gpt3-175b is too large: ")
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stage", "1,4"], "4 is not in the range 0<=x<=3"),
        (["--stage", "1,,2"], "'1,,2' has an empty value between its commas"),
        (["--engine", "zerokit,dpp"], "'dpp' is not one of 'zerokit', 'ddp'"),
        (["--model", "gpt-5m,gtp-34m"], "model 'gtp-34m' is unknown: did you mean gpt-34m"),
        (["--stage", "1,2", "--save", "run"], "checkpoints belong to one bench"),
        (["--stage", "1,2", "--output", "x.json"], "a sweep needs a folder: --output x.json names a file"),
        (["--continue", "x", "--stage", "1"], "--stage cannot be combined with --continue"),
        (["--continue", "x", "--no-twin"], "--twin cannot be combined with --continue"),
    ],
)
def test_wrong_use_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(cli, ["bench", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "has no sweep: there is no sweep.json in it"), ("[", "cannot read the sweep sweep/sweep.json")],
)
def test_there_must_be_a_sweep_to_continue(tmp_path: Path, content: str | None, message: str) -> None:
    (tmp_path / "sweep").mkdir()
    if content is not None:
        (tmp_path / "sweep" / "sweep.json").write_text(content)
    done = zerokit_inside(tmp_path, "bench", "--continue", "sweep")
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


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
