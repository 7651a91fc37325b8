"""Checkpoints of moments in eight bits: every cut, stage and home continues with the same bits."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch import nn

import zerokit
from tests.runtime.test_fp8 import CLASSES, _model, _optimizer, _train
from tests.support.crashes import read_tree
from tests.support.distributed import run_ranks
from tests.support.on_ranks import on_ranks
from tests.support.training import digest, whole_weights
from zerokit import ZeroOptimizer
from zerokit.checkpoint.load import load
from zerokit.checkpoint.reader import Checkpoint
from zerokit.checkpoint.save import save
from zerokit.errors import UsageError

SAVED, ENDED = 3, 6


def _ended(model: nn.Module, optimizer: ZeroOptimizer) -> tuple[list[str], str]:
    losses = _train(model, optimizer, range(SAVED, ENDED))
    with optimizer.gathered():
        return losses, digest(whole_weights(model).items())


def _save(classes: str, folder: str, stage: Any, precision: str) -> tuple[list[str], str]:
    model = _model()
    optimizer = _optimizer(model, stage, classes, precision=precision)
    _train(model, optimizer, range(SAVED))
    save(f"{folder}/run", optimizer, step=SAVED)
    save(f"{folder}/background", optimizer, step=SAVED, blocking=False).wait()
    return _ended(model, optimizer)


def _resume(classes: str, folder: str, stages: list[Any], precision: str) -> list[tuple[list[str], str]]:
    found = []
    for number, stage in enumerate(stages):
        model = _model()
        optimizer = _optimizer(model, stage, classes, precision=precision)
        load(f"{folder}/run", optimizer)
        save(f"{folder}/again-{dist.get_world_size()}-{number}", optimizer, step=SAVED)
        found.append(_ended(model, optimizer))
    return found


@pytest.mark.full(default=["adamw-fp32"])
@pytest.mark.parametrize(("classes", "precision"), [*product(CLASSES, ["fp32"]), ("both", "bf16")])
def test_four_ranks_save_and_others_go_on_with_the_same_bits(
    classes: str, precision: str, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    expected = run_ranks(4, _save, classes, folder, 2, precision)[0]
    found = run_ranks(2, _resume, classes, folder, [0, 1, 3], precision)[0]
    found += run_ranks(4, _resume, classes, folder, [(0, 3), (1, 2), 3], precision)[0]
    assert all(each == expected for each in found)

    run = tmp_path / "run" / "step-00000003"
    assert zerokit.verify(run).intact
    assert read_tree(tmp_path / "background") == read_tree(tmp_path / "run")
    for path in tmp_path.glob("again-*"):
        assert zerokit.diff(run, path).same
    assert read_tree(tmp_path / "again-4-2") == read_tree(tmp_path / "run")
    zerokit.reshard(run, 3, tmp_path / "three")
    zerokit.reshard(tmp_path / "three", 4, tmp_path / "four")
    assert read_tree(tmp_path / "four") == read_tree(run)
    kinds = {stream.kind: (stream.dtype, stream.block) for stream in Checkpoint(run).streams}
    moments = {kind for kind in kinds if f"{kind}.scale" in kinds}
    assert moments
    assert all(kinds[kind][0].startswith("float8") for kind in moments)
    assert all(kinds[f"{kind}.scale"] == ("float32", 64) for kind in moments)
    assert kinds["master"] == ("float32", 1)


def _saved_without_codes(folder: str, states: str) -> None:
    model = _model()
    optimizer = _optimizer(model, 2, "adamw", states)
    load(f"{folder}/run", optimizer)
    save(f"{folder}/in-{Path(states).name}", optimizer, step=SAVED)


def test_runs_without_codes_have_what_they_stand_for(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    run_ranks(2, _save, "adamw", str(tmp_path), 2, "fp32")
    for states in "device", str(tmp_path / "disk"):
        run_ranks(3, _saved_without_codes, str(tmp_path), states)
    coded, plain = Checkpoint(tmp_path / "run"), Checkpoint(tmp_path / "in-device")
    assert read_tree(tmp_path / "in-disk") == read_tree(tmp_path / "in-device")
    assert {stream.block for stream in plain.streams} == {1}
    for name, kind in product(coded.names, ("exp_avg", "exp_avg_sq")):
        values = coded.read(kind, name)
        assert values.shape == coded.shapes[name]
        assert np.array_equal(values, plain.read(kind, name))
        assert coded.read(f"{kind}.scale", name).shape == (-(-values.size // 64),)
        assert np.isfinite(values).all()
        assert values.any()
    # And back: what was decoded has the same codes.
    run_ranks(2, _back, str(tmp_path))
    assert zerokit.diff(tmp_path / "back", tmp_path / "run").same


def _back(folder: str) -> None:
    model = _model()
    optimizer = _optimizer(model, 3, "adamw")
    load(f"{folder}/in-device", optimizer)
    save(f"{folder}/back", optimizer, step=SAVED)


@on_ranks(2)
def test_states_that_were_never_codes_are_encoded(tmp_path: Path) -> None:
    model = _model()
    optimizer = _optimizer(model, 2, "adamw", "device")
    _train(model, optimizer, range(SAVED))
    save(tmp_path / "run", optimizer, step=SAVED)
    states = []
    for stage in (1, 3):
        other = _model()
        coded = _optimizer(other, stage, "adamw")
        load(tmp_path / "run", coded)
        states.append(_ended(other, coded))
        assert coded.memory().optimizer < optimizer.memory().optimizer / 3
    assert states[0] == states[1]


def test_other_formats_refuse_codes(tmp_path: Path) -> None:
    run_ranks(2, _save, "adamw", str(tmp_path), 2, "fp32")
    with pytest.raises(
        UsageError, match="has states in fp8, which DCP has no form for: load it into a run with"
    ):
        zerokit.convert(tmp_path / "run", tmp_path / "dcp", format="dcp")
    for stream in ("exp_avg", "exp_avg.scale"):
        with pytest.raises(
            UsageError, match="is codes of a state, or scales: expected weights or an average"
        ):
            zerokit.consolidate(tmp_path / "run", tmp_path / "weights", stream=stream)
    assert not (tmp_path / "dcp").exists()
    zerokit.consolidate(tmp_path / "run", tmp_path / "weights")
    assert (tmp_path / "weights" / "model.safetensors").exists()
    summary = {each.kind: each for each in zerokit.inspect(tmp_path / "run").streams}
    assert summary["exp_avg"].bytes == summary["exp_avg"].numel == summary["master"].numel
    assert summary["exp_avg.scale"].numel == sum(-(-p.numel() // 64) for p in _model().parameters())


@on_ranks(2, cases=(1, 3))
def test_averages_and_frozen_parameters_come_back(stage: int, tmp_path: Path) -> None:
    model = _model()
    optimizer = _optimizer(model, stage, "adamw")
    average = zerokit.Ema(optimizer, 0.9)
    for step in range(SAVED):
        if step == 1:
            model[1][0].bias.requires_grad_(False)  # type: ignore[index]
        _train(model, optimizer, range(step, step + 1))
        average.update()
    save(tmp_path / f"run-{stage}", optimizer, step=SAVED)
    other = _model()
    again = _optimizer(other, 4 - stage, "adamw")
    zerokit.Ema(again, 0.9)
    load(tmp_path / f"run-{stage}", again)
    save(tmp_path / f"again-{stage}", again, step=SAVED)
    assert zerokit.diff(tmp_path / f"run-{stage}", tmp_path / f"again-{stage}").same
    kinds = {each.kind: each.dtype for each in Checkpoint(tmp_path / f"run-{stage}").streams}
    assert kinds["ema"] == "float32"
    model[1][0].bias.requires_grad_(True)  # type: ignore[index]
    assert _ended(model, optimizer) == _ended(other, again)
