"""Consolidated weights: the values that torch would give, in files that stock loaders take."""

from __future__ import annotations

import json
import os
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
from tests.support.distributed import run_ranks
from tests.support.training import SMALL
from zerokit.checkpoint import copying
from zerokit.checkpoint.formats.huggingface_writer import parse_size
from zerokit.checkpoint.formats.rounding import from_array
from zerokit.checkpoint.source import to_array
from zerokit.errors import CheckpointError, UsageError
from zerokit.layout import Parameter, Segment, build_layout

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def finite(content: Content) -> Content:
    """With numbers that fit every dtype in place of random bits."""
    generator = torch.Generator().manual_seed(0)
    values = {}
    for (kind, name), data in content.values.items():
        if name == "table":
            values[kind, name] = data
            continue
        dtype = torch.bfloat16 if kind == "param" else torch.float32
        numel = len(data) // dtype.itemsize
        values[kind, name] = raw(torch.randn(numel, generator=generator).to(dtype))
    common = [
        (
            name,
            dtype,
            shape,
            raw(torch.randn(8, generator=generator)) if name == "buffers/running_mean" else data,
        )
        for name, dtype, shape, data in content.common
    ]
    return replace(content, values=values, common=tuple(common))


def raw(tensor: Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


@pytest.fixture(scope="module")
def content() -> Content:
    return finite(example_content(example_layout(1)))


def expected(content: Content, dtype: str | None = None) -> dict[str, Tensor]:
    """What the folder must hold."""
    tensors = [("buffers/" + p.name, p.dtype, p.shape, data) for p, data in _parameters(content)]
    tensors += [entry for entry in content.common if entry[0].startswith("buffers/")]
    found = {}
    for name, kind, shape, data in tensors:
        whole = torch.frombuffer(bytearray(data) or bytearray(8), dtype=getattr(torch, kind))
        whole = (whole if data else whole[:0]).reshape(shape)
        found[name.removeprefix("buffers/")] = (
            whole.to(TORCH[dtype]) if dtype and whole.is_floating_point() else whole
        )
    return found


def _parameters(content: Content) -> list[tuple[Parameter, bytes]]:
    return [
        (p, content.values["master" if p.trainable else "param", p.name])
        for p in example_layout(1).parameters
    ]


def loaded(folder: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        part = load_file(path)
        assert not part.keys() & found.keys()
        found |= part
    return found


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


@pytest.mark.parametrize(("world", "dtype"), [(1, None), (8, "fp32"), (3, "bf16"), (3, "fp16")])
def test_values_at_any_world_size_and_dtype(
    tmp_path: Path, content: Content, world: int, dtype: str | None
) -> None:
    write_checkpoint(tmp_path / "step", example_layout(world), content)
    folder = zerokit.consolidate(tmp_path / "step", tmp_path / "out", dtype=dtype)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    same(loaded(folder), expected(content, dtype))


def test_an_fp32_model_keeps_every_bit(tmp_path: Path) -> None:
    """Random bits: signalling nans, denormals, infinities."""
    content = example_content(example_layout(1))
    write_checkpoint(tmp_path / "step", example_layout(2), content)
    same(loaded(zerokit.consolidate(tmp_path / "step", tmp_path / "out")), expected(content))


@pytest.mark.parametrize(("limit", "buffer"), [(1, 64), (3000, 1 << 20), ("6kB", 64), ("5GB", 64)])
def test_shards_and_their_index(
    tmp_path: Path,
    step: Path,
    content: Content,
    limit: int | str,
    buffer: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copying, "BUFFER_BYTES", buffer)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    folder = zerokit.consolidate(step, tmp_path / "out", dtype="bf16", max_shard_size=limit)
    wanted = expected(content, "bf16")
    same(loaded(folder), wanted)
    files = sorted(folder.glob("*.safetensors"))
    if limit == "5GB":
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
        return
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert [path.name for path in files] == names
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in wanted.values())}
    assert index["weight_map"].keys() == wanted.keys()
    for path in files:
        tensors = load_file(path)
        assert {name for name, file in index["weight_map"].items() if file == path.name} == tensors.keys()
        full = [tensor for tensor in tensors.values() if tensor.nbytes]
        assert len(full) == 1 or sum(tensor.nbytes for tensor in full) <= parse_size(limit)


def test_the_models_own_dtypes_are_the_default(tmp_path: Path, content: Content) -> None:
    """As a model in bf16 is saved: masters in fp32."""
    layout = build_layout(
        [Segment(None, (Parameter("a", (33,), dtype="bfloat16"), Parameter("b", (5,))))],
        world=2,
        bucket_bytes=0,
    )
    made = finite(example_content(layout))
    write_checkpoint(tmp_path / "step", layout, made)
    found = loaded(zerokit.consolidate(tmp_path / "step", tmp_path / "out"))
    whole = {
        name: torch.frombuffer(bytearray(made.values["master", name]), dtype=torch.float32) for name in "ab"
    }
    assert raw(found["a"]) == raw(whole["a"].bfloat16())
    assert raw(found["b"]) == raw(whole["b"])


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


def test_what_does_not_fit_is_refused(tmp_path: Path, content: Content) -> None:
    values = dict(content.values)
    values["master", "gain"] = np.float32(70000).tobytes()
    write_checkpoint(tmp_path / "step", example_layout(2), replace(content, values=values))
    with pytest.raises(CheckpointError, match="gain: 70000 does not fit float16: choose a wider dtype"):
        zerokit.consolidate(tmp_path / "step", tmp_path / "out", dtype="fp16")
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    zerokit.consolidate(tmp_path / "step", tmp_path / "out", dtype="bf16")


def test_sizes() -> None:
    texts = ("7", "300MB", "1.5GiB", " 2 kb ", "1T")
    assert [parse_size(text) for text in texts] == [7, 300 * 10**6, 3 * 2**29, 2000, 10**12]
    for text in (0, -1, "", "GB", "5 PB", "1e3", "0.1", "5iB", "-5GB"):
        with pytest.raises(UsageError, match="expected a number of bytes, or such as 300MB"):
            parse_size(text)


def test_impossible_requests(tmp_path: Path, step: Path) -> None:
    with pytest.raises(UsageError, match="dtype='fp8': expected one of bf16, fp16, fp32"):
        zerokit.consolidate(step, tmp_path / "out", dtype="fp8")
    with pytest.raises(CheckpointError, match="the output contains its source"):
        zerokit.consolidate(step, tmp_path / "run", force=True)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists: choose another output"):
        zerokit.consolidate(step, tmp_path / "out")
    assert zerokit.consolidate(step, tmp_path / "out", force=True) == tmp_path / "out"


def test_names_that_collide_are_refused(tmp_path: Path, content: Content) -> None:
    common = (*content.common, ("buffers/gain", "float32", (), bytes(4)))
    write_checkpoint(tmp_path / "step", example_layout(1), replace(content, common=common))
    with pytest.raises(CheckpointError, match="no tensor can be written as 'gain': that name is taken"):
        zerokit.consolidate(tmp_path / "step", tmp_path / "out")


def _gpt2() -> Any:
    import transformers

    torch.manual_seed(8)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=61, n_positions=16, n_embd=24, n_layer=2, n_head=2)
    )


def _train_gpt2(directory: str) -> dict[str, Tensor]:
    model = _gpt2()
    zero = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=3, precision="fp32", bucket_mb=SMALL, lr=0.1)
    tokens = torch.arange(18).reshape(2, 9)
    zero.backward(model(input_ids=tokens, labels=tokens).loss)
    zero.step()
    zerokit.save(directory, zero, step=1)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_transformers_loads_gpt2_with_its_tied_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trained = run_ranks(2, _train_gpt2, str(tmp_path / "run"))[0]
    folder = zerokit.consolidate(tmp_path / "run", tmp_path / "out", max_shard_size="20kB")
    config = _gpt2().config
    config.save_pretrained(folder)
    model, report = transformers.GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.lm_head.weight is model.transformer.wte.weight
    same(dict(model.state_dict()), trained)
    # The names are those that transformers itself would have written.
    model.save_pretrained(tmp_path / "own")
    assert loaded(tmp_path / "own").keys() == loaded(folder).keys()
