"""Consolidated weights: the values that torch would give, in files that stock loaders take."""

from __future__ import annotations

import json
import math
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
from tests.support.checkpoints import Content, example_content, example_layout, write_checkpoint
from zerokit.checkpoint import copying
from zerokit.checkpoint.formats.huggingface_writer import parse_size
from zerokit.checkpoint.formats.rounding import from_array
from zerokit.checkpoint.source import to_array
from zerokit.errors import CheckpointError, UsageError
from zerokit.layout import Parameter, Segment, build_layout

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
