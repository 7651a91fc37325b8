"""What a save takes beside tensors: as it is at the moment of the save, and only what `load` can read."""

from __future__ import annotations

import contextlib
import os
import shutil
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.distributed import run_ranks
from tests.support.models import CASES
from tests.support.saving import Held, in_turn
from tests.support.training import Run, Trajectory, build_seeded, one_step, wrap
from zerokit import files
from zerokit.checkpoint import plan as plan_module
from zerokit.checkpoint import run as run_module
from zerokit.checkpoint.load import load
from zerokit.checkpoint.save import save

CASE = CASES["gpt_groups"]


def _trained() -> zerokit.ZeroOptimizer:
    run = Run(stage=2)
    model = build_seeded(CASE, 0)
    zero = wrap(model, CASE, run)
    one_step(model, zero, CASE, run, 0, Trajectory())
    return zero


def _states(zero: zerokit.ZeroOptimizer) -> list[dict[Any, Any]]:
    return list(zero.runtime.inner.state.values())


def _changing(directory: str) -> None:
    """A background save holds values of its moment."""
    zero = _trained()
    for state in _states(zero):
        state |= {"history": [1], "seen": {"ids": {3, 4}}, "table": np.arange(3.0), "loss": float("nan")}
    disk = Held()
    with files.replaced(disk):
        with torch.device("meta"):  # a default device is not the host copy's
            saving = save(directory, zero, step=1, blocking=False)
        for state in _states(zero):
            state["history"].append(2)
            state["seen"]["ids"].add(5)
            state["table"] += 1
        disk.open.set()
        saving.wait()
    load(directory, zero)
    for state in _states(zero):
        assert state["history"] == [1]
        assert state["seen"] == {"ids": {3, 4}}
        assert state["table"].tolist() == [0.0, 1.0, 2.0]
        assert state["loss"] != state["loss"]  # NaN


def _unreadable(directory: str) -> None:
    """What load would refuse is refused before anything is written."""
    zero = _trained()
    with pytest.raises(zerokit.UsageError, match="step="):
        save(directory, zero, step=1_795_437_700_399_421_781)  # time.time_ns()
    with (
        patch("zerokit.checkpoint.writing.MAX_TEXT_BYTES", 20_000),
        pytest.raises(zerokit.CheckpointError, match=r"extra\.json would have \d+ bytes"),
    ):
        save(directory, zero, step=1, extra="x" * 20_000)
    kind: Any
    for kind, value in (
        ("master", torch.tensor(1.0)),
        ("master", 1.0),
        ("param", 1),
        (7, torch.tensor(1.0)),
        (7, 1),
    ):
        for state in _states(zero):
            state[kind] = value
        with pytest.raises(zerokit.CheckpointError, match=f"optimizer state {kind!r} cannot be saved"):
            save(directory, zero, step=1)
        for state in _states(zero):
            del state[kind]
    with (
        patch("zerokit.checkpoint.snapshot._scaler", lambda zero: {"value": "1.5", "good_steps": 0}),
        pytest.raises(zerokit.CheckpointError, match=r"cannot be saved: extra\.json: not valid: 'scaler'"),
    ):
        save(directory, zero, step=1)
    keep: Any
    for keep in (3, lambda step: 1 // 0):
        with pytest.raises(zerokit.UsageError, match="keep"):
            save(directory, zero, step=1, keep=keep)
    assert not os.path.exists(directory)
    save(directory, zero, step=1, keep=lambda step: True)
    load(directory, zero)


class _Odd(nn.Linear):
    def get_extra_state(self) -> int:
        return 1


def _odd_models(directory: str) -> None:
    """A state that is not saved is named, a buffer may repeat its elements, and a frozen copy is no tie."""
    optimizers: list[Any] = []
    for tied in (True, False):
        model: Any = nn.Sequential(_Odd(4, 4), nn.Linear(4, 4))
        model.register_buffer("places", torch.arange(4.0).expand(3, 4))
        model[1].weight = model[0].weight if tied else nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        optimizers.append((model, zerokit.ZeroOptimizer(model, torch.optim.SGD, precision="fp32")))
    (saved, zero), (model, other) = optimizers
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save(directory, zero, step=1)
    assert ["module '0' has a get_extra_state()" in str(one.message) for one in caught] == [True][
        dist.get_rank() :
    ]
    model.places[0, 0] = 5.0
    load(directory, other)
    assert model.places.tolist() == [[0.0, 1.0, 2.0, 3.0]] * 3
    with zero.gathered(), other.gathered():
        assert model[1].weight.equal(saved[0].weight)


def _pruned_meanwhile(directory: str) -> None:
    """A load beside a prune goes to the step that is there."""
    zero = _trained()
    for step in (1, 2, 3):
        save(directory, zero, step=step, extra=step)
    read = plan_module.read_extra

    def prune_and_read(checkpoint: Any, **options: Any) -> Any:
        dist.barrier()  # all have found the step
        if checkpoint.step == 3 and dist.get_rank() == 0:
            os.rename(f"{directory}/step-00000003", f"{directory}/gone")
            Path(f"{directory}/latest").unlink()
        dist.barrier()
        return read(checkpoint, **options)

    with patch.object(plan_module, "read_extra", prune_and_read), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no `latest`
        assert load(directory, zero) == 2
    if dist.get_rank():
        return
    os.rename(f"{directory}/gone", f"{directory}/step-00000003")
    sound = run_module.read_sound

    def prune_and_look(path: Path, **how: bool) -> Any:
        if path.name == "step-00000003" and not os.path.exists(f"{directory}/step-00000004"):
            os.rename(path, f"{directory}/step-00000004.tmp")
            os.rename(f"{directory}/step-00000001", f"{directory}/step-00000004")
        return sound(path, **how)

    with patch.object(run_module, "read_sound", prune_and_look):
        # Step 4's manifest is step 1's: so it is passed over, but it was looked at.
        assert "step-00000004" in "; ".join(run_module.find_step(Path(directory)).notes)


def _beside_another_job(directory: str) -> None:
    """Another job in the same run is noticed."""
    zero = _trained()
    save(directory, zero, step=1)
    save(directory, zero, step=2)
    save(f"{directory}-of-another-job", zero, step=9)
    if dist.get_rank() == 0:
        for name in ("step-00000009", "latest"):
            os.replace(f"{directory}-of-another-job/{name}", f"{directory}/{name}")
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save(directory, zero, step=10)
        save(directory, zero, step=11)
    texts = [str(one.message) for one in caught if issubclass(one.category, zerokit.ZerokitWarning)]
    assert len(texts) == (dist.get_rank() == 0)
    assert all(
        "another process has saved step-00000009 since this one saved step-00000002" in t for t in texts
    )


def _on_two_disks(directory: str) -> None:
    """Ranks that see different newest steps load nothing."""
    zero = _trained()
    save(directory, zero, step=1)
    save(directory, zero, step=2)
    before = [unit.kept.tensor.clone() for unit in zero.runtime.units]
    if dist.get_rank() == 1:  # a node that does not see the newest yet
        shutil.copytree(f"{directory}/step-00000001", f"{directory}-of-1/step-00000001")
    with pytest.raises(
        zerokit.CheckpointError,
        match=r"step-00000002 with the manifest [0-9a-f]{8} on rank 0; step-00000001 with the manifest .* on rank 1",
    ):
        load(f"{directory}-of-1" if dist.get_rank() else directory, zero)
    assert all(
        torch.equal(unit.kept.tensor, old) for unit, old in zip(zero.runtime.units, before, strict=True)
    )
    assert not zero.refusal


def _keeps_what_cannot_go(directory: str) -> None:
    """A step that cannot be removed fails no save."""

    class Denied(files.System):
        def rename(self, old: Path, new: Path) -> None:
            if old.name == "step-00000001":
                raise PermissionError(1, "Operation not permitted")
            super().rename(old, new)

    zero = _trained()
    save(directory, zero, step=1, keep_last=1)
    warns: Any = pytest.warns(zerokit.ZerokitWarning, match="step-00000002 is saved, but older .*removed")
    with files.replaced(Denied()), contextlib.nullcontext() if dist.get_rank() else warns:
        save(directory, zero, step=2, keep_last=1)
    assert zerokit.list_steps(directory) == [1, 2]


def test_what_is_taken_refused_and_chosen(tmp_path: Path) -> None:
    works = [_changing, _unreadable, _odd_models, _pruned_meanwhile, _beside_another_job, _on_two_disks]
    run_ranks(2, in_turn, [*works, _keeps_what_cannot_go], str(tmp_path))
