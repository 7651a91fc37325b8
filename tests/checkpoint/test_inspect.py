"""`inspect`: what a checkpoint holds, as a tree and as JSON, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import environment, zerokit
from tests.support.checkpoints import example_content, example_layout, write_checkpoint, write_run
from zerokit.checkpoint.inspect import inspect
from zerokit.layout import Parameter, Segment, build_layout


@pytest.fixture
def step(tmp_path: Path) -> Path:
    layout = example_layout(3)
    return write_run(tmp_path / "run", layout, example_content(layout))


def test_a_checkpoint_is_described(step: Path) -> None:
    summary = inspect(step.parent)
    layout = example_layout(3)
    assert (summary.path, summary.step, summary.world, summary.units) == (step, 100, 3, len(layout.units))
    assert summary.trainable_numel == layout.trainable_numel
    assert summary.frozen_numel == 4 * 24 * 7 + 9
    assert summary.bytes == sum(
        path.stat().st_size for path in step.iterdir() if path.name != "manifest.json"
    )
    assert [p.name for p in summary.parameters] == [p.name for p in layout.parameters]
    tied = summary.parameters[0]
    assert (tied.name, tied.aliases, tied.numel) == ("tok.weight", ("head.weight",), 1200)
    assert tied.streams == ("master", "exp_avg", "exp_avg_sq")
    assert {p.streams for p in summary.parameters if not p.trainable} == {("param",)}
    assert {tensor.name for tensor in summary.common} == {
        "buffers/count",
        "buffers/running_mean",
        "optimizer/step",
    }


def test_the_command_shows_a_tree(step: Path, tmp_path: Path) -> None:
    done = zerokit(tmp_path, "inspect", "run")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("run/step-00000100  step 100, 3 ranks, ")
    assert "│   ├── master  float32, 14 parameters, 5,351 elements, 21.4 kB" in lines
    assert "│   │   └── weight  float32 [50, 24], tied with head.weight" in lines
    assert not any(line != line.rstrip() for line in lines)


def test_the_command_gives_json(step: Path, tmp_path: Path) -> None:
    done = zerokit(tmp_path, "inspect", "--json", str(step))
    assert (done.returncode, done.stderr) == (0, "")
    plain = json.loads(done.stdout)
    assert (plain["step"], plain["world"], len(plain["files"])) == (100, 3, 5)
    assert plain["parameters"][0]["shape"] == [50, 24]


def test_layers_that_are_alike_are_shown_once(tmp_path: Path) -> None:
    segments = [
        Segment(f"h.{i}", (Parameter(f"h.{i}.w", (4, 4 + (i == 7))), Parameter(f"h.{i}.b", (4,))))
        for i in range(12)
    ]
    layout = build_layout(segments, world=2, bucket_bytes=64)
    write_checkpoint(tmp_path / "step", layout, example_content(layout))
    shown = zerokit(tmp_path, "inspect", "step").stdout
    assert [
        line.split("── ")[1] for line in shown.splitlines() if "alike" in line or line.endswith("── 7")
    ] == [
        "0 – 6 (7 alike)",
        "7",
        "8 – 11 (4 alike)",
    ]


def test_names_cannot_steer_the_terminal_nor_exhaust_it(tmp_path: Path) -> None:
    names = ("\x1b]0;title\x07\x1b[2J[bold]", "a" + ".a" * 3000, "a")
    layout = build_layout(
        [Segment(None, tuple(Parameter(name, (2,)) for name in names))], world=1, bucket_bytes=0
    )
    write_checkpoint(tmp_path / "step", layout, example_content(layout))
    done = zerokit(tmp_path, "inspect", "step")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert r"\x1b]0;title\x07\x1b[2J[bold]" in done.stdout


def test_no_command_loads_torch(step: Path, tmp_path: Path) -> None:
    code = (
        "import sys, atexit; from zerokit.cli import main;"
        "atexit.register(lambda: print(sorted({'torch', 'mlflow', 'numpy'} & set(sys.modules))));"
        "main()"
    )
    for arguments in (["inspect", "run"], ["verify", "run"], ["diff", "run", "run"]):
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.endswith("[]\n")
