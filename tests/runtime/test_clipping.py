"""Norms of gradients and `clip_grad_norm_`: torch's own norm, however the line is cut, for one all-reduce."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.support.distributed import run_alone, run_ranks
from tests.support.on_ranks import on_ranks
from tests.support.oracle import train_alone
from tests.support.recording import RecordingRoute
from tests.support.training import Run, train_all, trained, whole_weights
from zerokit.runtime import norms
from zerokit.runtime.norms import all_finite, clip_coefficient, global_norm

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


KINDS = pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
CPU = torch.device("cpu")


class Together(RecordingRoute):
    """Collects what each rank says, and then tells all of them the result."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[Tensor] = []
        self.speaks = False

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        super().all_reduce(values, op)
        assert values.dtype == torch.float64
        if not self.speaks:
            self.said.append(values.clone())
            return
        said = torch.stack(self.said)
        values.copy_(said.sum(0) if op == dist.ReduceOp.SUM else said.amax(0))


def norm_of(ranks: list[list[Tensor]], norm_type: float) -> Tensor:
    """The norm of what several ranks hold, by one all-reduce."""
    route = Together()
    for shards in ranks:
        global_norm(shards, norm_type, route)
    assert route.traffic.control_calls == len(ranks)
    route.speaks = True
    found = [global_norm(shards, norm_type, route)[0] for shards in ranks]
    assert len({float(one).hex() for one in found}) == 1
    return found[0]


def line(numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(numel)
    return torch.randn(numel, generator=generator) * torch.rand(numel, generator=generator).pow(4)


@KINDS
@pytest.mark.parametrize("numel", [1, 64, 10_000, 200_000])
def test_norms_are_torchs(norm_type: float, numel: int) -> None:
    values = line(numel)
    found = norm_of([list(values.split(70_000))], norm_type)
    assert found.dtype == torch.float64
    exact = torch.linalg.vector_norm(values.double(), norm_type)
    assert float(found) == pytest.approx(float(exact), rel=1e-12)
    single = nn.utils.get_total_norm([values], norm_type)
    assert float(found) == pytest.approx(float(single), rel=1e-4)  # torch adds up in fp32


@given(
    st.sampled_from([1.0, 2.0, 3.0, math.inf]),
    st.lists(st.integers(0, 3000), max_size=8),
    st.integers(1, 4),
    st.sampled_from([8, 200, 1 << 16]),
)
def test_the_cut_does_not_show_in_fp32(norm_type: float, cuts: list[int], world: int, chunk: int) -> None:
    values = line(3000)
    places = [0, *sorted(cuts), 3000]
    shards = [values[start:stop] for start, stop in pairwise(places)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norms, "_CHUNK", chunk)
        found = norm_of([shards[rank::world] for rank in range(world)], norm_type)
    assert float(found.float()).hex() == float(norm_of([[values]], norm_type).float()).hex()


@KINDS
def test_ranks_without_elements_take_part_and_numbers_may_be_large(norm_type: float) -> None:
    for values, expected in (([], 0.0), ([-3.0], 3.0), ([1e30], 1e30)):  # which fp32 cannot square
        found = norm_of([[], [torch.empty(0)], [torch.tensor(values)]], norm_type)
        assert float(found) == pytest.approx(expected)
    assert all(bool(all_finite(shards, CPU)) for shards in ([], [torch.empty(0)]))


@KINDS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 40_000, 99_999])
def test_what_is_not_finite_is_seen_by_all_ranks(norm_type: float, bad: float, place: int) -> None:
    values = line(100_000)
    values[place] = bad
    shards = list(values.split(30_000))
    assert not bool(norm_of([shards[:2], shards[2:]], norm_type).isfinite())
    assert not bool(all_finite(shards, CPU))
    values[place] = 0.0
    assert bool(all_finite(shards, CPU))


@given(st.floats(0, 1e6, width=32), st.floats(0, 1e3, width=32))
def test_the_coefficient_is_what_torch_multiplies_by(norm: float, limit: float) -> None:
    found = clip_coefficient(torch.tensor(norm, dtype=torch.float64), limit)
    assert found.dtype == torch.float64
    gradient = nn.Parameter(torch.zeros(1))
    gradient.grad = torch.ones(1)
    nn.utils.clip_grads_with_norm_([gradient], limit, torch.tensor(norm))
    assert gradient.grad is not None
    assert float(found) == float(gradient.grad)


def test_a_norm_that_is_not_finite_scales_nothing() -> None:
    for norm in (math.nan, math.inf):
        assert float(clip_coefficient(torch.tensor(norm, dtype=torch.float64), 1.0)) == 1.0
