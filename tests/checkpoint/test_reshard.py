"""Resharding, byte for byte what other ranks would have written; consolidated weights with torch's values."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import zerokit
from tests.cli.commands import run_python
from tests.cli.inside import zerokit_inside as command
from tests.support.checkpoints import (
    Content,
    coded,
    example_content,
    example_layout,
    weights_of,
    write_checkpoint,
    write_run,
)
from tests.support.crashes import read_tree
from zerokit.checkpoint import copying
from zerokit.checkpoint.formats.huggingface_writer import parse_size
from zerokit.checkpoint.source import from_array, to_array
from zerokit.errors import CheckpointError, UsageError
from zerokit.layout import Layout, Parameter, Segment, build_layout
from zerokit.text import decimal_size

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
    kind=st.sampled_from(["whole", "weights", "codes"]),
)
def test_generated_models(
    tmp_path_factory: pytest.TempPathFactory, layout: Layout, world: int, buffer: int, kind: str
) -> None:
    folder = tmp_path_factory.mktemp("generated")
    content = example_content(layout)
    content = {"whole": content, "weights": weights_of(content), "codes": coded(content, layout)}[kind]
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
    files = {name: len(content) for name, content in read_tree(tmp_path / "out").items() if content}
    told = {"output": "out", "world": 2, "step": "out/step-00000100", "files": files}
    assert json.loads(done.stdout) == told
    done = command(tmp_path, "reshard", "run", "--to", "2")
    assert done.stdout == f"{tmp_path}/run.to-2\n"
    assert done.stderr == (
        f"{tmp_path}/run.to-2: step 100 of 3 ranks cut for 2, 6 files, {decimal_size(sum(files.values()))}, "
        "verified and synced; zerokit.load and bench --resume read any number of ranks without resharding\n"
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


TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def raw(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.fixture(scope="module")
def content() -> Content:
    """With numbers that fit every dtype in place of random bits."""
    made, values = example_content(example_layout(1)), {}
    for (kind, name), data in made.values.items():
        dtype = torch.bfloat16 if kind == "param" else torch.float32
        values[kind, name] = (
            data if name == "table" else raw(torch.randn(len(data) // dtype.itemsize).to(dtype))
        )
    mean, *others = made.common
    return replace(made, values=values, common=((*mean[:3], raw(torch.randn(8))), *others))


def expected(content: Content, dtype: str | None) -> dict[str, Tensor]:
    """What the folder must hold."""
    entries: list[tuple[Any, ...]] = [
        (p.name, p.dtype, p.shape, content.values["master" if p.trainable else "param", p.name])
        for p in example_layout(1).parameters
    ]
    entries += [(name[8:], *rest) for name, *rest in content.common if name.startswith("buffers/")]
    found = {}
    for name, kind, shape, data in entries:
        whole = torch.frombuffer(bytearray(data) or bytearray(8), dtype=getattr(torch, kind))
        whole = whole[: math.prod(shape)].reshape(shape)
        found[name] = whole.to(TORCH[dtype]) if dtype and whole.is_floating_point() else whole
    return found


@pytest.mark.parametrize(
    ("world", "dtype", "limit", "buffer"),
    [
        (1, None, "5GB", 1 << 20),
        (8, "fp32", 1, 64),
        (3, "bf16", 3000, 1 << 20),
        (3, "bf16", "6kB", 64),
        (3, "fp16", "5GB", 64),
    ],
)
def test_values_at_any_world_size_and_dtype_in_shards_with_their_index(
    tmp_path: Path,
    content: Content,
    world: int,
    dtype: str | None,
    limit: int | str,
    buffer: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the model's own dtypes of every bit: signalling nans, denormals, infinities."""
    content = content if dtype else example_content(example_layout(1))
    monkeypatch.setattr(copying, "BUFFER_BYTES", buffer)
    write_checkpoint(tmp_path / "step", example_layout(world), content)
    folder = zerokit.consolidate(tmp_path / "step", tmp_path / "out", dtype=dtype, max_shard_size=limit)
    wanted, found = expected(content, dtype), dict[str, tuple[str, Tensor]]()
    for path in folder.glob("*.safetensors"):
        part = load_file(path)
        found |= {name: (path.name, tensor) for name, tensor in part.items()}
        full = [tensor.nbytes for tensor in part.values() if tensor.nbytes]
        assert len(full) == 1 or sum(full) <= parse_size(limit)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name][1].dtype, found[name][1].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name][1]) == raw(tensor), name
    names = sorted(path.name for path in folder.iterdir())
    if limit == "5GB":
        assert names == ["model.safetensors"]
        return
    count = len(names) - 1
    assert names[:-1] == [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert json.loads((folder / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in wanted.values())},
        "weight_map": {name: file for name, (file, _) in found.items()},
    }


def test_the_models_own_dtypes_are_the_default(tmp_path: Path) -> None:
    """As a model in bf16 is saved: masters in fp32."""
    parameters = Parameter("a", (33,), dtype="bfloat16"), Parameter("b", (5,))
    layout = build_layout([Segment(None, parameters)], world=2, bucket_bytes=0)
    made = example_content(layout)
    whole = {name: torch.randn(size) for name, size in (("a", 33), ("b", 5))}
    values = {("master", name): raw(value) for name, value in whole.items()}
    write_checkpoint(tmp_path / "step", layout, replace(made, values=made.values | values))
    found = load_file(zerokit.consolidate(tmp_path / "step", tmp_path / "out") / "model.safetensors")
    assert torch.equal(found["a"], whole["a"].bfloat16())
    assert torch.equal(found["b"], whole["b"])


@settings(max_examples=25)
@given(
    data=st.binary(min_size=8, max_size=800),
    source=st.sampled_from(["bfloat16", "float16", "float32", "float64"]),
)
@pytest.mark.parametrize("target", ["bfloat16", "float16", "float32", "float64"])
def test_conversions_are_torchs(target: str, source: str, data: bytes) -> None:
    data = data[: len(data) // 8 * 8]
    whole = torch.frombuffer(bytearray(data), dtype=getattr(torch, source))
    converted = whole.to(getattr(torch, target))
    lost = whole.isfinite() & ~converted.isfinite()
    values = to_array(data, source, (-1,))
    if lost.any():
        with pytest.raises(OverflowError, match=f"does not fit {target}"):
            from_array(values, target)
        values = np.where(lost.numpy(), 0, values)
        converted = torch.where(lost, 0, converted)
    found = torch.frombuffer(bytearray(from_array(values, target)), dtype=getattr(torch, target))
    assert torch.equal(found.isnan(), converted.isnan())
    kept = ~converted.isnan()
    assert raw(found[kept]) == raw(converted[kept])


def test_what_cannot_be_written_is_refused(tmp_path: Path, content: Content) -> None:
    values = content.values | {("master", "gain"): np.float32(70000).tobytes()}
    common = (*content.common, ("buffers/gain", "float32", (), bytes(4)))
    write_checkpoint(tmp_path / "large", example_layout(2), replace(content, values=values))
    write_checkpoint(tmp_path / "twice", example_layout(1), replace(content, common=common))
    for name, message in (
        ("large", "gain: 70000 does not fit float16: choose a wider dtype"),
        ("twice", "no tensor can be written as 'gain': that name is taken"),
    ):
        with pytest.raises(CheckpointError, match=message):
            zerokit.consolidate(tmp_path / name, tmp_path / "out", dtype="fp16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large", "twice"]
    zerokit.consolidate(tmp_path / "large", tmp_path / "out", dtype="bf16")


def test_sizes() -> None:
    texts = ("7", "300MB", "1.5GiB", " 2 kb ", "1T")
    assert [parse_size(text) for text in texts] == [7, 300 * 10**6, 3 * 2**29, 2000, 10**12]
    for text in (0, -1, "", "GB", "5 PB", "1e3", "0.1", "5iB", "-5GB"):
        with pytest.raises(UsageError, match="expected a number of bytes, or such as 300MB"):
            parse_size(text)
