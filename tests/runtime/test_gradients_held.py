"""Gradients: what stands in the shards after one pass and after several, and what is said of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zerokit
from tests.support.recording import RecordingRoute
from tests.support.reductions import bring, gradients_of, reduced, values
from zerokit.runtime.buckets import Phase

STAGES = st.sampled_from((0, 1, 2, 3))


# ---- factors


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("runs_ahead", "averages"), [(False, False), (True, False), (True, True)])
def test_the_mean_over_ranks_whoever_divides(stage: int, runs_ahead: bool, averages: bool) -> None:
    gradients = gradients_of(
        RecordingRoute(0, 4, runs_ahead=runs_ahead, averages=averages), stage, [[(4,)], [(6,)]]
    )
    bring(gradients, 1, value=5.0)
    bring(gradients, 0, value=7.0)
    gradients.end_backward()
    assert (values(gradients, 0), values(gradients, 1)) == ([7.0], [5.0])


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_scaling_multiplies_everything_that_is_updated(stage: int, runs_ahead: bool) -> None:
    gradients = gradients_of(RecordingRoute(runs_ahead=runs_ahead), stage, [[(4,)], [(6,)]])
    bring(gradients, 1, value=5.0)
    bring(gradients, 0, value=7.0)
    gradients.end_backward()
    gradients.scale(0.5)
    gradients.scale(torch.tensor(0.5, dtype=torch.float64))
    assert (values(gradients, 0), values(gradients, 1)) == ([1.75], [1.25])


class Unseen(Tensor):
    """A number that nobody may bring to the host."""

    def __float__(self) -> float:
        raise AssertionError("the host waits for the device")


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_factor_is_looked_at_on_hosts_only(runs_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = gradients_of(RecordingRoute(runs_ahead=runs_ahead), 2, [[(4,)]])
    bring(gradients, 0, value=7.0)
    gradients.end_backward()
    calls = []
    multiply = torch._foreach_mul_

    def counted(tensors: list[Tensor], factor: float | Tensor) -> None:
        calls.append(factor)
        multiply(tensors, factor.as_subclass(Tensor) if isinstance(factor, Tensor) else factor)

    monkeypatch.setattr(torch, "_foreach_mul_", counted)
    gradients.scale(1.0)
    assert calls == []
    if runs_ahead:
        gradients.scale(torch.tensor(1.0, dtype=torch.float64).as_subclass(Unseen))
        assert len(calls) == 1
        return
    gradients.scale(torch.tensor(1.0, dtype=torch.float64))
    assert calls == []
    with pytest.raises(AssertionError, match="waits for the device"):
        gradients.scale(torch.tensor(1.0, dtype=torch.float64).as_subclass(Unseen))


def test_padding_of_kept_buckets_is_zero_again_after_a_factor_that_is_not_finite() -> None:
    gradients = gradients_of(RecordingRoute(), 0, [[(4,)]])
    bring(gradients, 0)
    gradients.end_backward()
    gradients.scale(float("nan"))
    bucket = gradients.units[0].bucket
    assert bucket is not None
    assert bucket.isnan().all()
    gradients.clear_padding()
    assert bucket[4:].tolist() == [0.0] * 124
    assert bucket[:4].isnan().all()


# ---- several backward passes


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(("rank", "expected"), [(0, ([130.0], [3.0])), (1, ([7.0], []))])
def test_accumulating_reduces_nothing_until_the_first_pass_outside(
    stage: int, runs_ahead: bool, rank: int, expected: tuple[list[float], list[float]]
) -> None:
    route = RecordingRoute(rank, runs_ahead=runs_ahead)
    gradients = gradients_of(route, stage, [[(4,), (4,)], [(6,)]])
    gradients.accumulating = True
    for value in (1.0, 2.0):
        gradients.follow([1, 0])
        bring(gradients, 1, value=value)
        bring(gradients, 0, 0, value=10 * value)
        gradients.allow(2)
        gradients.reduce_due(2)
        gradients.end_backward()
        assert route.take() == []
        assert gradients.pending
        assert not gradients.summed
    gradients.accumulating = False
    gradients.follow([1, 0])
    gradients.allow(2)
    bring(gradients, 0, 0, value=100.0)
    bring(gradients, 0, 1, value=7.0)
    gradients.end_backward()
    assert route.take("reduce") == reduced(1, 0)
    assert (values(gradients, 0), values(gradients, 1)) == expected
    assert not gradients.pending
    assert gradients.summed


@given(STAGES, st.booleans(), st.lists(st.sets(st.integers(0, 2)), min_size=1, max_size=4))
def test_passes_add_up_until_they_are_forgotten(stage: int, runs_ahead: bool, rounds: list[set[int]]) -> None:
    gradients = gradients_of(RecordingRoute(1, 4, runs_ahead=runs_ahead), stage, [[(500,)]] * 3)
    for _ in range(2):
        for number, arrivals in enumerate(rounds):
            for index in arrivals:
                bring(gradients, index, value=float(2**number))
            gradients.end_backward()
        for index, unit in gradients.units.items():
            expected = sum(2**number for number, arrivals in enumerate(rounds) if index in arrivals)
            own = unit.of(unit.storage.own)
            assert own.unique().tolist() == [float(expected)]
        assert gradients.received == any(rounds)
        gradients.forget()
        assert not gradients.received
        assert not gradients.summed


def test_forgetting_waits_for_what_is_in_flight() -> None:
    route = RecordingRoute(runs_ahead=True)
    gradients = gradients_of(route, 0, [[(4,)], [(4,)]])
    bring(gradients, 1)
    gradients.spoiled = True
    gradients.forget()
    assert route.take() == [("reduce", 1), ("chain", 1), ("reduced", 1), ("gathered", 1)]
    assert route.joined == 1
    assert (gradients.spoiled, gradients.received, gradients.pending) == (False, False, False)
    assert all(unit.phase is Phase.IDLE for unit in gradients.units.values())
    bring(gradients, 1)  # the order begins again
    assert route.take("reduce") == reduced(1)


# ---- what is taken, and what is not


def test_gradients_that_buckets_cannot_take() -> None:
    gradients = gradients_of(RecordingRoute(), 2, [[(4, 2)]])
    weight = gradients.units[0].storage.parameters[0]
    gradients.accept(0, 0, weight)  # a hook of the user's has taken the gradient
    assert not gradients.received
    weight.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(zerokit.ScheduleError, match=r"unit0\.0 is torch\.sparse_coo.*sparse=False"):
        gradients.accept(0, 0, weight)
    gradients.shown = True
    with pytest.raises(zerokit.UsageError, match="gathered_gradients"):
        bring(gradients, 0)


def test_a_gradient_with_a_graph_of_its_own_leaves_it_behind() -> None:
    gradients = gradients_of(RecordingRoute(), 1, [[(4,), (4,)]])
    weight = gradients.units[0].storage.parameters[0]
    weight.grad = torch.ones(4, requires_grad=True) * 3
    gradients.accept(0, 0, weight)
    gradients.end_backward()
    assert values(gradients, 0) == [3.0]
    assert not gradients.units[0].shard.requires_grad


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clearing_and_what_is_still_held(stage: int) -> None:
    gradients = gradients_of(RecordingRoute(), stage, [[(4,), (4,)], [(6,)]])
    assert not gradients.holds(0, 0)
    bring(gradients, 1)
    gradients.end_backward()
    assert all(gradients.holds(index, position) for index, position in ((0, 0), (0, 1), (1, 0)))
    assert not gradients.holds(7, 0)
    gradients.clear(1, 0)
    assert not gradients.holds(1, 0)
    assert gradients.holds(0, 0)
    assert values(gradients, 1) == [0.0]
    gradients.clear(0, 0)
    gradients.clear(0, 1)
    assert not gradients.received  # none is left of what this rank has a share of
    bring(gradients, 1)
    assert gradients.holds(1, 0)


def test_parameters_that_others_own_need_not_be_cleared_here() -> None:
    gradients = gradients_of(RecordingRoute(rank=1), 2, [[(64,), (64,)]])  # rank 1 owns the second
    bring(gradients, 0, 0)
    bring(gradients, 0, 1)
    gradients.end_backward()
    gradients.clear(0, 1)
    assert not gradients.received


def test_a_frozen_parameter_is_skipped_unless_a_gradient_has_come_before() -> None:
    gradients = gradients_of(RecordingRoute(), 1, [[(4,), (4,), (4,)]])
    storage = gradients.units[0].storage
    assert gradients.skipped(storage) == set()
    storage.stopped = {1}
    gradients.note_frozen(storage)
    bring(gradients, 0, 0)
    gradients.end_backward()
    assert gradients.skipped(storage) == {1}
    storage.stopped = {2}
    assert gradients.skipped(storage) == {1, 2}  # it was frozen in a pass of this step
    bring(gradients, 0, 1)
    gradients.end_backward()
    assert gradients.skipped(storage) == {2}
    gradients.clear(0, 1)
    assert gradients.skipped(storage) == {1, 2}
    gradients.forget()
    storage.stopped = set()
    assert gradients.skipped(storage) == set()


def test_units_that_are_complete_are_told() -> None:
    gradients = gradients_of(RecordingRoute(), 3, [[(4,)]] * 3)
    gradients.follow([0, 1, 2])
    bring(gradients, 1)
    assert gradients.complete_units() == [1]
    bring(gradients, 0)
    gradients.allow(1)
    assert gradients.complete_units() == [0, 1]
    gradients.end_backward()
    assert gradients.complete_units() == []


def test_shards_come_in_line_order() -> None:
    gradients = gradients_of(RecordingRoute(), 3, [[(4,)], [(300,)]])
    for index in (1, 0):
        bring(gradients, index, value=float(index + 1))
    gradients.end_backward()
    found = gradients.shards()
    assert [shard.numel() for shard in found] == [64, 192]
    assert [float(shard[0]) for shard in found] == [1.0, 2.0]
    storage = gradients.units[1].storage
    assert torch.equal(gradients.of(storage, storage.flats[0]), found[1])
