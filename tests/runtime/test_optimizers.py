"""Optimizers, schedulers and parameter groups: a real `torch.optim.Optimizer` in front of flat shards."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

import zerokit
from tests.runtime.test_parity import assert_equal_bits
from tests.support.distributed import run_alone, run_ranks
from tests.support.models import CASES
from tests.support.optimizers import OPTIMIZERS, SCHEDULERS
from tests.support.oracle import train_alone
from tests.support.training import (
    SMALL,
    Run,
    Trajectory,
    build_seeded,
    digest,
    one_step,
    train_all,
    whole_weights,
    wrap,
)
from zerokit.placement import stage_of


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stages_equal_one_process_in_bits(optimizer: str) -> None:
    """Stage 3 and another by turns, with parameter groups of different learning rates and weight decays."""
    run = Run(optimizer=optimizer, steps=5, clip=math.inf)
    alone = run_alone(train_alone, "gpt_groups", run, 2)
    others = list(OPTIMIZERS).index(optimizer) % 3
    runs = {f"stage {s}": replace(run, stage=s, bucket_mb=0.004 if s % 2 else SMALL) for s in (others, 3)}
    for rank, results in enumerate(run_ranks(2, train_all, "gpt_groups", runs)):
        for label, result in results.items():
            assert_equal_bits(result, alone[rank], f"{optimizer}, rank {rank}, {label} against one process")


@pytest.mark.parametrize(
    ("scheduler", "optimizer"), [*((name, "adamw") for name in SCHEDULERS), ("one_cycle", "momentum")]
)
def test_schedulers_drive_it_like_any_optimizer(scheduler: str, optimizer: str) -> None:
    """OneCycleLR also cycles the momentum or beta1 of every group."""
    plain = Run(optimizer=optimizer, steps=8, scheduler=scheduler, clip=0.5)
    other = (1, 0, 2)[list(SCHEDULERS).index(scheduler) % 3]
    runs = {"one": replace(plain, stage=other), "stage 3": replace(plain, stage=3)}
    alone = run_alone(train_alone, "gpt_groups", plain, 2)
    for rank, results in enumerate(run_ranks(2, train_all, "gpt_groups", runs)):
        assert_equal_bits(results["stage 3"], results["one"], f"rank {rank}")
        # The clipping coefficient's own rounding is not part of the oracle's promise.
        assert results["one"].losses == pytest.approx(alone[rank].losses, rel=2e-6)
        assert results["one"].norms == pytest.approx(alone[rank].norms, rel=2e-6)


EXTRA: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "adamax": (torch.optim.Adamax, {"lr": 2e-3}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2}),
    "radam": (torch.optim.RAdam, {"lr": 2e-3}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
    "nesterov": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True}),
}


def _losses(cls: type[torch.optim.Optimizer], options: dict[str, Any], stage: int) -> list[str]:
    case = CASES["mlp_10_64_2"]
    model = build_seeded(case, 0)
    optimizer = zerokit.ZeroOptimizer(
        model, cls, stage=stage_of(stage), precision="fp32", bucket_mb=SMALL, **options
    )
    trajectory = Trajectory()
    first, *_, last = list(model.children())
    # A unit gets its states later than the rest, and but for SGD a part of one, too.
    late = [*last.parameters(), *([] if cls is torch.optim.SGD else [first.weight])]
    for step in range(5):
        for parameter in late:
            parameter.requires_grad_(step > 1)
        one_step(model, optimizer, case, Run(), step, trajectory)
    assert trajectory.losses[0] != trajectory.losses[-1]
    return [loss.hex() for loss in trajectory.losses] + [digest(whole_weights(model).items())]


def _losses_of_all_stages(name: str) -> list[list[str]]:
    cls, options = EXTRA[name]
    return [_losses(cls, options, stage) for stage in range(4)]


@pytest.mark.parametrize("name", EXTRA)
def test_torchs_other_elementwise_optimizers(name: str) -> None:
    for stages in run_ranks(2, _losses_of_all_stages, name):
        assert stages == [stages[0]] * 4


def _surface() -> dict[str, Any]:
    case = CASES["gpt_groups"]
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, Run(stage=2))
    one_step(model, optimizer, case, Run(), 0, Trajectory())
    before = digest(whole_weights(model).items())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    one_step(model, optimizer, case, Run(), 1, Trajectory())
    frozen = digest(whole_weights(model).items())
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {
        "is_optimizer": isinstance(optimizer, torch.optim.Optimizer),
        "weight_decays": [group["weight_decay"] for group in optimizer.param_groups],
        "lrs": [group["lr"] for group in wrap_lrs()],
        "fused": [group["fused"] for group in optimizer.param_groups],
        "stopped": before == frozen,
        "state_keys_are_its_params": all(id(p) in held for p in optimizer.state),
        "kinds": sorted({kind for state in optimizer.state.values() for kind in state}),
        "default_lr": optimizer.defaults["lr"],
        "text": repr(optimizer),
    }


def wrap_lrs() -> list[dict[str, Any]]:
    case = CASES["gpt_groups"]
    return list(wrap(build_seeded(case, 0), case, Run(stage=3)).param_groups)


def test_its_surface_is_that_of_torchs_optimizers() -> None:
    for found in run_ranks(2, _surface):
        assert found["is_optimizer"]
        assert found["weight_decays"] == [0.0, 0.0]
        assert found["lrs"] == [3e-3, 2e-3]
        assert found["fused"] == [True, True], "fused is not chosen although torch offers it for AdamW"
        assert found["stopped"], "a learning rate of 0 set through param_groups did not reach the optimizer"
        assert found["state_keys_are_its_params"]
        assert found["kinds"] == ["exp_avg", "exp_avg_sq", "step"]
        assert found["default_lr"] == 3e-3
        assert "AdamW" in found["text"]


def _fused_by_choice(fused: bool) -> list[Any]:
    case = CASES["mlp_10_64_2"]
    optimizer = wrap(build_seeded(case, 0), case, Run(), fused=fused)
    return [group["fused"] for group in optimizer.param_groups]


@pytest.mark.parametrize("fused", [False, True])
def test_the_users_own_choice_of_fused_wins(fused: bool) -> None:
    assert run_ranks(1, _fused_by_choice, fused) == [[fused]]


def _outside_every_group(stage: int) -> tuple[bool, bool]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    head = model[1]
    try:
        optimizer = zerokit.ZeroOptimizer(
            model,
            torch.optim.SGD,
            params=[{"params": head.parameters()}],
            stage=stage_of(stage),
            precision="fp32",
            lr=0.1,
        )
    except zerokit.UsageError as error:
        return "0.weight" in str(error), True
    before = {name: value.clone() for name, value in whole_weights(model).items()}
    optimizer.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    after = whole_weights(model)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    return changed == ["1.weight", "1.bias"], False


@pytest.mark.parametrize("stage", [0, 3])
def test_a_trainable_parameter_in_no_group_stays_or_is_refused_by_name(stage: int) -> None:
    for right, _ in run_ranks(2, _outside_every_group, stage):
        assert right


def _resume_each(name: str) -> list[list[tuple[str, str]]]:
    return [_resume(stage, name) for stage in range(4)]


def _resume(stage: int, name: str) -> list[tuple[str, str]]:
    """Model and optimizer state dicts carry a run into new objects on the same ranks, scheduler included."""
    case, run = CASES["gpt_groups"], Run(stage=stage, optimizer=name)
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    scheduler = StepLR(optimizer, 2)
    first = Trajectory()
    for step in range(3):
        one_step(model, optimizer, case, run, step, first)
        scheduler.step()
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()), file)
    file.seek(0)
    weights, state, schedule = torch.load(file, weights_only=True)

    other = build_seeded(case, 5)
    resumed = wrap(other, case, run)
    later = StepLR(resumed, 2)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    later.load_state_dict(schedule)
    pairs = []
    for step in range(3, 6):
        one, two = Trajectory(), Trajectory()
        one_step(model, optimizer, case, run, step, one)
        one_step(other, resumed, case, run, step, two)
        scheduler.step()
        later.step()
        pairs.append((one.losses[0].hex(), two.losses[0].hex()))
    pairs.append((digest(whole_weights(model).items()), digest(whole_weights(other).items())))
    return pairs


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_state_dicts_resume_a_run_bit_for_bit(name: str) -> None:
    for stages in run_ranks(2, _resume_each, name):
        for stage, pairs in enumerate(stages):
            assert all(one == two for one, two in pairs), f"stage {stage}: {pairs}"
