"""Resharding: byte for byte what the other number of ranks would have written, or an error and nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zerokit
from tests.cli.commands import run_python
from tests.cli.inside import zerokit_inside as command
from tests.support.checkpoints import (
    Content,
    example_content,
    example_layout,
    weights_of,
    write_checkpoint,
    write_run,
)
from tests.support.crashes import read_tree
from zerokit.checkpoint import copying
from zerokit.cli.work import decimal_size
from zerokit.errors import CheckpointError
from zerokit.layout import Layout, Parameter, Segment, build_layout

parameters = st.lists(
    st.builds(
        Parameter,
        name=st.just(""),
        shape=st.lists(st.integers(0, 40), max_size=2).map(tuple),
        dtype=st.sampled_from(["float32", "bfloat16", "float64", "int64", "bool", "int8"]),
        group=st.integers(0, 2),
        trainable=st.booleans(),
    ),
    max_size=4,
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    count = 0
    segments = []
    for number, members in enumerate(draw(st.lists(parameters, max_size=5))):
        named = []
        for member in members:
            tied = (f"tied{count}",) if draw(st.booleans()) else ()
            named.append(
                Parameter(f"p{count}", member.shape, member.dtype, member.group, member.trainable, tied)
            )
            count += 1
        segments.append(Segment(draw(st.sampled_from([None, f"block{number}"])), tuple(named)))
    return build_layout(
        segments, world=draw(st.integers(1, 64)), bucket_bytes=draw(st.sampled_from([0, 4096]))
    )


@settings(max_examples=25)
@given(
    layout=layouts(),
    world=st.integers(1, 64),
    buffer=st.sampled_from([16, 1000, 1 << 20]),
    weights_only=st.booleans(),
)
def test_generated_models(
    tmp_path_factory: pytest.TempPathFactory, layout: Layout, world: int, buffer: int, weights_only: bool
) -> None:
    folder = tmp_path_factory.mktemp("generated")
    content = weights_of(example_content(layout)) if weights_only else example_content(layout)
    write_checkpoint(folder / "old", layout, content)
    write_checkpoint(folder / "new", layout.for_world(world), content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "BUFFER_BYTES", buffer)
        patch.setattr(os, "fsync", lambda fd: None)
        out = zerokit.reshard(folder / "old", world, folder / "out")
    assert read_tree(out) == read_tree(folder / "new")
    assert zerokit.verify(out).intact
    assert zerokit.diff(out, folder / "old").same
    shutil.rmtree(folder)


def test_output_beside_the_source_and_never_over_what_exists(
    step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(step)
    output = zerokit.reshard(".", 2)
    assert output == step.parent / "step-00000100.to-2"
    with pytest.raises(CheckpointError, match="exists: choose another output, or --force"):
        zerokit.reshard(step, 2)
    before = read_tree(output)
    zerokit.reshard(step, 2, force=True)
    assert read_tree(output) == before
    (output / "stray").touch()
    with pytest.raises(CheckpointError, match="holds the file 'stray': only an earlier output"):
        zerokit.reshard(step, 2, force=True)
    (output / "stray").unlink()
    assert read_tree(output) == before
    assert read_tree(zerokit.reshard(output, 3, step.parent / "back")) == read_tree(step)


def test_of_a_run_it_makes_a_run(tmp_path: Path, step: Path, content: Content) -> None:
    """With everything that a save of the other ranks would have left there."""
    wanted = write_run(tmp_path / "wanted", example_layout(2), content)
    found = zerokit.reshard(tmp_path / "run", 2, tmp_path / "out")
    assert found == tmp_path / "out" / "step-00000100"
    assert read_tree(found) == read_tree(wanted)
    assert (tmp_path / "out" / "latest").read_bytes() == (tmp_path / "wanted" / "latest").read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["latest", "step-00000100"]
    assert zerokit.verify(tmp_path / "out").intact
    assert zerokit.reshard(tmp_path / "run", 4) == tmp_path / "run.to-4" / "step-00000100"
    zerokit.check_run(tmp_path / "out", after=100)


def test_force_replaces_a_run_of_one_step_and_no_other(tmp_path: Path, step: Path, content: Content) -> None:
    for world in (2, 4):
        zerokit.reshard(tmp_path / "run", world, tmp_path / "out", force=True)
        assert zerokit.Checkpoint(tmp_path / "out").world == world
    write_checkpoint(tmp_path / "out" / "step-00000101", example_layout(1), content)
    with pytest.raises(CheckpointError, match="holds 2 steps, where an output of this kind has one"):
        zerokit.reshard(tmp_path / "run", 2, tmp_path / "out", force=True)
    shutil.rmtree(tmp_path / "out" / "step-00000101")
    (tmp_path / "out" / "step-00000100" / "inner").mkdir()
    with pytest.raises(CheckpointError, match="holds the directory 'inner' in step-00000100: only"):
        zerokit.reshard(tmp_path / "run", 2, tmp_path / "out", force=True)
    with pytest.raises(CheckpointError, match="out: holds the file 'latest'"):
        zerokit.consolidate(tmp_path / "run", tmp_path / "out", force=True)
    zerokit.reshard(step, 3, tmp_path / "of a step")
    zerokit.reshard(tmp_path / "run", 3, tmp_path / "of a step", force=True)
    assert zerokit.Checkpoint(tmp_path / "of a step").run is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of a step", "out", "run"]


def test_the_command_says_what_it_wrote(tmp_path: Path, step: Path) -> None:
    done = command(tmp_path, "reshard", "run", "--to", "2", "-o", "out", "--jobs", "1", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {
        "output": "out",
        "world": 2,
        "step": "out/step-00000100",
        "files": {name: len(content) for name, content in read_tree(tmp_path / "out").items() if content},
    }
    size = decimal_size(sum(len(content or b"") for content in read_tree(tmp_path / "out").values()) - 23)
    done = command(tmp_path, "reshard", "run", "--to", "2")
    assert done.stdout == f"{tmp_path}/run.to-2\n"
    assert done.stderr == (
        f"{tmp_path}/run.to-2: step 100 of 3 ranks cut for 2, {size}, verified and synced; zerokit.load and bench "
        "--resume read any number of ranks without resharding\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_removes_what_was_written(tmp_path: Path, step: Path, number: signal.Signals) -> None:
    code = (
        "import os, signal; from tests.support.crashes import Counting\n"
        "from zerokit import files; from zerokit.cli import main\n"
        f"class Signalled(Counting):\n  def instead(self): os.kill(os.getpid(), {number:d})\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it\n"
        "with files.replaced(Signalled(25)): main()"
    )
    done = run_python(tmp_path, "-c", code, "reshard", "run", "--to", "5")
    assert (done.returncode, done.stdout) == (128 + number, "")
    assert done.stderr == f"zerokit: interrupted by {number.name}\n"
    assert [path.name for path in tmp_path.glob("*run*")] == ["run"]


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    layout = build_layout(
        [Segment(f"b{i}", (Parameter(f"b{i}.weight", (1000, 1000)),)) for i in range(6)],
        world=2,
        bucket_bytes=1 << 20,
    )
    write_checkpoint(tmp_path / "large", layout, example_content(layout))  # 72 MB
    code = (
        "import sys; from zerokit.checkpoint.formats.convert import reshard; reshard('large', 5, 'out');"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = run_python(tmp_path, "-c", code)
    assert int(done.stdout) < 64 * 1024
