"""`Checkpoint`: every array of a checkpoint of any world size, and every kind of damage by its place."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from tests.support.checkpoints import Content, example_content, example_layout, write_checkpoint, write_run
from zerokit.checkpoint.arrays import to_array
from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.disk import read_exactly
from zerokit.checkpoint.extents import ELEMENT_BYTES, Stream, rank_file
from zerokit.checkpoint.manifest import File, Manifest
from zerokit.checkpoint.reader import Checkpoint
from zerokit.checkpoint.verify import verify
from zerokit.errors import CheckpointError, UsageError
from zerokit.layout import Parameter, Segment, build_layout

ROOT = Path(__file__).parents[2]
WORLD = 3


@pytest.fixture(scope="module")
def content() -> Content:
    return example_content(example_layout(WORLD))


@pytest.fixture
def step(tmp_path: Path, content: Content) -> Path:
    return write_run(tmp_path / "run", example_layout(WORLD), content)


@pytest.mark.parametrize("world", [1, 2, 5, 64])
def test_every_array_is_read_whole_at_any_world_size(tmp_path: Path, content: Content, world: int) -> None:
    layout = example_layout(world)
    write_checkpoint(tmp_path / "step", layout, content)
    checkpoint = Checkpoint(tmp_path / "step")
    shapes = {parameter.name: parameter.shape for parameter in layout.parameters}
    assert (checkpoint.step, checkpoint.world, checkpoint.shapes) == (100, world, shapes)
    for (kind, name), data in content.values.items():
        array = checkpoint.read(kind, name)
        number, _ = checkpoint.find(kind, name)
        tensor = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]
        expected = tensor.view(getattr(torch, checkpoint.streams[number].dtype)).reshape(shapes[name])
        assert array.shape == shapes[name]
        torch.testing.assert_close(
            torch.from_numpy(array),
            expected.to(torch.from_numpy(array).dtype),
            rtol=0,
            atol=0,
            equal_nan=True,
        )


def test_an_alias_is_another_name_of_the_same_parameter(step: Path) -> None:
    checkpoint = Checkpoint(step)
    assert np.array_equal(
        checkpoint.read("exp_avg", "head.weight"), checkpoint.read("exp_avg", "tok.weight"), equal_nan=True
    )
    assert "head.weight" not in checkpoint.names


def test_only_the_bytes_asked_for_are_read(
    step: Path, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(step)
    read = []

    def counted(fd: int, buffers: Any, offset: int, where: Any) -> None:
        read.append(sum(memoryview(buffer).nbytes for buffer in buffers))
        read_exactly(fd, buffers, offset, where)

    monkeypatch.setattr("zerokit.checkpoint.reader.read_exactly", counted)
    checkpoint.read("master", "tok.weight")
    assert sum(read) == len(content.values["master", "tok.weight"])


def test_a_run_s_latest_is_followed(step: Path) -> None:
    assert Checkpoint(step.parent).path == step
    assert Checkpoint(str(step.parent)).manifest == Checkpoint(step).manifest


def test_tensors_that_are_stored_whole_are_read(step: Path, content: Content) -> None:
    checkpoint = Checkpoint(step)
    assert set(checkpoint.common_names) == {name for name, *_ in content.common}
    for name, dtype, shape, data in content.common:
        assert checkpoint.common_tensor(name) == (dtype, shape, bytearray(data))
    assert checkpoint.extra_plain() == checkpoint.extra() == content.extra


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_rank_s_file_opens_here_and_in_the_stock_library(step: Path, rank: int) -> None:
    checkpoint = Checkpoint(step)
    file = checkpoint.rank_file(rank)
    with checkpoint.open_rank(rank) as fd:
        assert os.pread(fd, len(file.header), 0) == file.header
    with safe_open(step / file.name, "np") as stock:
        assert set(stock.keys()) == {
            f"{checkpoint.streams[extent.stream].kind}/{extent.parameter.name}" for extent in file.extents
        }


@pytest.mark.parametrize(
    ("stream", "name", "message"),
    [
        ("master", "nothing", "no parameter 'nothing'"),
        ("momentum", "gain", "no stream 'momentum' of 'gain', only 'master', 'exp_avg', 'exp_avg_sq'"),
        ("param", "gain", "no stream 'param' of 'gain'"),
        ("master", "table", "no stream 'master' of 'table', only 'param'"),
    ],
)
def test_what_is_not_there_is_wrong_use(step: Path, stream: str, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Checkpoint(step).read(stream, name)


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_arrays_of_every_dtype_hold_the_exact_values(dtype: str) -> None:
    size = ELEMENT_BYTES[dtype]
    data = (
        bytes([0, 1]) if dtype == "bool" else b"".join(os.urandom(size - 1) + bytes([i]) for i in range(256))
    )
    array = to_array(data, dtype, (2, len(data) // size // 2))
    expected = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(2, -1)
    if dtype.startswith(("bfloat", "float8")):
        expected = expected.float()
    assert array.dtype == expected.numpy().dtype
    if expected.is_floating_point():
        assert np.array_equal(np.isnan(array), np.isnan(expected.numpy()))
        assert np.array_equal(
            np.signbit(array) & ~np.isnan(array), np.signbit(expected.numpy()) & ~np.isnan(array)
        )
    assert np.array_equal(array, expected.numpy(), equal_nan=expected.is_floating_point())


def everything(path: Path) -> None:
    """Read all there is."""
    checkpoint = Checkpoint(path)
    for rank in range(checkpoint.world):
        with checkpoint.open_rank(rank):
            pass
    for stream in checkpoint.streams:
        for place in stream.parameters:
            checkpoint.read(stream.kind, checkpoint.names[place])
    for name in checkpoint.common_names:
        checkpoint.common_tensor(name)
    checkpoint.extra()


def test_a_flipped_bit_at_any_sampled_place_is_found_and_its_file_named(step: Path) -> None:
    everything(step.parent)
    files = [*step.iterdir(), step.parent / "latest"]
    for path in files:
        whole = path.read_bytes()
        for place in sorted({0, 5, 9, 11, 40, len(whole) // 2, len(whole) // 3, len(whole) - 1}):
            if place >= len(whole):
                continue
            changed = bytearray(whole)
            changed[place] ^= 1 << place % 8
            path.write_bytes(changed)
            if path.name == "latest":  # the step is whole: it is taken, and this is said
                assert any("latest: " in note for note in Checkpoint(step.parent).notes), place
                everything(step.parent)
                continue
            with pytest.raises(CheckpointError) as caught:
                everything(step.parent)
            assert path.name in str(caught.value), (path.name, place)
        path.write_bytes(whole)
    everything(step.parent)


def test_a_damaged_slice_is_named(step: Path) -> None:
    checkpoint = Checkpoint(step)
    extent = checkpoint.rank_file(1).extents[-1]
    path = step / checkpoint.rank_file(1).name
    content = bytearray(path.read_bytes())
    content[extent.offset] ^= 1
    path.write_bytes(content)
    kind = checkpoint.streams[extent.stream].kind
    expected = (
        f"{kind}/{extent.parameter.name}, elements {extent.interval.start} to {extent.interval.stop}: damaged"
    )
    with pytest.raises(CheckpointError, match=f"rank-00001-of-00003.safetensors: {expected}"):
        checkpoint.read(kind, extent.parameter.name)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def remove(path: Path) -> None:
    path.unlink()


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["rank-00002-of-00003.safetensors", "common.safetensors", "extra.json"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "truncated: .* bytes, expected"),
        (lengthen, "too long: .* bytes, expected"),
        (remove, "cannot be opened: No such file"),
        (make_directory, "not a regular file"),
        (make_pipe, "not a regular file"),
    ],
)
def test_a_missing_or_wrong_file_is_named(
    step: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    damage(step / name)
    with pytest.raises(CheckpointError, match=f"{name}: {message}"):
        everything(step)


def test_a_rank_s_file_of_another_step_is_told_from_a_damaged_one(step: Path, content: Content) -> None:
    layout = example_layout(WORLD)
    other = step.parent / "step-00000101"
    write_checkpoint(other, layout, Content(101, *list(vars(content).values())[1:]))
    name = "rank-00001-of-00003.safetensors"
    (step / name).write_bytes((other / name).read_bytes())
    with pytest.raises(CheckpointError, match=f"{name}: .* is of another checkpoint .step '101', not '100'"):
        everything(step)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "damaged"),
        (b"step-00000100\n", "damaged"),
        (b"step-00000100 0123456g\n", "damaged"),
        (b"../other/step-00000100 01234567\n", "damaged"),
        (b"step-00000101 01234567\n", "names step-00000101, which has no manifest.json"),
        (b"step-00000100 01234567\n", "states the manifest 01234567, step-00000100 has"),
        (bytes((1 << 20) + 1), "damaged"),
        (None, None),
    ],
)
def test_the_newest_whole_step_is_taken_whatever_latest_says(
    step: Path, text: bytes | None, message: str | None
) -> None:
    latest = step.parent / "latest"
    latest.unlink() if text is None else latest.write_bytes(text)
    found = Checkpoint(step.parent)
    assert found.path == step
    assert any("step-00000100 is taken as the newest" in note for note in found.notes) == (
        message is None or "states" not in message
    )
    if message is not None:
        assert f"latest: {message}" in found.notes[0]
        assert any(message in finding.problem for finding in verify(step.parent).findings)
    assert not Checkpoint(step).notes


def test_a_step_under_another_step_s_name_is_refused_in_a_run(step: Path) -> None:
    moved = step.rename(step.parent / "step-00000200")
    latest = step.parent / "latest"
    latest.write_text(latest.read_text().replace("0100", "0200"))
    with pytest.raises(CheckpointError, match=r"no step to go on from: .*describes step 100"):
        Checkpoint(step.parent)
    assert Checkpoint(moved).step == 100


def test_what_is_no_checkpoint_is_refused_with_advice(tmp_path: Path, step: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, message in [
        (tmp_path / "nowhere", "does not exist: give the directory of a step, or of a run"),
        (step / "manifest.json", "is not a directory"),
        (tmp_path / "empty", "no checkpoint: it has no manifest.json and no step, and it has no latest$"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(path)


def test_a_manifest_of_absurd_size_is_not_read(step: Path) -> None:
    os.truncate(step / "manifest.json", 1 << 40)
    with pytest.raises(CheckpointError, match="more than the"):
        Checkpoint(step)


def test_a_manifest_that_states_another_file_than_its_layout_gives_is_refused(step: Path) -> None:
    """With a checksum of its own that is right."""
    path = step / "manifest.json"
    body = path.read_bytes()[20:].replace(b'"header_bytes":4096', b'"header_bytes":4000')
    path.write_bytes(b'{"crc32":"%08x",' % crc32(body) + body)
    with pytest.raises(CheckpointError, match=r"describes rank-00000-of-00003\.safetensors as .* 4000"):
        Checkpoint(step).rank_file(0)


def test_a_parameter_that_the_files_cannot_hold_takes_no_memory(step: Path) -> None:
    """Everything that the manifest states agrees, but the file is small."""
    layout = build_layout([Segment(None, (Parameter("a", (1 << 50,)),))], world=1, bucket_bytes=0)
    stream = Stream("master", "float64", (0,))
    file = rank_file(layout, [stream], 100, 0)
    stated = File(file.name, file.size, len(file.header), crc32(file.header))
    old = Checkpoint(step).manifest
    manifest = Manifest(100, layout, (stream,), (), ((0,),), (stated,), old.common, old.extra)
    (step / "manifest.json").write_bytes(manifest.to_bytes())
    (step / file.name).write_bytes(file.header)
    with pytest.raises(CheckpointError, match=f"{file.name}: truncated: 4096 bytes, expected {file.size}"):
        Checkpoint(step).read("master", "a")
    assert [finding.problem for finding in verify(step).findings][-1] == "beyond the end of the file"


def test_reading_loads_no_torch(step: Path) -> None:
    code = (
        "import sys; from zerokit.checkpoint.reader import Checkpoint; c = Checkpoint(sys.argv[1]);"
        "c.rank_file(0); assert 'numpy' not in sys.modules; c.read('master', 'gain'); c.extra();"
        "sys.exit(bool({'torch', 'mlflow', 'safetensors'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code, step], cwd=ROOT, check=True)
