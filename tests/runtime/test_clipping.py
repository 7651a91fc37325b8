"""`clip_grad_norm_`: the right norm of all ranks' gradients, for the price of one all-reduce."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerokit
from tests.support.distributed import run_alone, run_each, run_ranks
from tests.support.models import CASES
from tests.support.oracle import train_alone
from tests.support.training import Run, Trajectory, build_seeded, one_step, train_all, whole_weights, wrap
from zerokit.placement import stage_of

NORMS = {"2": 2.0, "1": 1.0, "inf": math.inf}


@pytest.mark.parametrize("norm_type", NORMS.values(), ids=NORMS)
@pytest.mark.parametrize(("name", "stages"), [("gpt", (1, 3)), ("unit_unused_on_rank_1", (0, 2))])
def test_norms_equal_those_of_one_process(name: str, stages: tuple[int, ...], norm_type: float) -> None:
    run = Run(clip=math.inf, norm_type=norm_type, steps=3)
    runs = {f"stage {stage}": replace(run, stage=stage) for stage in stages}
    alone = run_alone(train_alone, name, run, 3)
    for results in run_ranks(3, train_all, name, runs):
        for result in results.values():
            assert result.norms == alone[0].norms


@pytest.mark.parametrize("norm_type", NORMS.values(), ids=NORMS)
def test_clipped_training_follows_torchs_clipping(norm_type: float) -> None:
    """The limit is below every norm, so every step is scaled; SGD shows the scale (Adam would hide it)."""
    run = Run(optimizer="sgd", clip=0.05, norm_type=norm_type, steps=3)
    alone = run_alone(train_alone, "gpt", run, 2)
    runs = {f"stage {stage}": replace(run, stage=stage) for stage in (2, 3)}
    for results in run_ranks(2, train_all, "gpt", runs):
        for label, result in results.items():
            assert min(result.norms) > 0.05, label
            assert result.norms == pytest.approx(alone[0].norms, rel=1e-6), label


def _update_sizes(norm_type: float) -> list[tuple[float, float, tuple[Any, ...]]]:
    return [_update_size(stage, limit, norm_type) for stage, limit in ((1, 0.125), (3, 0.125), (2, 1e6))]


def _update_size(stage: int, max_norm: float, norm_type: float) -> tuple[float, float, tuple[Any, ...]]:
    """The norm of an SGD update with learning rate 1 is the norm of the gradients after clipping."""
    case, run = CASES["gpt"], Run(stage=stage, optimizer="sgd")
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run, lr=1.0)
    before = {name: value.clone() for name, value in whole_weights(model).items()}
    loss = case.loss(model, case.batch(0, 0, dist.get_rank()))
    optimizer.backward(loss)
    norm = optimizer.clip_grad_norm_(max_norm, norm_type)
    optimizer.step()
    after = whole_weights(model)
    update = torch.cat([(after[name] - before[name]).flatten().double() for name in before])
    return (
        float(torch.linalg.vector_norm(update, norm_type)),
        norm.item(),
        (norm.dtype, norm.ndim, norm.requires_grad),
    )


@pytest.mark.parametrize("norm_type", NORMS.values(), ids=NORMS)
def test_gradients_are_scaled_to_the_limit_and_never_up(norm_type: float) -> None:
    for *clipped, (whole, whole_norm, _) in run_ranks(2, _update_sizes, norm_type):
        for size, norm, kind in clipped:
            assert norm > 0.125
            assert size == pytest.approx(0.125, rel=1e-3)
            assert kind == (torch.float32, 0, False)
        assert whole == pytest.approx(whole_norm, rel=1e-3)


def _with_and_without(stage: int) -> tuple[dict[str, int], dict[str, int]]:
    return _collectives(stage, 1.0), _collectives(stage, None)


def _collectives(stage: int, clip: float | None) -> dict[str, int]:
    case, run = CASES["gpt"], Run(stage=stage, clip=clip)
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    for step in range(3):
        one_step(model, optimizer, case, run, step, Trajectory())
    # torch 2.11 warns unless events of all cycles are kept, of which there is one.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        one_step(model, optimizer, case, run, 3, Trajectory())
        list(model.parameters())
    return dict(Counter(event.name for event in profile.events() if event.name.startswith("c10d::")))


def test_clipping_costs_exactly_one_all_reduce() -> None:
    for more, less in itertools.chain(*run_each(2, _with_and_without, (1, 3))):
        assert sum(less.values()) > 0, "the profiler sees no collective: this test needs another way to count"
        difference = {op: n - less.get(op, 0) for op, n in more.items() if n != less.get(op, 0)}
        assert difference == {"c10d::allreduce_": 1}
        assert set(less) <= set(more)


def _bad_norm(norm_type: float) -> None:
    model = nn.Linear(2, 1)
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, precision="fp32", lr=0.1)
    optimizer.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(zerokit.UsageError, match=str(norm_type)):
        optimizer.clip_grad_norm_(1.0, norm_type)


@pytest.mark.parametrize("norm_type", [0.0, -1.0])
def test_norms_that_do_not_exist_are_refused(norm_type: float) -> None:
    run_ranks(1, _bad_norm, norm_type)


def _clip_twice_each(precision: str) -> list[tuple[float, float]]:
    return [_clip_twice(stage, precision) for stage in (1, 3)]


def _clip_twice(stage: int, precision: str) -> tuple[float, float]:
    case, run = CASES["mlp_10_64_2"], Run(stage=stage, precision=precision)
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    optimizer.backward(case.loss(model, case.batch(0, 0, dist.get_rank())))
    return optimizer.clip_grad_norm_(0.125).item(), optimizer.clip_grad_norm_(1.0).item()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_clipping_twice_sees_the_clipped_gradients(precision: str) -> None:
    for stages in run_ranks(2, _clip_twice_each, precision):
        for first, second in stages:
            assert first > 0.125
            assert second == pytest.approx(0.125, rel=1e-3)


def _after_bad_norms() -> list[tuple[float, float]]:
    return [_after_a_bad_norm(stage) for stage in range(4)]


def _after_a_bad_norm(stage: int) -> tuple[float, float]:
    """A user who skips steps with a bad norm: zero_grad() must leave nothing of it behind."""
    case, run = CASES["mlp_10_64_2"], Run(stage=stage)
    model = build_seeded(case, 0)
    optimizer = wrap(model, case, run)
    loss = case.loss(model, case.batch(0, 0, dist.get_rank()))
    optimizer.backward(loss * math.inf if dist.get_rank() == 0 else loss)
    bad = optimizer.clip_grad_norm_(1.0).item()
    optimizer.zero_grad()
    optimizer.backward(case.loss(model, case.batch(0, 0, dist.get_rank())))
    return bad, optimizer.clip_grad_norm_(1.0).item()


def test_a_norm_that_is_not_finite_leaves_nothing_behind() -> None:
    for stages in run_ranks(2, _after_bad_norms):
        for stage, (bad, good) in enumerate(stages):
            assert not math.isfinite(bad), f"stage {stage}"
            assert math.isfinite(good), f"stage {stage}"


def _zero_norm(stage: int) -> tuple[float, bool]:
    model = nn.Linear(3, 1)
    optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=stage_of(stage), precision="fp32", lr=0.1)
    optimizer.backward(model(torch.ones(1, 3)).sum() * 0.0)
    norm = optimizer.clip_grad_norm_(1.0).item()
    optimizer.step()
    return norm, all(bool(torch.isfinite(w).all()) for w in whole_weights(model).values())


def test_gradients_of_zero_stay_zero() -> None:
    assert run_each(2, _zero_norm, (0, 3)) == [[(0.0, True)] * 2] * 2
