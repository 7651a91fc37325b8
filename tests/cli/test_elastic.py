"""`zerokit bench --elastic`: ranks are killed, others go on; data go on, losses are those of the smaller world."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import processes_of, start, zerokit, zerokit_forked
from tests.cli.elastic import (
    MODEL,
    copy_run,
    kill_node,
    kill_rank,
    let_go,
    prepare,
    require_plain_order,
    trained,
    until,
)
from tests.launch.clusters import logged_runs
from zerokit.bench.record import Record, read_record

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # MLflow's
    pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot tie a process to its parent"),
]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # the bits depend on it
ELASTIC = ("bench", *MODEL, "--elastic", "--save", "run", "--save-every", "3", "--output", "record.json")


def started(folder: Path, *options: str) -> subprocess.Popen[str]:
    return start(folder, [*ELASTIC, *options], **ONE_THREAD)


def ended(process: subprocess.Popen[str], code: int = 0) -> str:
    """Its stderr."""
    stdout, stderr = process.communicate(timeout=250)
    assert process.returncode == code, stdout + stderr
    return stderr


def resumed(folder: Path, step: int, steps: int, *world: str) -> Record:
    """What a plain bench makes of the checkpoint of `step`, which is no elastic one."""
    copy_run(folder / "run", folder / "copy", step)
    output = ("--output", "copy.json", "--no-mlflow", "--save", "copy", "--resume")
    plain = ("bench", *MODEL, "--warmup", "0", "--steps", str(steps), *output)
    done = zerokit_forked(folder, *plain, *world, **ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return read_record(folder / "copy.json")


def test_a_killed_node_leaves_the_others_ranks_with_the_bits_of_a_run_of_their_number(tmp_path: Path) -> None:
    """Killed between two saves: exactly the steps since the first of them are repeated."""
    seen = prepare(tmp_path, hold=5)
    with started(tmp_path, "--nodes", "2", "--nproc-per-node", "2", "--steps", "9") as process:
        until(trained(tmp_path, 0, 5), process)
        let_go(seen)
        kill_node(tmp_path, 1)
        said = ended(process)
    assert "node 1: its torchrun agent" in said
    assert "restart 1 of at most 3: 2 ranks left" in said
    record = read_record(tmp_path / "record.json")
    first, second = record.parts
    assert (first.world, first.nodes, first.first_step, first.last_step) == (4, 2, 1, 5)
    assert "was killed by SIGKILL" in first.ended
    assert (second.world, second.nodes, second.first_step, second.last_step) == (2, 1, 4, 9)
    assert second.ended == "finished"
    assert (first.first_sample, first.samples_per_step, second.first_sample) == (0, 8, 24)
    require_plain_order(tmp_path, record.parts)
    # Figures are of the last part, losses of the whole job.
    assert (record.settings.nodes, record.settings.world, len(record.ranks)) == (1, 2, 2)
    assert len(record.ranks[0].warmup_ms + record.ranks[0].step_ms) == 6
    assert (len(record.loss), len(record.gradient_norm), record.untimed_steps) == (9, 9, 3)
    plain = resumed(tmp_path, 3, 6, "--nproc-per-node", "2")
    assert record.loss[3:] == plain.loss
    assert record.gradient_norm[3:] == plain.gradient_norm
    (run,) = logged_runs(tmp_path)
    assert (run.info.status, run.data.params["world"]) == ("FINISHED", "2")
    assert processes_of(tmp_path) == {}


def test_an_interrupted_job_goes_on_with_more_ranks_and_leaves_one_record_and_one_run(tmp_path: Path) -> None:
    seen = prepare(tmp_path, hold=4)
    with started(tmp_path, "--steps", "8") as process:
        until(trained(tmp_path, 0, 4), process)
        process.send_signal(signal.SIGINT)
        ended(process, 128 + signal.SIGINT)
    assert read_record(tmp_path / "record.json").status == "killed"
    let_go(seen)
    with started(tmp_path, "--steps", "8", "--nodes", "2") as process:
        ended(process)
    record = read_record(tmp_path / "record.json")
    assert [(part.world, part.first_step, part.last_step, part.ended) for part in record.parts] == [
        (1, 1, 4, "interrupted by SIGINT"),
        (2, 4, 8, "finished"),
    ]
    require_plain_order(tmp_path, record.parts)
    plain = resumed(tmp_path, 3, 5, "--nodes", "2")
    assert record.loss[3:] == plain.loss
    assert [run.info.status for run in logged_runs(tmp_path)] == ["FINISHED"]
    # All is trained: there is nothing left to begin, and more steps are another job.
    again = zerokit(tmp_path, *ELASTIC, "--steps", "8", "--no-mlflow")
    assert again.returncode == 1
    assert "run holds step 8 already, and an elastic bench ends at step 8: give more --steps" in again.stderr


def test_a_rank_killed_before_the_first_save_leads_to_the_beginning(tmp_path: Path) -> None:
    seen = prepare(tmp_path, hold=2)
    with started(tmp_path, "--nproc-per-node", "2", "--steps", "5", "--no-mlflow") as process:
        until(trained(tmp_path, 0, 2), process)
        let_go(seen)
        kill_rank(tmp_path, 1)
        ended(process)
    record = read_record(tmp_path / "record.json")
    assert [(part.world, part.first_step, part.last_step) for part in record.parts] == [(2, 1, 2), (1, 1, 5)]
    require_plain_order(tmp_path, record.parts)
    fresh = ("bench", *MODEL, "--warmup", "0", "--steps", "5", "--output", "fresh.json", "--no-mlflow")
    assert zerokit_forked(tmp_path, *fresh, **ONE_THREAD).returncode == 0
    assert record.loss == read_record(tmp_path / "fresh.json").loss


def test_an_error_of_the_program_is_not_restarted(tmp_path: Path) -> None:
    seen = prepare(tmp_path, hold=None)
    (seen / "fail").touch()
    with started(tmp_path, "--nproc-per-node", "2", "--steps", "5", "--no-mlflow") as process:
        said = ended(process, 1)
    assert "ValueError: a fault of the program" in said
    assert "restart" not in said
    record = read_record(tmp_path / "record.json")
    assert (record.status, len(record.parts)) == ("failed", 1)


def test_a_job_killed_after_its_last_step_is_told_to_the_end_without_figures(tmp_path: Path) -> None:
    """As by a kill between the last save and the record: nothing is trained twice to have something to measure."""
    seen = prepare(tmp_path, hold=5)  # in the pass that counts memory, after the last step
    with started(tmp_path, "--nproc-per-node", "2", "--steps", "5") as process:
        until(trained(tmp_path, 0, 5), process)
        until((tmp_path / "run" / "step-00000005" / "manifest.json").exists, process)
        let_go(seen)
        kill_rank(tmp_path, 1)
        ended(process)
    record = read_record(tmp_path / "record.json")
    assert record.status == "ok"
    assert (record.results, record.phases, len(record.loss)) == (None, None, 5)
    assert [(part.world, part.first_step, part.last_step) for part in record.parts] == [(2, 1, 5), (1, 6, 5)]
    assert [run.info.status for run in logged_runs(tmp_path)] == ["FINISHED"]
    compared = zerokit(tmp_path, "compare", "record.json", "--html", "page.html")
    assert compared.returncode in (0, 1), compared.stderr
    assert "Traceback" not in compared.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--elastic"], "give --elastic a run directory with --save"),
        (["--elastic", "--save", "run", "--stage", "1,2"], "without a sweep"),
        (["--max-restarts", "2"], "--max-restarts is for --elastic with ranks that are started here"),
        (["--elastic", "--save", "run", "--launcher", "ssh", "--hosts", "a"], "not for ssh"),
        (["--elastic", "--save", "run", "--engine", "ddp"], "--save writes zerokit's checkpoints"),
    ],
)
def test_wrong_uses_are_refused(tmp_path: Path, options: list[str], said: str) -> None:
    done = zerokit(tmp_path, "bench", *options)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "run").exists()
