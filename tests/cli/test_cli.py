"""The program itself: quick to answer, plain about wrong use."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import zerokit as package
from tests.cli.commands import environment, zerokit, zerokit_imports
from tests.cli.inside import zerokit_inside
from tests.support.checkpoints import example_content, example_layout, write_checkpoint
from zerokit.bench.machine.host import Gpu
from zerokit.bench.record.settings import Settings
from zerokit.cli import COMMANDS, cli, main
from zerokit.cli.bench_options import HEADING_OF
from zerokit.cli.bench_run import Request


def test_help_answers_without_torch_mlflow_or_rich(tmp_path: Path) -> None:
    for arguments in (["--help"], ["bench", "--help"]):
        done, imported = zerokit_imports(tmp_path, *arguments)
        assert done.stdout.startswith("Usage: ")
        assert not {"torch", "mlflow", "rich", "numpy"} & imported


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_standard_output_is_an_error(unbuffered: str, tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "zerokit", "--help"],
            env=environment(tmp_path, PYTHONUNBUFFERED=unbuffered),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, "zerokit: No space left on device\n")


def test_a_name_that_no_file_can_have_is_an_error(tmp_path: Path) -> None:
    done = zerokit(tmp_path, "compare", name := "a" * 300)
    assert (done.returncode, done.stderr) == (1, f"zerokit: File name too long: {name}\n")


def test_a_working_directory_that_is_gone_is_an_error(tmp_path: Path) -> None:
    line = f"mkdir gone; cd gone; rmdir ../gone; exec {shlex.quote(sys.executable)} -m zerokit doctor --quick"
    done = subprocess.run(
        ["sh", "-c", line],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        1,
        "zerokit: No such file or directory: the working directory\n",
    )


def test_a_closed_standard_error_is_no_damage(tmp_path: Path) -> None:
    layout = example_layout(1)
    write_checkpoint(tmp_path / "step", layout, example_content(layout))
    line = f"{shlex.quote(sys.executable)} -m zerokit verify step 2>&-"
    done = subprocess.run(
        line, shell=True, cwd=tmp_path, env=environment(tmp_path), stdout=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stdout[:12]) == (0, b"step: intact")


def test_an_encoding_without_a_sign_escapes_it(tmp_path: Path) -> None:
    for number in range(2):
        layout = example_layout(1)
        write_checkpoint(tmp_path / str(number), layout, example_content(layout, step=number))
    done = zerokit(tmp_path, "diff", "0", "1", PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (1, "")
    assert r"checkpoint/step  0 \u2192 1" in done.stdout
    written = subprocess.run(
        [sys.executable, "-m", "zerokit", "reshard", "0", "--to", "2", "-o", "\udcff"],
        cwd=tmp_path,
        env=environment(tmp_path, PYTHONIOENCODING="utf-8:strict"),
        stdout=subprocess.PIPE,
        check=True,
    )
    assert written.stdout == b"\xff\n"


def test_the_environment_gives_options_that_flags_overrule() -> None:
    runner = CliRunner(env={"ZEROKIT_BENCH_STAGE": "9"})
    assert "Invalid value for '--stage'" in runner.invoke(cli, ["bench", "--nodes", "1"]).stderr
    overruled = runner.invoke(cli, ["bench", "--stage", "1", "--nodes", "0"])
    assert "Invalid value for '--nodes'" in overruled.stderr


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """What `zerokit bench` would run."""
    found: list[Request] = []

    def run(request: Request, _: object) -> int:
        found.append(request)
        return 0

    monkeypatch.setattr("zerokit.cli.bench_run.run_bench", run)
    return found


def test_a_sweep_file_gives_options_that_flags_overrule(tmp_path: Path, requests: list[Request]) -> None:
    file = tmp_path / "sweep.toml"
    file.write_text(
        'engine = ["zerokit", "ddp"]\nstage = [0, 1]\nbatch_size = 2\nrepeats = 1\nclip = 0\n'
        "twin = false\nno-mlflow = 1\n"
    )
    result = CliRunner().invoke(cli, ["bench", str(file), "--stage", "0", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    (request,) = requests
    assert request.cells == [
        Settings(engine=engine, stage=0, batch_size=2, clip=None, twin=False, device="cpu")
        for engine in ("zerokit", "ddp")
    ]
    assert request.options == {
        "engine": ["zerokit", "ddp"],
        "stage": [0],
        "batch-size": [2],
        "repeats": 1,
        "clip": 0.0,
        "twin": False,
        "device": "cpu",
    }
    assert request.given == " --no-mlflow"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("stgae = 1", "'stgae' is not an option of zerokit bench: did you mean stage?"),
        ("stage = [1, 4]", "Invalid value for '--stage': '4' is not one of '0', '1', '2', '3'"),
        ("steps = 2.5", "'2.5' is not a valid integer"),
        ("steps = [2, 3]", "'2,3' is not a valid integer"),
        ('twin = "maybe"', "'maybe' is not a valid boolean"),
        ("stage = []", "'' has an empty value between its commas"),
        ("[table]\nstage = 1", "'table' is not an option"),
        ("elastic = [1, 2]", "'1,2' is not a valid boolean"),
        ("batch-size = 1\nbatch_size = 2", "batch-size is set twice"),
        ("stage =", "is not a TOML file of options"),
        ('seq_len = 257\nmodel = "gpt-5m"', "seq_len 257 exceeds the 256 positions"),
    ],
)
def test_a_wrong_sweep_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "sweep.toml").write_text(content)
    result = CliRunner().invoke(cli, ["bench", str(tmp_path / "sweep.toml")])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("arguments", "ranks"),
    [
        ([], [4]),
        (["--nodes", "2"], [2]),
        (["--device", "cpu"], [1]),
        (["--device", "cuda"], [4]),
        (["--nproc-per-node", "3"], [3]),
        # Those of other machines have as many devices as this one.
        (["--nodes", "1,2", "--repeats", "1", "--launcher", "ssh", "--hosts", "a,b"], [4, 4]),
    ],
)
def test_a_node_has_a_rank_for_each_of_its_devices(
    monkeypatch: pytest.MonkeyPatch, requests: list[Request], arguments: list[str], ranks: list[int]
) -> None:
    monkeypatch.setattr(
        "zerokit.cli.bench_run.visible_devices", lambda: [Gpu(f"GPU-{n}", None) for n in range(4)]
    )
    result = CliRunner().invoke(cli, ["bench", "--no-mlflow", *arguments])
    assert result.exit_code == 0, result.output
    assert [settings.nproc_per_node for settings in requests[0].cells] == ranks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "short.txt"], "data: short.txt holds 5 bytes, but sequences of 128 tokens need"),
        (["--data", "empty.txt"], "data: empty.txt has no text"),
        (["--output", "short.txt/records"], "the record cannot be written to short.txt/records"),
    ],
)
def test_a_failure_ends_with_one_and_plain_words(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "empty.txt").touch()
    done = zerokit_inside(tmp_path, "bench", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("zerokit: ")
    assert message in done.stderr
    assert done.stdout == ""
    assert {path.name for path in tmp_path.iterdir()} == {"short.txt", "empty.txt", "tmp"}


def test_an_interruption_before_a_command_has_begun_ends_with_its_signal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("zerokit.cli.import_module", interrupt)
    monkeypatch.setattr("sys.argv", ["zerokit", "bench"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
    assert capsys.readouterr().err == "zerokit: interrupted by SIGINT\n"


def test_each_command_has_a_help_of_its_own() -> None:
    runner = CliRunner()
    assert runner.invoke(cli, ["--version"]).output == f"zerokit, version {package.__version__}\n"
    assert all(name in runner.invoke(cli, ["--help"]).output for name in COMMANDS)
    shown = {name: runner.invoke(cli, [name, "--help"]).output for name in COMMANDS}
    assert all(text.startswith(f"Usage: cli {name} ") for name, text in shown.items())
    assert len({text.split("\n\n")[1] for text in shown.values()}) == len(COMMANDS)


def test_the_help_of_bench_lists_every_option_once_below_a_heading() -> None:
    shown = CliRunner().invoke(cli, ["bench", "--help"], terminal_width=80).output
    listed = re.findall(r"^  (?:-[ho], )?(--[a-z-]+)", shown, re.MULTILINE)
    bench = cli.get_command(click.Context(cli), "bench")
    assert bench is not None
    assert sorted(listed) == sorted(
        [*(one.opts[0] for one in bench.params if isinstance(one, click.Option)), "--help"]
    )
    assert all(f"{heading}:\n  -" in shown for heading in (*HEADING_OF.values(), "Other"))
