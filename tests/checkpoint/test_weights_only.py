"""Checkpoints of weights, and weights out of any checkpoint: exact, at any world size, and nothing else touched."""

from __future__ import annotations

import json
import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zerokit
from tests.cli.commands import zerokit as command
from tests.support.checkpoints import (
    example_content,
    example_extra,
    example_layout,
    sealed,
    weights_of,
    write_checkpoint,
    write_run,
)
from tests.support.distributed import run_ranks
from tests.support.models import CASES
from tests.support.training import Run, Trajectory, build_seeded, one_step, wrap
from zerokit.checkpoint.load import load
from zerokit.checkpoint.save import save
from zerokit.placement import stage_of

EXTRA = {"note": "kept", "table": torch.arange(3)}


def _saved(directory: str, name: str, run: Run, steps: int = 2) -> None:
    case = CASES[name]
    model = build_seeded(case, 0)
    zero = wrap(model, case, run)
    for step in range(steps):
        one_step(model, zero, case, run, step, Trajectory())
    save(os.path.join(directory, "whole"), zero, step=steps, extra=EXTRA)
    save(os.path.join(directory, "weights"), zero, step=steps, extra=EXTRA, weights_only=True)


def weights(path: str | Path) -> dict[str, bytes]:
    """Every parameter in the precision of the file, and every buffer, as bytes."""
    checkpoint = zerokit.Checkpoint(path)
    found = {}
    for stream in checkpoint.streams:
        if stream.kind in ("master", "param"):
            for place in stream.parameters:
                name = checkpoint.names[place]
                found[name] = checkpoint.read(stream.kind, name).tobytes()
    for name in checkpoint.common_names:
        if name.startswith("buffers/"):
            found[name] = bytes(checkpoint.common_tensor(name)[2])
    return found


def _state(zero: zerokit.ZeroOptimizer) -> str:
    """Everything of this rank's that weights are not."""
    state = [
        {kind: value.tolist() if isinstance(value, torch.Tensor) else value for kind, value in entry.items()}
        for entry in zero.state.values()
    ]
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in zero.param_groups
    ]
    drawn = (torch.get_rng_state().tolist(), random.getstate())
    scale = None if zero.scaler is None else (zero.scaler.value, zero.scaler.good_steps)
    return str((state, groups, drawn, scale))


def _take(directory: str, name: str, run: Run) -> list[Any]:
    """Load the weights from both kinds of checkpoint into an optimizer that has made a step, and save it whole."""
    case, found = CASES[name], []
    for source in ("whole", "weights"):
        model = build_seeded(case, 5)
        zero = wrap(model, case, run)
        one_step(model, zero, case, run, 0, Trajectory())
        zero.param_groups[0]["lr"] = 0.125
        before = _state(zero)
        extra = load(os.path.join(directory, source), zero, weights_only=True)
        assert _state(zero) == before
        assert (extra["note"], extra["table"].tolist()) == ("kept", [0, 1, 2])
        save(os.path.join(directory, f"again-{source}"), zero, step=3, overwrite=True)
        trajectory = Trajectory()
        one_step(model, zero, case, run, 1, trajectory)
        found.append(trajectory.losses)
    return found


@pytest.mark.parametrize(
    ("name", "precision"), [("tiny_parameters", "fp16"), ("lora", "bf16"), ("resnet", "fp32")]
)
def test_weights_are_exact_at_any_world_size_and_nothing_else_changes(
    tmp_path: Path, name: str, precision: str
) -> None:
    run_ranks(2, _saved, str(tmp_path), name, Run(stage=2, precision=precision))
    wanted = weights(tmp_path / "whole")
    assert weights(tmp_path / "weights") == wanted
    for world, stage in ((3, 3), (1, 0)):
        for first, second in run_ranks(
            world, _take, str(tmp_path), name, Run(stage=stage, precision=precision)
        ):
            assert first == second
        for again in ("again-whole", "again-weights"):
            assert weights(tmp_path / again) == wanted
            assert not zerokit.inspect(tmp_path / again).weights_only


def test_the_file_has_weights_and_nothing_else(tmp_path: Path) -> None:
    run_ranks(2, _saved, str(tmp_path), "lora", Run(stage=3, precision="bf16"))
    checkpoint = zerokit.Checkpoint(tmp_path / "weights")
    assert checkpoint.weights_only
    assert {(stream.kind, stream.dtype) for stream in checkpoint.streams} == {
        ("master", "float32"),
        ("param", "bfloat16"),
    }
    assert not [name for name in checkpoint.common_names if not name.startswith(("buffers/", "extra"))]
    assert set(checkpoint.extra_plain()) == {"step", "user"}
    manifest = json.loads((checkpoint.path / "manifest.json").read_text())
    assert (manifest["version"], manifest["content"]) == ([1, 1], "weights")
    whole = json.loads((zerokit.Checkpoint(tmp_path / "whole").path / "manifest.json").read_text())
    assert whole["version"] == [1, 0]
    assert "content" not in whole


# --- loading -----------------------------------------------------------------------------------------------


def _refused(directory: str, source: str) -> str:
    """A full load of weights: refused on every rank, and nothing changes."""
    case, run = CASES["gpt"], Run(stage=3)
    model = build_seeded(case, 0)
    zero = wrap(model, case, run)
    before = _state(zero)
    with pytest.raises(zerokit.CheckpointError) as caught:
        load(os.path.join(directory, source), zero)
    assert (zero.refusal, _state(zero)) == ("", before)
    one_step(model, zero, case, run, 0, Trajectory())
    return str(caught.value)


def test_loading_weights_as_a_whole_state_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    run_ranks(2, _saved, str(tmp_path), "gpt", Run(stage=1), 1)
    step = tmp_path / "weights" / "step-00000001"
    for message in run_ranks(2, _refused, str(tmp_path), "weights"):
        assert "step-00000001 was saved with weights_only=True" in message
        assert f'zerokit.load("{step.parent}", optimizer, weights_only=True)' in message
    for message in run_ranks(2, _refused, str(step.parent), step.name):
        assert message.startswith(f"{step}: was saved with weights_only=True")
        assert f'zerokit.load("{step}", optimizer, weights_only=True)' in message


def test_beside_whole_ones_the_newest_whole_one_is_named_and_taken(tmp_path: Path) -> None:
    run_ranks(2, _mixed, str(tmp_path / "run"))
    for message in run_ranks(2, _refused, str(tmp_path / "run"), "step-00000004"):
        assert f'zerokit.load("{tmp_path / "run" / "step-00000002"}", optimizer)' in message
    assert run_ranks(2, _newest, str(tmp_path / "run")) == [(2, 4)] * 2
    assert zerokit.Checkpoint(tmp_path / "run").step == 4


def _newest(directory: str) -> tuple[int, int]:
    """The steps that a load of the whole state takes, and one of weights."""
    case = CASES["gpt"]
    zero = wrap(build_seeded(case, 0), case, Run(stage=3))
    return load(directory, zero), load(directory, zero, weights_only=True)


def _mixed(directory: str) -> None:
    case = CASES["gpt"]
    zero = wrap(build_seeded(case, 0), case, Run(stage=1))
    for step in (1, 2, 3, 4):
        save(directory, zero, step=step, extra=step, weights_only=step > 2)


def _model(frozen: str, stage: int, *, value: float) -> tuple[nn.Module, zerokit.ZeroOptimizer]:
    model = nn.Sequential(nn.Linear(10, 30), nn.Linear(30, 10))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) * value + number)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    return model, zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=stage_of(stage), precision="fp32")


def _swap(directory: str, stage: int) -> bool:
    """The layer that was frozen is trained now, and the other way round."""
    first, source = _model("0", stage, value=0.25)
    save(directory, source, step=1, weights_only=True)
    second, zero = _model("1", stage, value=7.0)
    with pytest.raises(zerokit.CheckpointError, match="weights_only=True"):
        load(directory, zero)
    load(directory, zero, weights_only=True)
    with source.gathered(), zero.gathered():
        equal = all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    zero.backward(second(torch.ones(2, 10)).sum())
    zero.step()
    with zero.gathered():
        changed = {
            name for name, p in second.named_parameters() if not torch.equal(p, _of(first, source, name))
        }
    return equal and changed == {"0.weight", "0.bias"}


def _of(model: nn.Module, optimizer: zerokit.ZeroOptimizer, name: str) -> torch.Tensor:
    with optimizer.gathered():
        return model.get_parameter(name).detach().clone()


def _swap_at_every_stage(directory: str) -> list[bool]:
    return [_swap(os.path.join(directory, str(stage)), stage) for stage in range(4)]


def test_frozen_there_and_trained_here(tmp_path: Path) -> None:
    assert run_ranks(2, _swap_at_every_stage, str(tmp_path)) == [[True] * 4] * 2


def _fits_in_part(directory: str) -> tuple[list[str], bool]:
    _, source = _model("none", 3, value=0.5)
    save(directory, source, step=1)
    model = nn.Sequential(nn.Linear(10, 30), nn.Linear(30, 11))
    zero = zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=3, precision="fp32", lr=0.1)
    said = []
    with pytest.raises(zerokit.CheckpointError) as caught:
        load(directory, zero, weights_only=True)
    said.append(str(caught.value))
    if dist.get_rank() == 0:
        with pytest.warns(UserWarning, match="left as they were") as warned:
            load(directory, zero, weights_only=True, strict=False)
        said += [str(warning.message) for warning in warned]
    else:
        load(directory, zero, weights_only=True, strict=False)
    with zero.gathered():
        first = next(model.parameters())
        return said, torch.equal(first, torch.arange(300).reshape(30, 10) * 0.5)


def test_what_does_not_fit_is_named_or_left_out(tmp_path: Path) -> None:
    for said, taken in run_ranks(2, _fits_in_part, str(tmp_path)):
        assert taken
        assert all("1.weight is [10, 30] there and [11, 30] here" in text for text in said)
        assert "Build the model that was saved" in said[0]
        assert "SGD" not in said[0]  # another optimizer is no matter


def _lost(directory: str) -> list[str]:
    """What `step` says after a damaged load of one kind and a good load of another."""
    case, run = CASES["gpt"], Run(stage=2)
    found = []
    for damaged_weights, good_weights in ((False, True), (True, True), (True, False)):
        zero = wrap(build_seeded(case, 0), case, run)
        with pytest.raises(zerokit.CheckpointError):
            load(os.path.join(directory, "damaged"), zero, weights_only=damaged_weights)
        assert zero.refusal
        load(os.path.join(directory, "whole"), zero, weights_only=good_weights)
        found.append(zero.refusal)
    return found


def test_weights_do_not_make_up_for_a_lost_state(tmp_path: Path) -> None:
    run_ranks(2, _saved, str(tmp_path), "gpt", Run(stage=1), 1)
    shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
    step = zerokit.Checkpoint(tmp_path / "damaged")
    number, name = step.find("master", step.names[-1])
    rank = step.slice_checksums(number)[name][0][0]
    file = step.rank_file(rank)
    content = bytearray((step.path / file.name).read_bytes())
    content[file.by_name[number, name].offset] ^= 1
    (step.path / file.name).write_bytes(content)
    for first, second, third in run_ranks(2, _lost, str(tmp_path)):
        assert "the state is incomplete" in first
        assert (second, third) == ("", "")


# --- the offline tools -------------------------------------------------------------------------------------


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@settings(max_examples=25)
@given(old=st.integers(1, 9), new=st.integers(1, 9), seed=st.integers(0, 1000))
def test_resharding_is_what_the_other_ranks_would_have_saved(
    tmp_path_factory: pytest.TempPathFactory, old: int, new: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("weights")
    content = weights_of(example_content(example_layout(1), seed=seed))
    write_checkpoint(folder / "old", example_layout(old), content)
    write_checkpoint(folder / "new", example_layout(new), content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        found = zerokit.reshard(folder / "old", new, folder / "out")
    assert contents(found) == contents(folder / "new")
    assert zerokit.verify(found).intact
    assert zerokit.diff(found, folder / "old").same
    shutil.rmtree(folder)


def test_inspect_verify_consolidate_and_diff(tmp_path: Path) -> None:
    content = example_content(example_layout(1))
    values = dict(content.values)
    for key in values:
        values[key] = bytes(len(values[key]))
    content = replace(content, values=values, extra=example_extra(user={"note": 1}))
    slim = replace(weights_of(content), extra={"step": 100, "user": {"note": 1}})
    write_run(tmp_path / "whole", example_layout(2), content)
    write_run(tmp_path / "weights", example_layout(3), slim)
    assert zerokit.verify(tmp_path / "weights").intact
    assert zerokit.inspect(tmp_path / "weights").weights_only
    shown = command(tmp_path, "inspect", "weights")
    assert "step 100, 3 ranks, weights only" in shown.stdout
    for name in ("whole", "weights"):
        zerokit.consolidate(tmp_path / name, tmp_path / f"model-{name}")
    assert contents(tmp_path / "model-whole") == contents(tmp_path / "model-weights")
    found = zerokit.diff(tmp_path / "whole", tmp_path / "weights")
    assert [(one.stream, one.name, one.a, one.b) for one in found.differences] == [
        ("checkpoint", "content", "a whole state", "weights only")
    ]
    assert found.equal == len(slim.values)
    changed = dict(slim.values) | {("master", "gain"): b"\0\0\0\1"}
    write_run(tmp_path / "other", example_layout(3), replace(slim, values=changed))
    found = zerokit.diff(tmp_path / "whole", tmp_path / "other")
    assert [one.name for one in found.differences] == ["content", "gain"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"content": "adapters"}, "content is 'adapters', this zerokit knows 'weights': use a newer one"),
        ({"content": 7}, "expected str"),
        ({"content": "weights"}, "content is 'weights', but there is optimizer state: 'exp_avg'"),
    ],
)
def test_manifests_that_contradict_themselves(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    step = write_run(tmp_path / "run", example_layout(2), example_content(example_layout(1)))
    manifest = json.loads((step / "manifest.json").read_text())
    (step / "manifest.json").write_bytes(sealed(manifest | change))
    with pytest.raises(zerokit.CheckpointError, match=message):
        zerokit.Checkpoint(step)
