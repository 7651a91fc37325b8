"""Slurm's batch scripts, and a job's life as its commands tell it: here they are small programs in PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.programs import Programs
from zerokit.cluster.slurm import Container
from zerokit.errors import UsageError
from zerokit.interrupts import Interrupted, Interrupts
from zerokit.launch.failures import LaunchError
from zerokit.submit import jobs
from zerokit.submit.slurm import JOB_FOLDER, Request, folder_of, follow, log_of, render_script, submit


def asked(request: Request) -> list[str]:
    script = render_script(request, ["true"])
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_a_script_asks_for_what_the_request_says() -> None:
    shape: dict[str, Any] = {"nodes": 2, "ranks": 8, "gpus_per_node": 8, "cpus_per_task": 12, "memory": "64G"}
    request = Request(**shape, partition="gpu", account="us", time="00:30:00", lines=("--qos=high",))
    assert " ".join(asked(request)) == (
        "--job-name=zerokit-bench --nodes=2 --ntasks-per-node=8 --cpus-per-task=12 --mem=64G --gpus-per-node=8 "
        "--partition=gpu --account=us --time=00:30:00 --signal=TERM@60 --output=zerokit-%j.log --qos=high"
    )
    # Nodes are taken whole where no cores are asked for.
    assert {"--exclusive", "--mem=0"} <= set(asked(Request(nodes=1)))
    assert not {"--exclusive", "--mem=0"} & set(asked(Request(nodes=1, cpus_per_task=2)))


ODD = 'it\'s 100% $(touch injected); `touch injected` "x"'


@pytest.mark.parametrize(
    ("given", "cores"),
    [
        ({"SLURM_CPUS_ON_NODE": "9", "SLURM_NTASKS_PER_NODE": "2"}, 4),
        ({"SLURM_CPUS_ON_NODE": "2", "SLURM_NTASKS_PER_NODE": "4"}, 1),
        ({"SLURM_CPUS_ON_NODE": "9", "SLURM_NTASKS_PER_NODE": "2", "SLURM_CPUS_PER_TASK": "3"}, 3),
    ],
)
def test_a_script_starts_ranks_with_their_cores_and_leaves_their_code(
    tmp_path: Path, given: dict[str, str], cores: int
) -> None:
    """By srun, in folders of any name, with words and variables that mean something to a shell."""
    (folder := tmp_path / ODD).mkdir()
    (folder / "srun").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" "$ODD" > {tmp_path}/said\nexit 3\n')
    (folder / "srun").chmod(0o755)
    request = Request(nodes=1, variables={"ODD": ODD}, container=Container("image", "pyxis"))
    script = tmp_path / "job.sh"
    script.write_text(render_script(request, ["bench", ODD, "--output", f"{JOB_FOLDER}/record.json", "HERE"]))
    environment = os.environ | given | {"SLURM_JOB_ID": "7", "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(script)], cwd=folder, env=environment, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (3, b"")
    assert (folder / folder_of("7")).is_dir()
    assert (tmp_path / "said").read_text().splitlines() == [
        f"--cpus-per-task={cores}",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "--container-image=image",
        f"--container-mounts={folder}:{folder}",
        f"--container-workdir={folder}",
        *("bench", ODD, "--output", "bench-runs/slurm-7/record.json", "HERE"),
        ODD,
    ]
    assert not list(tmp_path.rglob("injected"))


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(
        render_script(Request(nodes=1, variables={"A": "b c"}), ["zerokit", "--output", JOB_FOLDER])
    )
    subprocess.run([Path(sys.executable).with_name("shellcheck"), script], check=True)


def test_values_that_would_leave_their_line_and_lines_that_are_no_options_are_refused() -> None:
    for name, value in product(
        ("memory", "partition", "account", "time"), ("gpu\nrm", "a b", "$(x)", "", "gpu\n")
    ):
        given: dict[str, Any] = {name: value}
        with pytest.raises(UsageError, match="cannot be written in a line of a batch script"):
            Request(nodes=1, **given)
    for line in ("--qos=high\nrm -rf x", "rm -rf x", "", "#SBATCH --qos=high"):
        with pytest.raises(UsageError, match="is not an option of sbatch"):
            Request(nodes=1, lines=(line,))


class Stubs(Programs):
    """Slurm's commands."""

    results = Path("record.json")

    def tell(self, *answers: str) -> None:
        """What scontrol does, one time after the other; the last one for ever."""
        cases = "\n".join(f"{number}) {answer};;" for number, answer in enumerate(answers[:-1], 1))
        count = f"$(wc -l < {self.folder}/scontrol.asked)"
        self.put("scontrol", f"case {count} in\n{cases}\n*) {answers[-1]};;\nesac")

    def ends(self, state: str, code: str = "0:0") -> str:
        """The job's end, with a record."""
        return f"touch {self.results}; echo JobId=7 JobState={state} Reason=None ExitCode={code}"

    def follow(self) -> tuple[int, list[str]]:
        shown: list[str] = []
        with Interrupts() as interrupts:
            return follow("7", self.results, interrupts, shown.append), shown


PENDING, RUNNING = (
    f"echo JobState={state} ExitCode=0:0" for state in ("PENDING Reason=Resources", "RUNNING Reason=None")
)


@pytest.fixture
def stubs(tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> Stubs:
    found = Stubs(programs.folder)
    found.put("scancel", "true")
    monkeypatch.setattr(jobs, "FOLLOW_SECONDS", 0.05)
    monkeypatch.chdir(tmp_path)
    return found


def test_a_job_is_submitted(stubs: Stubs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stubs.put("sbatch", "cat >script; echo '7;cluster'")
    assert submit("the script") == "7"
    assert Path("script").read_text() == "the script"
    stubs.put("sbatch", "echo 'sbatch: error: invalid partition' >&2; exit 1")
    with pytest.raises(LaunchError, match="refused the job: sbatch: error: invalid partition"):
        submit("")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=r"sbatch cannot be run .*login node"):
        submit("")


def test_a_job_is_followed_to_its_end(stubs: Stubs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy controller is asked again."""
    busy = "echo 'slurm_load_jobs error: Socket timed out' >&2; exit 1"
    stubs.tell(PENDING, PENDING, busy, busy, RUNNING, stubs.ends("FAILED", "1:0"))
    assert stubs.follow() == (1, ["job 7: pending (Resources)", "job 7: running"])
    assert stubs.asked("scancel") == []
    monkeypatch.setattr(jobs, "ANSWER_SECONDS", 0.2)
    stubs.tell(busy)
    with pytest.raises(LaunchError, match=r"no answer for 0.2 s: .*timed out; .* end it with scancel 7"):
        stubs.follow()
    stubs.tell("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    with pytest.raises(LaunchError, match="does not know job 7 any more"):
        stubs.follow()


@pytest.mark.parametrize(
    ("state", "exited", "code"),
    [("FAILED", "143:0", 143), ("TIMEOUT", "0:0", 1), ("CANCELLED", "0:15", 143)],
)
def test_what_ended_a_job_is_told(stubs: Stubs, state: str, exited: str, code: int) -> None:
    stubs.tell(RUNNING, stubs.ends(state, exited))
    ended, shown = stubs.follow()
    assert ended == code
    assert shown[-1].startswith(f"job 7 was ended, perhaps at its time limit (--time): JobState {state}")


def test_a_job_without_results_failed(stubs: Stubs) -> None:
    log_of("7").write_text("a last word\n")
    stubs.tell(RUNNING, "echo JobState=NODE_FAIL Reason=None ExitCode=1:0")
    said = r"(?s)job 7 ended before the bench did: JobState NODE_FAIL.*a last word"
    with pytest.raises(LaunchError, match=said):
        stubs.follow()


def test_a_signal_cancels_the_job(stubs: Stubs) -> None:
    stubs.tell(f"kill -TERM {os.getpid()}; {RUNNING}", RUNNING, stubs.ends("CANCELLED", "0:15"))
    with pytest.raises(Interrupted, match="SIGTERM"):
        stubs.follow()
    assert stubs.asked("scancel") == ["7"]
