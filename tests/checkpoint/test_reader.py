"""`Checkpoint`: every array at any world size, damage by its place, and costs in proportion to the files."""

from __future__ import annotations

import errno
import json
import os
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from tests.cli.inside import zerokit_inside as command
from tests.support.checkpoints import (
    Content,
    common_file,
    example_content,
    example_extra,
    example_layout,
    sealed,
    write_checkpoint,
)
from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.diff import diff
from zerokit.checkpoint.formats import open_source
from zerokit.checkpoint.formats.convert import consolidate, reshard
from zerokit.checkpoint.inspect import inspect
from zerokit.checkpoint.manifest import File, Manifest
from zerokit.checkpoint.reader import Checkpoint
from zerokit.checkpoint.run import list_steps
from zerokit.checkpoint.safetensors import ELEMENT_BYTES, Stream, lay_out, rank_file
from zerokit.checkpoint.small_floats import PACKED
from zerokit.checkpoint.source import to_array
from zerokit.checkpoint.verify import verify
from zerokit.errors import CheckpointError, StorageError, UsageError
from zerokit.layout import Layout, Parameter, Segment, Unit, build_layout


@pytest.mark.parametrize("world", [1, 5, 64])
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
    tied = [checkpoint.read("exp_avg", name).tobytes() for name in ("head.weight", "tok.weight")]
    assert tied[0] == tied[1]
    assert set(checkpoint.common_forms) == {name for name, *_ in content.common}
    for name, dtype, shape, data in content.common:
        assert checkpoint.common_tensor(name) == (dtype, shape, bytearray(data))
    assert checkpoint.extra_plain() == checkpoint.extra() == content.extra


def test_a_run_stays_one_whatever_weights_lie_beside_its_steps(step: Path) -> None:
    """As in a checkpoint of ZeroTrainer with adapters."""
    for name in ("adapter_model.safetensors", "model.safetensors"):
        save_file({"w": np.ones(2, np.float32)}, step.parent / name)
        assert open_source(step.parent).path == step


def test_what_is_not_there_is_wrong_use(step: Path) -> None:
    for stream, name, message in (
        ("master", "nothing", "no parameter 'nothing'"),
        ("momentum", "gain", "no stream 'momentum' of 'gain', only 'master', 'exp_avg', 'exp_avg_sq'"),
        ("master", "table", "no stream 'master' of 'table', only 'param'"),
    ):
        with pytest.raises(UsageError, match=message):
            Checkpoint(step).read(stream, name)


@pytest.mark.parametrize("dtype", ELEMENT_BYTES)
def test_arrays_of_every_dtype_hold_the_exact_values(dtype: str) -> None:
    size = ELEMENT_BYTES[dtype]
    data = (
        bytes([0, 1]) if dtype == "bool" else b"".join(os.urandom(size - 1) + bytes([i]) for i in range(256))
    )
    array = to_array(data, dtype, (2, len(data) // size // 2))
    if dtype in PACKED:
        assert (str(array.dtype), array.tobytes()) == ("uint8", data)
        return
    expected = torch.frombuffer(bytearray(data), dtype=getattr(torch, dtype)).reshape(2, -1)
    if dtype.startswith(("bfloat", "float8")):
        expected = expected.float()
    assert array.dtype == expected.numpy().dtype
    if expected.is_floating_point():
        assert np.array_equal(np.isnan(array), np.isnan(expected.numpy()))
        assert np.array_equal(
            np.signbit(array) & ~np.isnan(array), np.signbit(expected.numpy()) & ~np.isnan(array)
        )
    assert np.array_equal(array, expected.numpy(), equal_nan=not dtype.startswith(("int", "uint", "bool")))


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


def test_what_this_user_may_not_read_is_told_and_not_passed_over(
    step: Path, content: Content, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(step.parent / "step-00000101", example_layout(3), replace(content, step=101))
    closed = {"open": {"latest", "step-00000101/"}, "stat": {"step-00000101/"}, "scandir": set[str]()}

    def close(name: str, call: Callable[..., Any]) -> None:
        def refuse(path: Any, *rest: Any, **options: Any) -> Any:
            if any(part in str(path) for part in closed[name]):
                raise PermissionError(errno.EACCES, "Permission denied")
            return call(path, *rest, **options)

        monkeypatch.setattr(os, name, refuse)

    for name in closed:
        close(name, getattr(os, name))
    for look in (Checkpoint, inspect, verify, list_steps):
        with pytest.raises(
            StorageError, match=r"(latest|101/manifest\.json): cannot be .*: Permission denied"
        ):
            look(step.parent)
    closed["open"].remove("latest")
    with pytest.raises(StorageError, match=r"step-00000101/manifest\.json: cannot be .*: Permission denied"):
        Checkpoint(step.parent)
    assert Checkpoint(step).step == 100
    closed["scandir"].add("run")
    with pytest.raises(CheckpointError, match="run: cannot be listed: Permission denied"):
        list_steps(step.parent)


def test_a_step_under_another_step_s_name_is_refused_in_a_run(step: Path) -> None:
    moved = step.rename(step.parent / "step-00000200")
    latest = step.parent / "latest"
    latest.write_text(latest.read_text().replace("0100", "0200"))
    with pytest.raises(CheckpointError, match=r"no step to resume from: .*describes step 100"):
        Checkpoint(step.parent)
    assert [str(finding) for finding in verify(step.parent).findings] == ["manifest.json: describes step 100"]
    assert Checkpoint(moved).step == 100
    assert verify(moved).intact


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


FEW = 120


def _replace_common(step: Path, content: bytes) -> None:
    (step / "common.safetensors").write_bytes(content)
    plain = json.loads((step / "manifest.json").read_bytes())
    plain["common"] |= {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    plain["scalars"] = []
    (step / "manifest.json").write_bytes(sealed(plain))


def empty_tensors(step: Path, number: int) -> None:
    """`common` with tensors of no elements."""
    layout = example_layout(2)
    write_checkpoint(step, layout, example_content(layout))
    header, _ = lay_out(((f"buffers/{place}", "float32", (0,)) for place in range(number)), {})
    _replace_common(step, header)


def empty_units(step: Path, number: int) -> None:
    """A parameter without elements in each, and as many in one more."""
    names = [f"p{place}" for place in range(2 * number)]
    units = [*([name] for name in names[:number]), names[number:]]
    made = (
        Unit.equal(n, (), tuple(Parameter(name, (0,)) for name in held), 2) for n, held in enumerate(units)
    )
    layout = Layout(2, 0, tuple(made))
    write_checkpoint(step, layout, example_content(layout))


def long_keys(step: Path, number: int) -> None:
    """A key as long as the file, above many values: errors that name their place would cost the square of it."""
    layout = example_layout(1)
    extra = example_extra(user={"k" * 50 * number: [[0]] * number})
    write_checkpoint(step, layout, replace(example_content(layout), extra=extra))


MADE: dict[str, Callable[[Path, int], None]] = {
    "empty tensors": empty_tensors,
    "empty units": empty_units,
    "long keys": long_keys,
}


def _measured(work: Callable[[], object]) -> tuple[int, int]:
    """Calls of functions, C's too, and the peak of the memory that Python took."""
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    work()  # modules are imported once
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    tracemalloc.start()
    try:
        work()
        return calls, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


@pytest.mark.full(default=["long keys", "empty tensors"])
@pytest.mark.parametrize("case", MADE)
def test_reading_costs_in_proportion_to_the_files(tmp_path: Path, case: str) -> None:
    works: dict[str, Callable[[Path], object]] = {
        "inspect": inspect,
        "verify": verify,
        "diff": lambda step: diff(step, tmp_path / "other"),
        "reshard": lambda step: reshard(step, 3, tmp_path / "out", jobs=1, force=True),
        "consolidate": lambda step: consolidate(step, tmp_path / "model", jobs=1, force=True),
    }
    MADE[case](tmp_path / "few", FEW)
    MADE[case](tmp_path / "many", 4 * FEW)
    MADE[case](tmp_path / "other", FEW + 1)
    for name, work in works.items():
        calls, memory = {}, {}
        for size in ("few", "many"):
            calls[size], memory[size] = _measured(lambda step=tmp_path / size, work=work: work(step))  # type: ignore[misc]
        assert calls["many"] < 5 * calls["few"] + 1000, name
        grown = _size(tmp_path / "many") - _size(tmp_path / "few")
        assert memory["many"] - memory["few"] < 32 * grown, name


def test_a_folder_of_many_small_tensors_costs_in_proportion(tmp_path: Path) -> None:
    def convert(number: int) -> int:
        header, ends = lay_out(((f"layers.{place}.bias", "float32", (3,)) for place in range(number)), {})
        path = tmp_path / f"{number}.safetensors"
        path.write_bytes(header + bytes(ends[-1] - len(header)))
        return _measured(lambda: reshard(path, 2, tmp_path / "folder", jobs=1, force=True))[0]

    assert convert(4 * FEW) < 5 * convert(FEW) + 1000


def test_the_files_of_many_ranks_cost_what_they_hold() -> None:
    """Parameters × ranks would be minutes for a manifest of a few megabytes."""

    def calls_of(parameters: int, world: int) -> int:
        units = tuple(
            Unit.equal(place, (), (Parameter(f"p{place}", (1,)),), world) for place in range(parameters)
        )
        layout = Layout(world, 0, units)
        streams = example_content(layout).streams

        def files() -> None:
            fresh = Layout(world, 0, units)
            for rank in range(1, world):
                assert not rank_file(fresh, streams, 1, rank).extents

        return _measured(files)[0]

    few = calls_of(100, 100)
    assert calls_of(800, 100) < few + 50 * 800


def test_inspect_shows_so_many_lines_and_says_that_there_are_more(tmp_path: Path) -> None:
    layout = example_layout(1)
    content = example_content(layout)
    write_checkpoint(tmp_path / "step", layout, content)
    tensors = [(f"buffers/{place}", "uint8", (1,), b"\0") for place in range(3000)]
    _replace_common(tmp_path / "step", common_file(tensors))
    shown = command(tmp_path, "inspect", "step").stdout
    assert len(shown.splitlines()) < 2100
    assert "and 1,000 more (--json lists all)" in shown
    assert len(json.loads(command(tmp_path, "inspect", "--json", "step").stdout)["common"]) == 3000
