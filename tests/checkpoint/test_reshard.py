"""Resharding: byte for byte what the other number of ranks would have written, or an error and nothing."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import zerokit
from tests.cli.commands import environment
from tests.cli.commands import zerokit as command
from tests.support.checkpoints import (
    Content,
    example_content,
    example_layout,
    write_checkpoint,
    write_run,
)
from zerokit.checkpoint import copying
from zerokit.cli.text import decimal_size
from zerokit.errors import CheckpointError, UsageError
from zerokit.layout import Layout, Parameter, Segment, build_layout

WORLDS = (1, 2, 3, 4, 5, 8, 16, 17)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture(scope="module")
def content() -> Content:
    return example_content(example_layout(1))


@pytest.fixture
def step(tmp_path: Path, content: Content) -> Path:
    """A step of three ranks in a run."""
    return write_run(tmp_path / "run", example_layout(3), content)


@pytest.fixture
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of small files: waiting for the disk would take most of the time."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


# --- the right bytes ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unsynced")
def test_every_world_to_every_world(tmp_path: Path, content: Content) -> None:
    """Each equals what is written plainly; so there and back again returns the same bytes."""
    for world in WORLDS:
        write_checkpoint(tmp_path / f"{world}", example_layout(world), content)
    written = {world: contents(tmp_path / f"{world}") for world in WORLDS}
    for old in WORLDS:
        for new in WORLDS:
            output = zerokit.reshard(tmp_path / f"{old}", new, tmp_path / "out", jobs=1 + (old + new) % 2)
            assert contents(output) == written[new], f"{old} to {new}"
            shutil.rmtree(output)


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


@settings(max_examples=60)
@given(layout=layouts(), world=st.integers(1, 64), buffer=st.sampled_from([16, 1000, 1 << 20]))
def test_generated_models(
    tmp_path_factory: pytest.TempPathFactory, layout: Layout, world: int, buffer: int
) -> None:
    folder = tmp_path_factory.mktemp("generated")
    content = example_content(layout)
    write_checkpoint(folder / "old", layout, content)
    write_checkpoint(folder / "new", layout.for_world(world), content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copying, "BUFFER_BYTES", buffer)
        patch.setattr(os, "fsync", lambda fd: None)
        found = contents(zerokit.reshard(folder / "old", world, folder / "out"))
    assert found == contents(folder / "new")
    shutil.rmtree(folder)


# --- damage ------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(data=st.data())
def test_a_flipped_bit_anywhere_is_an_error_and_leaves_nothing(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "flipped"
    if not folder.exists():
        write_run(folder / "run", example_layout(2), example_content(example_layout(1)))
    # A damaged `latest` is passed over: the step is whole.
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "latest")
    path = data.draw(st.sampled_from(files))
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd: None)
            with pytest.raises(CheckpointError) as caught:
                zerokit.reshard(folder / "run", 3, folder / "out")
        assert path.name in str(caught.value)
    finally:
        path.write_bytes(whole)
    assert sorted(entry.name for entry in folder.iterdir()) == ["run"]


def test_a_bad_slice_is_named(step: Path) -> None:
    path = step / "rank-00001-of-00003.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        zerokit.reshard(step, 2)
    message = str(caught.value)
    assert f"{step}: {path.name}: param/blocks.2.base, elements 0 to 128: damaged (CRC-32 " in message
    assert [entry.name for entry in step.parent.iterdir() if "to-2" in entry.name] == []


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), "rank-00000-of-00003.safetensors: cannot be opened: No such file"),
        (lambda path: os.truncate(path, path.stat().st_size - 1), "truncated"),
        (lambda path: path.write_bytes(path.read_bytes() + b"x"), "too long"),
        (lambda path: (path.unlink(), path.mkdir()), "not a regular file"),
    ],
)
def test_a_missing_or_cut_file(step: Path, spoil: object, message: str) -> None:
    spoil(step / "rank-00000-of-00003.safetensors")  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=message):
        zerokit.reshard(step, 2)
    assert sorted(entry.name for entry in step.parent.iterdir()) == ["latest", step.name]


def test_a_file_of_another_step(tmp_path: Path, step: Path, content: Content) -> None:
    write_checkpoint(tmp_path / "other", example_layout(3), example_content(example_layout(1), step=101))
    shutil.copy(tmp_path / "other" / "rank-00002-of-00003.safetensors", step)
    with pytest.raises(CheckpointError, match=r"rank-00002-of-00003.safetensors: .*step '101', not '100'"):
        zerokit.reshard(step, 2)


# --- where it goes -----------------------------------------------------------------------------------------


def test_output_beside_the_source_and_never_over_what_exists(
    step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(step)
    output = zerokit.reshard(".", 2)
    assert output == step.parent / "step-00000100.to-2"
    with pytest.raises(CheckpointError, match="exists: choose another output, or --force"):
        zerokit.reshard(step, 2)
    before = contents(output)
    zerokit.reshard(step, 2, force=True)
    assert contents(output) == before
    (output / "stray").touch()
    with pytest.raises(CheckpointError, match="holds the file 'stray', which zerokit has not written there"):
        zerokit.reshard(step, 2, force=True)
    (output / "stray").unlink()
    assert contents(output) == before
    assert contents(zerokit.reshard(output, 3, step.parent / "back")) == contents(step)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("run/step-00000100", "the output is the source itself"),
        ("run/step-00000100/inner", "the output lies in its source"),
        ("run", "the output contains its source"),
        ("nowhere/out", "its parent directory .*nowhere does not exist"),
    ],
)
def test_impossible_outputs(tmp_path: Path, step: Path, output: str, message: str) -> None:
    before = contents(step)
    with pytest.raises(CheckpointError, match=message):
        zerokit.reshard(step, 2, tmp_path / output, force=True)
    assert contents(step) == before
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run"]


def test_of_a_run_it_makes_a_run(tmp_path: Path, step: Path, content: Content) -> None:
    """With everything that a save of the other ranks would have left there."""
    wanted = write_run(tmp_path / "wanted", example_layout(2), content)
    found = zerokit.reshard(tmp_path / "run", 2, tmp_path / "out")
    assert found == tmp_path / "out" / "step-00000100"
    assert contents(found) == contents(wanted)
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
    with pytest.raises(CheckpointError, match="holds the directory 'inner' in step-00000100, which"):
        zerokit.reshard(tmp_path / "run", 2, tmp_path / "out", force=True)
    with pytest.raises(CheckpointError, match="out: holds the file 'latest'"):
        zerokit.consolidate(tmp_path / "run", tmp_path / "out", force=True)
    zerokit.reshard(step, 3, tmp_path / "of a step")
    zerokit.reshard(tmp_path / "run", 3, tmp_path / "of a step", force=True)
    assert zerokit.Checkpoint(tmp_path / "of a step").run is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["of a step", "out", "run"]


@pytest.mark.parametrize("world", [0, -1, 2**20 + 1])
def test_impossible_worlds(step: Path, world: int) -> None:
    with pytest.raises(UsageError, match=f"world={world}: expected an integer from 1 to 1048576"):
        zerokit.reshard(step, world)


# --- the command -------------------------------------------------------------------------------------------


def test_the_command_imports_neither_torch_nor_numpy(tmp_path: Path, step: Path) -> None:
    code = (
        "import sys, atexit; from zerokit.cli import main;"
        "atexit.register(lambda: print(sorted({'torch', 'mlflow', 'numpy', 'rich'} & set(sys.modules))));"
        "main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "reshard", str(step.parent), "--to", "4"],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"{step.parent}.to-4\n[]\n"
    output = Path(f"{step.parent}.to-4") / step.name
    size = decimal_size(sum(map(len, contents(output).values())))
    assert done.stderr == (
        f"{output.parent}: step 100 of 3 ranks cut for 4, {size}, proven and synced; zerokit.load and bench "
        "--resume read any number of ranks, without it\n"
    )


def test_the_command_writes_json(tmp_path: Path, step: Path) -> None:
    done = command(tmp_path, "reshard", "run", "--to", "2", "-o", "out", "--jobs", "1", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == {
        "output": "out",
        "world": 2,
        "step": "out/step-00000100",
        "files": {"latest": 23}
        | {
            f"step-00000100/{name}": len(content)
            for name, content in contents(tmp_path / "out" / "step-00000100").items()
        },
    }


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "--to", "0"], 2, "Invalid value for '--to': 0 is not in the range x>=1."),
        (["run"], 2, "Missing option '--to'"),
        (["run", "--to", "2", "--jobs", "0"], 2, "Invalid value for '--jobs'"),
        (["run", "--to", "9999999"], 2, "expected an integer from 1 to 1048576"),
        (["nowhere", "--to", "2"], 1, "zerokit: nowhere: does not exist"),
        (["tmp", "--to", "2"], 1, "zerokit: tmp: no checkpoint"),
        (["run", "--to", "2", "-o", "run"], 1, "the output contains its source"),
        (["run", "--to", "2", "-o", "tmp"], 1, "zerokit: tmp: exists"),
    ],
)
def test_the_command_refuses_in_plain_words(
    tmp_path: Path, step: Path, arguments: list[str], code: int, message: str
) -> None:
    done = command(tmp_path, "reshard", *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_leaves_nothing(tmp_path: Path, step: Path) -> None:
    """A limit of the file size stands for the disk: files are laid out before anything is copied."""
    done = subprocess.run(
        [sys.executable, "-m", "zerokit.cli", "reshard", "run", "--to", "1"],
        cwd=tmp_path,
        env=environment(tmp_path),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "rank-00000-of-00001.safetensors: cannot be laid out: File too large" in done.stderr
    assert sorted(entry.name for entry in step.parent.iterdir()) == ["latest", step.name]


def test_memory_does_not_grow_with_the_checkpoint(tmp_path: Path) -> None:
    layout = build_layout(
        [Segment(f"b{i}", (Parameter(f"b{i}.weight", (1000, 1000)),)) for i in range(8)],
        world=2,
        bucket_bytes=1 << 20,
    )
    write_checkpoint(tmp_path / "large", layout, example_content(layout))  # 96 MB
    code = (
        "import sys; from zerokit.checkpoint.reshard import reshard; reshard('large', 5, 'out');"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(done.stdout) < 64 * 1024
