"""What people do out of habit around a model: each is right, or refused at once with the line to write instead.

The README's table of habits says the same.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerokit
from tests.support.distributed import run_ranks, run_ranks_expecting_errors

COMPILED = 2
"""Layers of models that are compiled: dynamo takes a second over each."""


def _model(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(depth)))


def _optimizer(model: nn.Module, stage: int) -> zerokit.ZeroOptimizer:
    return zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=stage, precision="fp32", lr=1e-2)


def _train(model: Callable[[torch.Tensor], torch.Tensor], optimizer: zerokit.ZeroOptimizer) -> list[float]:
    inputs = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        loss = model(torch.randn(4, 16, generator=inputs)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _plain(stage: int) -> list[float]:
    model = _model(COMPILED)
    return _train(model, _optimizer(model, stage))


def _ddp_before(stage: int) -> Any:
    return _optimizer(nn.parallel.DistributedDataParallel(_model()), stage)


def _ddp_after(stage: int) -> Any:
    model = _model()
    _optimizer(model, stage)
    return nn.parallel.DistributedDataParallel(model)


def _fully_shard_before(stage: int) -> Any:
    model = _model()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return _optimizer(model, stage)


def _fully_shard_after(stage: int) -> Any:
    model = _model()
    _optimizer(model, stage)
    return fully_shard(model[0], mesh=init_device_mesh("cpu", (2,)))


def _compile_before(stage: int) -> Any:
    return _optimizer(torch.compile(_model(), backend="eager"), stage)  # type: ignore[arg-type]


def _compile_after(stage: int) -> list[float]:
    warnings.simplefilter("ignore")  # dynamo's, of what it does not trace
    model = _model(COMPILED)
    optimizer = _optimizer(model, stage)
    return _train(torch.compile(model, backend="eager"), optimizer)


def _compile_in_place(stage: int) -> list[float]:
    warnings.simplefilter("ignore")
    model = _model(COMPILED)
    optimizer = _optimizer(model, stage)
    model.compile(backend="eager")
    return _train(model, optimizer)


def _compile_parts(stage: int) -> list[float]:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16)) for _ in range(COMPILED)))
    optimizer = _optimizer(model, stage)
    for block in model:
        assert isinstance(block, nn.Sequential)
        block[0].compile(backend="eager")
    return _train(model, optimizer)


def _grad_scaler(stage: int) -> None:
    model = _model()
    optimizer = _optimizer(model, stage)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 16)).sum()).backward()
    scaler.step(optimizer)


def _deepcopy(stage: int) -> None:
    model = _model()
    _optimizer(model, stage)
    copy.deepcopy(model)


def _pickle(stage: int) -> None:
    model = _model()
    _optimizer(model, stage)
    pickle.dumps(model)


REFUSED: dict[str, tuple[Callable[[int], Any], tuple[int, ...], str]] = {
    "DistributedDataParallel before": (_ddp_before, (0, 3), "pass the plain model"),
    "DistributedDataParallel after": (_ddp_after, (0, 3), "leave DistributedDataParallel out"),
    "fully_shard before": (_fully_shard_before, (3,), "pass the plain model"),
    "fully_shard after": (_fully_shard_after, (0, 3), "leave fully_shard() out"),
    "torch.compile before": (_compile_before, (0, 3), "block.mlp.compile()"),
    "GradScaler": (_grad_scaler, (2,), "precision='fp16'"),
    "deepcopy": (_deepcopy, (0, 3), "copy it before"),
    "pickle": (_pickle, (0, 3), "zerokit.save()"),
}
RIGHT: dict[str, tuple[Callable[[int], list[float]], tuple[int, ...]]] = {
    # Stages by turns: dynamo takes seconds over each.
    "torch.compile after": (_compile_after, (1,)),
    "model.compile()": (_compile_in_place, (3,)),
    "parts compiled": (_compile_parts, (0, 3)),
}


@pytest.mark.parametrize(("name", "stage"), [(n, s) for n, (_, stages, _) in REFUSED.items() for s in stages])
def test_a_habit_that_cannot_work_is_refused_with_the_line_to_write(name: str, stage: int) -> None:
    habit, _, words = REFUSED[name]
    for outcome in run_ranks_expecting_errors(2, habit, stage, timeout=30.0):
        assert not outcome.ok
        assert words in outcome.error, outcome.describe()
        assert "UsageError" in outcome.error_types or "UsageError" in outcome.error, outcome.describe()


@pytest.mark.parametrize(("name", "stage"), [(n, s) for n, (_, stages) in RIGHT.items() for s in stages])
def test_a_habit_that_works_gives_the_plain_loops_losses(name: str, stage: int) -> None:
    for seen, expected in zip(
        run_ranks(2, RIGHT[name][0], stage, timeout=30.0), run_ranks(2, _plain, 0), strict=True
    ):
        assert seen == pytest.approx(expected, rel=1e-6)


def test_a_whole_model_compiled_at_stage_3_is_refused_or_right() -> None:
    plain = run_ranks(2, _plain, 0)
    for outcome, expected in zip(
        run_ranks_expecting_errors(2, _compile_after, 3, timeout=30.0), plain, strict=True
    ):
        if outcome.ok:  # torch 2.6's compiler leaves to eager what it cannot trace
            assert outcome.value == pytest.approx(expected, rel=1e-6)
        else:
            assert "UsageError" in outcome.error
            assert "block.mlp.compile()" in outcome.error, outcome.describe()


def _no_sync(name: str) -> tuple[list[float], float | None, float]:
    model = _model()
    optimizer = _optimizer(model, 2)
    assert optimizer.last_norm is None
    losses = []
    for _ in range(2):
        with getattr(optimizer, name)():
            optimizer.backward(model(torch.ones(2, 16)).square().mean())
        loss = model(torch.ones(2, 16)).square().mean()
        optimizer.backward(loss)
        norm = optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, optimizer.last_norm, norm.item()


def test_no_sync_is_accumulate_and_the_last_norm_is_a_number() -> None:
    for (losses, last, norm), expected in zip(
        run_ranks(2, _no_sync, "no_sync"), run_ranks(2, _no_sync, "accumulate"), strict=True
    ):
        assert (losses, last, norm) == expected
        assert isinstance(last, float)
        assert last == norm


def _profiled(stage: int) -> list[str]:
    model = _model()
    optimizer = _optimizer(model, stage)
    _train(model, optimizer)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        _train(model, optimizer)
    return sorted({event.key for event in profile.key_averages() if event.key.startswith("zerokit: ")})


@pytest.mark.parametrize("stage", [2, 3])
def test_a_profile_names_units(stage: int) -> None:
    for seen in run_ranks(2, _profiled, stage):
        whole = "0.weight .. 3.bias"  # small neighbours are one unit
        assert seen == [
            f"zerokit: gather {whole}",
            f"zerokit: reduce {whole}",
            "zerokit: update",
            f"zerokit: wait for the gather of {whole}",
            f"zerokit: wait for the reduction of {whole}",
        ]
