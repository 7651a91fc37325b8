"""Saving and loading when something is wrong: every rank says so, nothing half done is left or used."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.checkpoints import flip, with_extra
from tests.support.distributed import run_ranks
from tests.support.models import CASES
from tests.support.optimizers import OPTIMIZERS
from tests.support.saving import in_turn
from tests.support.training import Run, Trajectory, build_seeded, digest, one_step, whole_weights, wrap
from zerokit.checkpoint.disk import new_file, read_exactly
from zerokit.checkpoint.load import load
from zerokit.checkpoint.save import save

CASE = CASES["gpt_groups"]


def _refused_saves(directory: str) -> None:
    rank = dist.get_rank()
    zero = wrap(build_seeded(CASE, 0), CASE, Run(stage=3))
    own = Path(tempfile.mkdtemp())

    def refused(expected: str, run: Any = "run", *, step: Any = 1, kind: Any = None, **options: Any) -> None:
        with pytest.raises(kind or zerokit.CheckpointError, match=re.escape(expected)):
            save(run and f"{directory}/{run}", zero, step=step, **options)

    def full(*arguments: Any) -> None:
        raise zerokit.CheckpointError("the disk is full")

    def elsewhere(path: Path, size: int) -> Any:
        return new_file(own / path.name, size)

    for wrong in (-1, 1.5, True, "7"):
        refused("step=", step=wrong, kind=zerokit.UsageError)
        refused("rank 1: step=", step=wrong if rank else 3, kind=zerokit.UsageError)
    refused("step differs between ranks: 1 on rank 0; 2 on rank 1", step=1 + rank)
    runs = f"'{directory}/run0' on rank 0; '{directory}/run1' on rank 1"
    refused(f"the run directory differs between ranks: {runs}", f"run{rank}")
    refused("overwrite differs between ranks: False on rank 0; True on rank 1", overwrite=rank == 1)
    zero.param_groups[0]["lr"] = 0.5 + rank  # a scheduler that one rank forgot
    refused("option 'lr' of parameter group 0 differs between ranks: 0.5 on rank 0; 1.5 on rank 1")
    zero.param_groups[0]["lr"] = 0.5
    refused("nested", extra={"nested": [1, {"here": print}]})
    refused("file", "file")
    refused("rank 1: TypeError: ", None if rank else "run")
    # As on a node with a disk of its own: what is written there is not where rank 0 looks.
    with patch("zerokit.checkpoint.save.new_file", elsewhere if rank else new_file):
        refused("not shared between the nodes")
    with patch("zerokit.checkpoint.save.write_exactly", full) if rank else contextlib.nullcontext():
        refused("rank 1: the disk is full")
    assert rank or not [path for path in Path(directory).rglob("*") if path.name not in ("file", "run")]
    save(f"{directory}/run", zero, step=7)
    refused("already saved", step=7)
    for place in ("step-00000007", "step-00000007/inner"):
        for overwrite in (False, True):
            refused(f'zerokit.save("{directory}/run", optimizer', f"run/{place}", overwrite=overwrite)
    assert zerokit.verify(f"{directory}/run").intact


def test_what_cannot_be_saved_is_refused_everywhere_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    run_ranks(2, _refused_saves, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "run"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["latest", "step-00000007"]


RANK = [f"rank-0000{rank}-of-00003.safetensors" for rank in range(3)]
FAULTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "data": (RANK[1], lambda path: flip(path, -100)),
    "header": (RANK[2], lambda path: flip(path, 40)),
    "manifest": ("manifest.json", lambda path: flip(path, 300)),
    "extra": ("extra.json", lambda path: flip(path, 9)),
    "common": ("common.safetensors", lambda path: flip(path, -3)),
    "missing file": (RANK[1], Path.unlink),
}
OPTIONS = {"lr": 9.0}
# Well sealed and wrong.
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "1": ({"groups": [OPTIONS | {"params": []}, OPTIONS]}, "'groups'[0] has the member 'params'"),
    "5": ({"rng": {"world": 5, "seed": 0, "step": 0}}, "expected uint8 [5, bytes]"),
}
UNFIT = {
    "another optimizer": "momentum_buffer",
    "one group": "parameter groups",
    "another width": "norm.weight",
    "frozen": "frozen",
}


def _damaged(folder: str) -> None:
    """`load` names the file, and either nothing has changed or a step is refused."""
    found, model, run = set(), build_seeded(CASE, 0), Run(stage=3)
    zero = wrap(model, CASE, run)
    for fault, (file, _) in FAULTS.items():
        before = digest(whole_weights(model).items())
        with pytest.raises(zerokit.CheckpointError, match=re.escape(file)):
            load(f"{folder}/{fault}/run", zero)
        if zero.refusal:
            with pytest.raises(zerokit.UsageError):
                one_step(model, zero, CASE, run, 0, Trajectory())
        else:
            assert digest(whole_weights(model).items()) == before, fault
        # A good load makes it usable again.
        load(f"{folder}/run", zero)
        one_step(model, zero, CASE, run, 2, Trajectory())
        found.add(digest(whole_weights(model).items()))
    assert len(found) == 1


def _hostile(folder: str) -> None:
    """Members of `extra.json` are refused before anything changes."""
    zero = wrap(build_seeded(CASE, 0), CASE, Run(stage=2))
    before = [list(group["params"]) for group in zero.runtime.inner.param_groups]
    rates = [group["lr"] for group in zero.param_groups]
    for name, (_, expected) in HOSTILE.items():
        with pytest.raises(zerokit.CheckpointError, match=re.escape(expected)):
            load(os.path.join(folder, name), zero)
        assert zero.refusal == ""
    for ours, group in zip(before, zero.runtime.inner.param_groups, strict=True):
        assert all(a is b for a, b in zip(ours, group["params"], strict=True))
    assert rates == [group["lr"] for group in zero.param_groups]
    load(f"{folder}/run", zero)


def _unfit(folder: str) -> None:
    """What does not fit is refused by name before anything changes."""
    for what, expected in UNFIT.items():
        model = build_seeded(CASE, 0)
        if what == "another width":
            model.norm = nn.LayerNorm(7)
        if what == "frozen":
            next(model.parameters()).requires_grad_(False)
        assert CASE.groups is not None
        groups: list[Any] = list(CASE.groups(model) if what == "another optimizer" else model.parameters())
        cls, options = OPTIMIZERS["momentum" if what == "another optimizer" else "adamw"]
        trained = [p for p in groups if not isinstance(p, torch.Tensor) or p.requires_grad]
        zero = zerokit.ZeroOptimizer(model, cls, stage=2, precision="fp32", params=trained, **options)
        with pytest.raises(zerokit.CheckpointError, match=expected):
            load(f"{folder}/run", zero)
        assert zero.refusal == ""


def _of_another_optimizer(folder: str) -> None:
    """Its states begin anew."""
    for stage in (0, 3):
        model = build_seeded(CASE, 0)
        zero = zerokit.ZeroOptimizer(model, torch.optim.Adamax, stage=stage, precision="fp32")
        warns: Any = pytest.warns(UserWarning, match=r"\(Adamax\) keeps exp_avg, exp_inf")
        with contextlib.nullcontext() if dist.get_rank() else warns:
            load(f"{folder}/run", zero, strict=False)
        assert not any(zero.state.values())
        one_step(model, zero, CASE, Run(), 0, Trajectory())


def _untied(folder: str) -> None:
    """Weights that were tied each take the saved values and states."""

    def built(*, tied: bool) -> tuple[nn.Module, zerokit.ZeroOptimizer]:
        model = nn.Sequential(nn.Embedding(33, 40), nn.Linear(40, 33, bias=False))
        if tied:
            model[1].weight = model[0].weight
        zero = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=3, precision="fp32", bucket_mb=1e-6)
        zero.backward(model(torch.arange(33)).square().sum())
        zero.step()
        return model, zero

    model, zero = built(tied=True)
    save(f"{folder}/tied", zero, step=1)
    apart, other = built(tied=False)
    load(f"{folder}/tied", other)
    saved, found = whole_weights(model)["0.weight"], whole_weights(apart)
    assert torch.equal(found["0.weight"], saved)
    assert torch.equal(found["1.weight"], saved)


def _bytes_read(folder: str) -> None:
    """A rank reads its own intervals only."""
    for stage in range(4):
        zero, read = wrap(build_seeded(CASE, 0), CASE, Run(stage=stage)), 0

        def counting(fd: int, buffers: Any, offset: int, where: Any) -> None:
            nonlocal read
            read += sum(memoryview(buffer).nbytes for buffer in buffers)
            read_exactly(fd, buffers, offset, where)

        with patch("zerokit.checkpoint.requests.read_exactly", counting):
            load(f"{folder}/run", zero)
        own = sum(unit.payload_within(unit.shard(dist.get_rank())) for unit in zero.layout.units)
        whole = sum(unit.payload_numel for unit in zero.layout.units)
        assert read == 4 * 3 * (own if stage else whole), stage


def test_loads_of_what_is_damaged_hostile_or_does_not_fit(tmp_path: Path) -> None:
    """Loads copies of a run, each with one fault, and steps whose checksums are right but whose content is wrong."""
    run_ranks(3, _saved, str(tmp_path))
    for name, (file, damage) in FAULTS.items():
        shutil.copytree(tmp_path / "run", tmp_path / name / "run")
        damage(tmp_path / name / "run" / "step-00000002" / file)
    for name, (change, _) in HOSTILE.items():
        shutil.copytree(tmp_path / "run" / "step-00000002", tmp_path / name)
        with_extra(tmp_path / name, change)
    works = [_damaged, _hostile, _unfit, _of_another_optimizer, _untied, _bytes_read]
    run_ranks(2, in_turn, works, str(tmp_path), apart=False)


def _saved(directory: str) -> None:
    model, run = build_seeded(CASE, 0), Run(stage=2)
    zero = wrap(model, CASE, run)
    for step in (0, 1):
        one_step(model, zero, CASE, run, step, Trajectory())
    save(f"{directory}/run", zero, step=2)
