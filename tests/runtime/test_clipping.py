"""`clip_grad_norm_`: the right norm of all ranks' gradients, for the price of one all-reduce."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from tests.support.distributed import run_alone, run_each, run_ranks
from tests.support.on_ranks import on_ranks
from tests.support.oracle import train_alone
from tests.support.training import Run, Trajectory, one_step, train_all, trained, whole_weights

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


CUTS = itertools.product(NORMS.values(), ((1, 0.125), (3, 0.125), (2, 1e6)))


@on_ranks(2, CUTS)
def test_gradients_are_scaled_to_the_limit_and_never_up(given: tuple[float, tuple[int, float]]) -> None:
    """The norm of an SGD update with learning rate 1 is the norm of the gradients after clipping."""
    norm_type, (stage, limit) = given
    case, model, optimizer = trained("gpt", Run(stage=stage, optimizer="sgd"), lr=1.0)
    before = {name: value.clone() for name, value in whole_weights(model).items()}
    optimizer.backward(case.loss(model, case.batch(0, 0, dist.get_rank())))
    norm = optimizer.clip_grad_norm_(limit, norm_type)
    assert (norm.dtype, norm.ndim, norm.requires_grad) == (torch.float32, 0, False)
    assert norm > 0.125
    optimizer.step()
    after = whole_weights(model)
    update = torch.cat([(after[name] - before[name]).flatten().double() for name in before])
    size = float(torch.linalg.vector_norm(update, norm_type))
    assert size == pytest.approx(min(float(norm), limit), rel=1e-3)


def _collectives(given: tuple[int, float | None]) -> Counter[str]:
    stage, clip = given
    run = Run(stage=stage, clip=clip)
    case, model, optimizer = trained("gpt", run, 3)
    # torch 2.11 warns unless events of all cycles are kept, of which there is one.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        one_step(model, optimizer, case, run, 3, Trajectory())
        list(model.parameters())
    return Counter(event.name for event in profile.events() if event.name.startswith("c10d::"))


def test_clipping_costs_exactly_one_all_reduce() -> None:
    for stage in (1, 3):
        for more, less in zip(*run_each(2, _collectives, [(stage, 1.0), (stage, None)]), strict=True):
            assert less, "the profiler sees no collective: this test needs another way to count"
            assert more - less == {"c10d::allreduce_": 1}
            assert less <= more


@on_ranks(2, itertools.product(("fp32", "fp16"), range(4)))
def test_norms_are_of_the_gradients_that_are_there(given: tuple[str, int]) -> None:
    """Clipped ones the second time; a user who skips a step with a bad norm keeps nothing of it."""
    precision, stage = given
    case, model, optimizer = trained("mlp_10_64_2", Run(stage=stage, precision=precision))
    found: list[list[float]] = []
    assert optimizer.last_norm is None
    # Gradients that are usual, infinite on one rank, usual again, and zero.
    for factor in (1.0, 1.0 if dist.get_rank() else math.inf, 1.0, 0.0):
        optimizer.zero_grad()
        optimizer.backward(case.loss(model, case.batch(0, 0, dist.get_rank())) * factor)
        found.append([optimizer.clip_grad_norm_(limit).item() for limit in (0.125, 1.0)])
        assert repr(optimizer.last_norm) == repr(found[-1][-1])
    optimizer.step()
    assert all(bool(value.isfinite().all()) for value in whole_weights(model).values())
    usual, bad, again, zero = found
    assert usual[0] > 0.125
    assert usual[1] == pytest.approx(0.125, rel=1e-3)
    assert not math.isfinite(bad[0])
    assert again == usual
    assert zero == [0.0, 0.0]
