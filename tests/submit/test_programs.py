"""`zerokit launch` in queues: a job with torchrun and the program. Programs in PATH stand for the queues'."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from tests.submit.manifests import require_known
from tests.support.programs import Programs
from zerokit.bench.record.record import Record, read_record
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.status import Status
from zerokit.cli import cli
from zerokit.submit import jobs

TEXT = "import this\n\nprint('$(NAME)')\n"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "FOLLOW_SECONDS", 0.05)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TEXT)


def launch(launcher: str, options: str, *program: str) -> Result:
    return CliRunner().invoke(cli, ["launch", "--launcher", launcher, *options.split(), "--", *program])


def test_a_script_starts_a_torchrun_on_each_node() -> None:
    options = "--dry-run --nodes 2 --nproc-per-node 4 --cpus-per-task 3 --master-addr n9 --remote-python py "
    options += "--env A=1 --container-image a.sif --container-runtime apptainer"
    done = launch("slurm", options, "-m", "a.b", "c d")
    assert done.exit_code == 0, done.output
    asked = ("job-name=a", "nodes=2", "ntasks-per-node=1", "cpus-per-task=12")
    assert "\n".join(f"#SBATCH --{one}" for one in asked) in done.stdout
    assert "\nexport A=1\nexport MASTER_ADDR=n9\n" in done.stdout
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("srun "))
    assert " a.sif py -P -m torch.distributed.run --nnodes 2 --nproc-per-node 4 " in line
    assert line.endswith(" -m a.b 'c d' || exit 1")


@pytest.mark.parametrize(("state", "code"), [("COMPLETED ExitCode=0:0", 0), ("FAILED ExitCode=1:0", 1)])
def test_a_job_of_slurm_is_followed_and_its_logs_end_is_shown(
    programs: Programs, state: str, code: int
) -> None:
    programs.put("sbatch", "cat >script; echo 'a last word' >zerokit-7.log; echo 7")
    programs.put("scontrol", f"echo JobState={state} Reason=None")
    done = launch("slurm", "--gpus-per-node 2", "train.py")
    assert (done.exit_code, done.stdout) == (code, "  | a last word\n")
    assert done.stderr.startswith("zerokit: submitted as Slurm's job 7; its log is zerokit-7.log\n")
    assert ("further up in zerokit-7.log\n" in done.stderr) == bool(code)
    assert " --nproc-per-node 2 " in Path("script").read_text()


@pytest.mark.parametrize("form", ["trainjob", "jobset"])
def test_pods_get_the_script_that_is_here(form: str) -> None:
    done = launch("kubernetes", f"--container-image i --nodes 2 --form {form}", "train.py", "$(A)")
    assert done.exit_code == 0, done.output
    assert done.stdout.count(f"  train.py: |\n    {TEXT.splitlines()[0]}\n\n    print") == 1
    files, *rest = yaml.safe_load_all(done.stdout)
    for made in (files, *rest):
        require_known(made)
    assert files["data"] == {"train.py": TEXT}
    assert '"command": ["torchrun"], "args": ["/program/train.py", "$$(A)"]' in json.dumps(rest[-1])
    assert f'"configMap": {{"name": "{files["metadata"]["name"]}"}}' in json.dumps(rest)
    assert "pods get train.py alone" in done.stderr


@pytest.mark.parametrize("program", [("/opt/train.py",), ("-m", "a.b")])
def test_a_program_that_is_not_here_is_the_images(program: tuple[str, ...]) -> None:
    done = launch("kubernetes", "--container-image i", *program)
    assert (done.exit_code, done.stderr) == (0, "")
    runtime, job = yaml.safe_load_all(done.stdout)
    assert job["spec"]["trainer"]["args"] == list(program)
    assert "configMap" not in json.dumps(runtime)


def test_a_script_too_large_for_kubernetes_is_refused() -> None:
    Path("train.py").write_text("#" * (1 << 20) + "\n")
    done = launch("kubernetes", "--container-image i", "train.py")
    assert (done.exit_code, "at most 1 MiB" in " ".join(done.stderr.split())) == (2, True)


def test_a_program_that_is_no_text_is_refused() -> None:
    Path("train").write_bytes(b"\x7fELF\xff")
    done = launch("kubernetes", "--container-image i", "train")
    assert (done.exit_code, "train cannot go along" in " ".join(done.stderr.split())) == (2, True)


def test_a_name_that_kubernetes_does_not_take_is_refused() -> None:
    Path("my träin.py").touch()
    done = launch("kubernetes", "--container-image i", "my träin.py")
    assert (done.exit_code, "takes no file named" in " ".join(done.stderr.split())) == (2, True)


def kubectl(programs: Programs, end: str) -> None:
    """A `kubectl` whose jobs have ended so, with what is in the file `log`."""
    state = json.dumps({"status": {"conditions": [{"type": end, "status": "True"}]}})
    programs.put(
        "kubectl", f"""case "$1" in create) cat >made;; get) echo '{state}';; logs) cat log;; esac"""
    )


@pytest.mark.parametrize(("end", "code"), [("Complete", 0), ("Failed", 1)])
def test_submitted_pods_are_followed_and_the_first_ones_log_is_shown(
    programs: Programs, end: str, code: int
) -> None:
    kubectl(programs, end)
    Path("log").write_text("a word\n")
    done = launch("kubernetes", "--container-image i --submit --job-name a", "train.py")
    assert (done.exit_code, done.stdout) == (code, "a word\n"), done.output
    assert [made["kind"] for made in yaml.safe_load_all(Path("made").read_text())][-1] == "TrainJob"


def test_the_record_of_a_bench_that_failed_is_fetched(programs: Programs) -> None:
    """What torchrun prints after it says less."""
    kubectl(programs, "Failed")
    failed = Record(
        id="a",
        cell=Settings().key,
        sweep=None,
        status=Status.OUT_OF_MEMORY,
        created="2026-11-28T00:00:00+00:00",
        settings=Settings(),
        reason="too large",
    )
    Path("log").write_text(f"a line\n{failed.to_json()}zerokit FAILED\n")
    words = "--launcher kubernetes --container-image i --submit --no-mlflow --output out.json"
    done = CliRunner().invoke(cli, ["bench", *words.split()])
    assert (done.exit_code, read_record(Path("out.json")).reason) == (4, "too large"), done.output
    assert "out of memory: too large" in done.stderr
