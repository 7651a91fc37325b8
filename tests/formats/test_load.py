"""`zerokit.load` goes on where DeepSpeed and FSDP2 stopped, at other world sizes and stages."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import zerokit
from tests.formats.make_fixtures import STEPS, Model, groups, loss_of
from tests.support.checkpoints import flip
from tests.support.distributed import run_each, run_ranks
from zerokit.checkpoint.formats import open_source
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.errors import CheckpointError, UsageError
from zerokit.placement import stage_of


def _optimizer(stage: int, seed: int = 5) -> tuple[Model, zerokit.ZeroOptimizer]:
    torch.manual_seed(seed)
    model = Model()
    zero = zerokit.ZeroOptimizer(
        model, torch.optim.AdamW, params=groups(model), stage=stage_of(stage), precision="fp32"
    )
    return model, zero


def _go_on(path: str, source_world: int, stage: int, clip: float | None) -> list[float]:
    """The losses after the checkpoint, with the batches of the ranks that wrote it."""
    model, zero = _optimizer(stage)
    zerokit.load(path, zero)
    mine = range(dist.get_rank(), source_world, dist.get_world_size())
    losses = []
    for step in range(STEPS, 2 * STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for number, rank in enumerate(mine):
            loss = loss_of(model, step, rank)
            total += loss.detach().double()
            if number + 1 < len(mine):
                with zero.accumulate():
                    zero.backward(loss / len(mine))
            else:
                zero.backward(loss / len(mine))
        if clip is not None:
            zero.clip_grad_norm_(clip)
        zero.step()
        zero.zero_grad()
        dist.all_reduce(total)
        losses.append(total.item() / source_world)
    return losses


@pytest.mark.parametrize(
    ("name", "source_world", "world", "stage"),
    [
        ("deepspeed-1-fp32", 2, 1, 3),
        ("deepspeed-2-fp32", 4, 2, 1),
        ("deepspeed-3-fp32", 4, 4, 2),
        ("fsdp2-plain", 3, 3, 1),
        ("fsdp2-titan", 2, 1, 2),
        ("fsdp2-accelerate", 2, 2, 3),
    ],
)
def test_losses_go_on_as_the_framework_would(
    made: Path, name: str, source_world: int, world: int, stage: int
) -> None:
    # DeepSpeed clips at 1 unless it is told otherwise.
    clip = 1.0 if name.startswith("deepspeed") else None
    resumed = run_ranks(world, _go_on, str(made / name), source_world, stage, clip)[0]
    theirs = json.loads((made / name / "losses.json").read_text())[STEPS:]
    assert resumed == pytest.approx(theirs, rel=1e-5)


def _weights(path: str, stage: int, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    model, zero = _optimizer(stage)
    zerokit.load(path, zero, weights_only=True, **arguments)
    with zero.gathered():
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["fsdp2-safetensors", "fsdp2-weights", "deepspeed-3-bf16"])
def test_weights_alone_come_from_any_format(made: Path, name: str) -> None:
    expected = load_file(made / name / "expected.safetensors")
    weights = run_ranks(2, _weights, str(made / name), 3, {})[1]
    for key, value in expected.items():
        kind, _, parameter = key.partition("/")
        if kind in ("master", "param", "buffer"):
            assert torch.equal(weights[parameter], value.to(weights[parameter].dtype)), key
    assert torch.equal(weights["head.weight"], weights["embed.weight"])


def test_names_are_mapped(made: Path, tmp_path: Path) -> None:
    weights = {
        key.partition("/")[2]: value
        for key, value in load_file(made / "fsdp2-weights" / "expected.safetensors").items()
        if not key.startswith("exp_avg")
    }
    save_file(
        {f"module._orig_mod.{name}": value for name, value in weights.items()}, tmp_path / "a.safetensors"
    )
    save_file({f"net.{name}": value for name, value in weights.items()}, tmp_path / "b.safetensors")
    wrapped = run_ranks(1, _weights, str(tmp_path / "a.safetensors"), 2, {})[0]
    mapped = run_ranks(1, _weights, str(tmp_path / "b.safetensors"), 2, {"rename": {"net.": ""}})[0]
    for name, value in weights.items():
        assert torch.equal(wrapped[name], value)
        assert torch.equal(mapped[name], value)


def _refusal(path: str, arguments: dict[str, Any]) -> str:
    _, zero = _optimizer(2)
    with pytest.raises((CheckpointError, UsageError)) as caught:
        zerokit.load(path, zero, **arguments)
    return str(caught.value)


def test_what_does_not_fit_is_said(made: Path, tmp_path: Path) -> None:
    weights = str(made / "fsdp2-safetensors")
    assert "weights_only=True" in run_ranks(1, _refusal, weights, {})[0]
    assert (
        "missing in the checkpoint"
        in run_ranks(1, _refusal, weights, {"weights_only": True, "rename": {"blocks.": "layers."}})[0]
    )
    ours = zerokit.convert(made / "fsdp2-plain", tmp_path / "ours", format="zerokit")
    assert (
        "rename applies to other frameworks"
        in run_ranks(1, _refusal, str(ours.path), {"rename": {"a": "b"}})[0]
    )
    untied = load_file(made / "fsdp2-weights" / "expected.safetensors")
    untied = {key.partition("/")[2]: value for key, value in untied.items() if not key.startswith("exp_avg")}
    save_file(untied | {"head.weight": untied["embed.weight"] + 1}, tmp_path / "untied.safetensors")
    refused = run_ranks(1, _refusal, str(tmp_path / "untied.safetensors"), {"weights_only": True})[0]
    assert "tied in the model, but differ here" in refused


def test_a_damaged_source_leaves_no_silent_state(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "deepspeed-2-fp32", tmp_path / "bad"))
    path = next(folder.rglob("*rank_1_mp*optim*"))
    source = open_source(folder)
    assert isinstance(source, ForeignCheckpoint)
    stretch = next(
        stretch
        for stored in source.described.parameters
        for stretch in stored.streams.get("exp_avg", stored.streams.get("param")).stretches  # type: ignore[union-attr]
        if source.file_path(stretch.file) == path
    )
    flip(path, stretch.offset)
    assert "damaged" in run_ranks(2, _refusal, str(folder), {})[0]


def _llama(folder: str) -> bool:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    zero = zerokit.ZeroOptimizer(
        model, torch.optim.AdamW, stage=3, precision="fp32", init_fn=model._init_weights
    )
    zerokit.load(folder, zero, weights_only=True)
    tokens = torch.arange(12).reshape(2, 6)
    expected = LlamaForCausalLM.from_pretrained(folder)(tokens).logits
    return torch.equal(model(tokens).logits, expected)


def test_a_transformers_model_on_meta_takes_its_folder(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "one")
    LlamaForCausalLM(config).save_pretrained(tmp_path / "many", max_shard_size="20kB")
    assert run_each(2, _llama, [str(tmp_path / "one"), str(tmp_path / "many")]) == [[True, True]] * 2
