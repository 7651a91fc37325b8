"""`diff` between a run and its export: the same weights or not, also where the export is rounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zerokit
from tests.support.checkpoints import flip
from tests.support.distributed import run_ranks
from zerokit.checkpoint import diff as differences


def _train(folder: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(13, 5), nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 13, bias=False)
    )
    model[3].weight = model[0].weight
    model[1].bias.requires_grad_(False)
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=3, precision="bf16", lr=0.1)
    for step in (1, 2):
        tokens = torch.arange(step, step + 8) % 13
        optimizer.backward(nn.functional.cross_entropy(model(tokens).float(), tokens))
        optimizer.step()
        optimizer.zero_grad()
        zerokit.save(folder, optimizer, step=step)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_ranks(2, _train, str(folder))
    return folder


@pytest.mark.parametrize("dtype", [None, "fp32", "bf16", "fp16"])
def test_an_export_has_the_runs_weights(
    run: Path, tmp_path: Path, dtype: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differences, "_PART_NUMEL", 7)
    model = zerokit.consolidate(run, tmp_path / "model", dtype=dtype)
    for sides in ((run, model), (model, run), (zerokit.reshard(run, 3, tmp_path / "three"), model)):
        found = zerokit.diff(*sides)
        assert found.same, found.differences
        # Two Linear's, one Embedding that is tied, BatchNorm's two and its two buffers of floats and one of integers.
        assert (found.weights, found.equal) == (True, 8)
        # The masters are fp32, and the frozen bias is bf16.
        assert found.rounded == {None: 1, "fp32": 1, "bf16": 6, "fp16": 7}[dtype]
    (changed,) = (
        found for found in zerokit.diff(run / "step-00000001", model).differences if found.name == "1.weight"
    )
    assert (changed.stream, changed.change) == ("weights", "changed")


def test_other_weights_missing_ones_and_damage_are_told(run: Path, tmp_path: Path) -> None:
    file = zerokit.consolidate(run, tmp_path / "model", dtype="bf16") / "model.safetensors"
    tensors = load_file(file)
    changes: tuple[tuple[str, Callable[[Tensor], Tensor]], ...] = (
        ("1.weight", lambda one: one + 0.125 * (torch.arange(one.numel()) == 3).reshape(one.shape)),
        ("2.num_batches_tracked", lambda one: one + 1),
        ("2.running_mean", lambda one: one[:4].clone()),
    )
    for name, change in changes:
        save_file(tensors | {name: change(tensors[name])}, file)
        (found,) = zerokit.diff(run, tmp_path / "model").differences
        assert (found.name, found.change) == (name, "changed")
    save_file({name: one for name, one in tensors.items() if name != "1.bias"}, file)
    (found,) = zerokit.diff(run, tmp_path / "model").differences
    assert (found.name, found.change, found.a) == ("1.bias", "removed", "bfloat16 [5]")
    save_file(tensors | {"more": torch.ones(2)}, file)
    (found,) = zerokit.diff(run, tmp_path / "model").differences
    assert (found.name, found.change, found.b) == ("more", "added", "float32 [2]")
    save_file(tensors, file)
    assert zerokit.diff(run, tmp_path / "model").same
    rank = run / "step-00000002" / "rank-00000-of-00002.safetensors"
    content = rank.read_bytes()
    try:
        size = int.from_bytes(content[:8], "little")
        flip(rank, 8 + size)
        with pytest.raises(zerokit.CheckpointError, match="is damaged: see zerokit verify"):
            zerokit.diff(run, tmp_path / "model")
    finally:
        rank.write_bytes(content)


def test_weights_alone_of_two_runs_and_of_a_file_of_ddp(run: Path, tmp_path: Path) -> None:
    weights = zerokit.Checkpoint(run)
    state = {
        f"module.{name}": torch.from_numpy(weights.read("master", name)) for name in ("0.weight", "1.weight")
    }
    state |= {
        f"module.2.{name}": torch.from_numpy(weights.read("master", f"2.{name}"))
        for name in ("weight", "bias")
    }
    model = load_file(zerokit.consolidate(run, tmp_path / "model") / "model.safetensors")
    state |= {f"module.{name}": model[name] for name in model.keys() - {key[7:] for key in state}}
    state["module.3.weight"] = state["module.0.weight"]
    torch.save({"model": state}, tmp_path / "ddp.pt")
    assert zerokit.diff(run, tmp_path / "ddp.pt").same
    with pytest.warns(zerokit.ZerokitWarning, match="no place for random number generators"):
        zerokit.convert(run, tmp_path / "dcp", format="dcp", world=3)
    assert zerokit.diff(run, tmp_path / "dcp", weights=True).same
    whole = zerokit.diff(run, tmp_path / "dcp")  # states of generators have no place there
    assert {one.stream for one in whole.differences} <= {"common", "extra", "parameter"}
    assert "have different formats: --weights compares their weights alone" in whole.notes[-1]
    assert not zerokit.diff(run / "step-00000001", run, weights=True).same
    later = zerokit.diff(run, run, weights=True)
    assert (later.same, later.rounded) == (True, 0)
