"""`zerokit.load` goes on where DeepSpeed and FSDP2 stopped, and they from what we wrote (`scripts/peers test`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import zerokit
from tests.formats.conftest import expected_bytes, held_bytes
from tests.formats.make_fixtures import STEPS, Model, groups, loss_of
from tests.support.checkpoints import flip
from tests.support.distributed import run_each
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


def _go_on(case: tuple[str, int, int, float | None]) -> list[float]:
    """The losses after the checkpoint, with the batches of the ranks that wrote it."""
    path, source_world, stage, clip = case
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


GO_ON = {
    1: [("deepspeed-1-fp32", 2, 3), ("fsdp2-titan", 2, 2), ("fsdp2-plain", 3, 1)],
    2: [("deepspeed-2-fp32", 4, 1), ("fsdp2-accelerate", 2, 3)],
    4: [("deepspeed-3-fp32", 4, 2)],
}
"""By world size: a folder, the number of ranks that wrote it, and the stage."""


@pytest.mark.parametrize("world", GO_ON)
def test_losses_go_on_as_the_framework_would(made: Path, world: int) -> None:
    # DeepSpeed clips at a norm of 1 by default.
    cases = [
        (str(made / name), source_world, stage, 1.0 if name.startswith("deepspeed") else None)
        for name, source_world, stage in GO_ON[world]
    ]
    for (name, _, _), (resumed, *_) in zip(GO_ON[world], run_each(world, _go_on, cases), strict=True):
        theirs = json.loads((made / name / "losses.json").read_text())[STEPS:]
        assert resumed == pytest.approx(theirs, rel=1e-5), name


def _weights(case: tuple[Path, dict[str, Any]]) -> dict[str, torch.Tensor]:
    path, arguments = case
    model, zero = _optimizer(3)
    zerokit.load(path, zero, weights_only=True, **arguments)
    with zero.gathered():
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def test_weights_alone_come_from_any_format_by_any_names(made: Path, tmp_path: Path) -> None:
    folders = [made / name for name in ("fsdp2-safetensors", "fsdp2-weights", "deepspeed-3-bf16")]
    weights = _weights_in(made / "fsdp2-weights")
    for file, prefix in (("a", "module._orig_mod."), ("b", "net.")):
        save_file({prefix + name: value for name, value in weights.items()}, tmp_path / f"{file}.safetensors")
    named = [(tmp_path / "a.safetensors", {}), (tmp_path / "b.safetensors", {"rename": {"net.": ""}})]
    found = [ranks[1] for ranks in run_each(2, _weights, [*((folder, {}) for folder in folders), *named])]
    for folder, loaded in zip(folders, found, strict=False):
        for key, value in load_file(folder / "expected.safetensors").items():
            kind, _, parameter = key.partition("/")
            if kind in ("master", "param", "buffer"):
                assert torch.equal(loaded[parameter], value.to(loaded[parameter].dtype)), key
        assert torch.equal(loaded["head.weight"], loaded["embed.weight"])
    for loaded in found[3:]:
        assert all(torch.equal(loaded[name], value) for name, value in weights.items())


def _weights_in(folder: Path) -> dict[str, torch.Tensor]:
    expected = load_file(folder / "expected.safetensors")
    return {key.partition("/")[2]: value for key, value in expected.items() if not key.startswith("exp_avg")}


def _refusal(case: tuple[Path, dict[str, Any]]) -> str:
    path, arguments = case
    _, zero = _optimizer(2)
    with pytest.raises((CheckpointError, UsageError)) as caught:
        zerokit.load(path, zero, **arguments)
    return str(caught.value)


def test_what_does_not_fit_is_said(made: Path, tmp_path: Path) -> None:
    weights = made / "fsdp2-safetensors"
    ours = zerokit.convert(made / "fsdp2-plain", tmp_path / "ours", format="zerokit")
    untied = _weights_in(made / "fsdp2-weights")
    save_file(untied | {"head.weight": untied["embed.weight"] + 1}, tmp_path / "untied.safetensors")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (weights, {}, "weights_only=True"),
        (weights, {"weights_only": True, "rename": {"blocks.": "layers."}}, "missing in the checkpoint"),
        (ours.path, {"rename": {"a": "b"}}, "rename applies to other frameworks"),
        (tmp_path / "untied.safetensors", {"weights_only": True}, "tied in the model, but differ here"),
    ]
    told = run_each(1, _refusal, [case[:2] for case in cases])
    for (said,), (_, _, expected) in zip(told, cases, strict=True):
        assert expected in said


def test_a_damaged_source_leaves_no_silent_state(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "deepspeed-2-fp32", tmp_path / "bad"))
    source = open_source(folder)
    assert isinstance(source, ForeignCheckpoint)
    stretch = source.described.parameters[0].streams["exp_avg"].stretches[0]
    flip(source.file_path(stretch.file), stretch.offset)
    assert "damaged" in run_each(2, _refusal, [(folder, {})])[0][0]


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


ROOT = Path(__file__).parents[2]


def _run(path: Path, world: int, *arguments: str) -> str:
    done = subprocess.run(
        [
            *(str(ROOT / ".peers/bin/torchrun"), "--standalone", "--nproc-per-node", str(world)),
            *(str(ROOT / "tests/formats/make_fixtures.py"), str(path), *arguments),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _resumed(path: Path, world: int, *arguments: str) -> list[float]:
    output = _run(path, world, *arguments)
    (line,) = (line for line in output.splitlines() if line.startswith("RESUMED "))
    losses: list[float] = json.loads(line.removeprefix("RESUMED "))
    return losses


@pytest.mark.peers
@pytest.mark.parametrize(
    ("name", "source_world", "world", "stage"),
    [("deepspeed-2-fp32", 4, 2, 2), ("deepspeed-2-fp32", 4, 2, 1), ("deepspeed-3-fp32", 4, 2, 3)],
)
def test_deepspeed_resumes_at_another_world(
    made: Path, tmp_path: Path, name: str, source_world: int, world: int, stage: int
) -> None:
    out = zerokit.reshard(made / name, world, tmp_path / "out")
    theirs = json.loads((made / name / "losses.json").read_text())[STEPS:]
    resumed = _resumed(out, world, "resume-deepspeed", str(stage), "fp32", str(source_world))
    assert resumed == pytest.approx(theirs, rel=1e-5)


@pytest.mark.peers
@pytest.mark.parametrize("world", [1, 2])
def test_fsdp2_resumes_at_another_world_by_way_of_zerokit(made: Path, tmp_path: Path, world: int) -> None:
    ours = zerokit.convert(made / "fsdp2-plain", tmp_path / "ours", format="zerokit", world=2)
    zerokit.convert(ours.path, tmp_path / "out", format="dcp", world=4)
    theirs = json.loads((made / "fsdp2-plain" / "losses.json").read_text())[STEPS:]
    assert _resumed(tmp_path / "out", world, "resume-fsdp2", "3") == pytest.approx(theirs, rel=1e-5)


@pytest.mark.peers
def test_accelerates_own_save_state_of_fsdp2_is_read_in_bits(tmp_path: Path) -> None:
    _run(tmp_path / "saved", 2, "accelerate")
    source = open_source(tmp_path / "saved")
    assert (source.format, source.world, source.step) == ("dcp", 2, STEPS)
    assert held_bytes(source) == expected_bytes(tmp_path / "saved")
    assert "not carried over: random_states_0.pkl, random_states_1.pkl" in source.notes[0]
