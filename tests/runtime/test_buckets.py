"""Buckets: lent in turn, filled, reduced and given back, over generated arrivals of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.recording import RecordingRoute, flat_units
from zerokit.layout import Interval
from zerokit.runtime import buckets
from zerokit.runtime.buckets import BucketPool, Phase, UnitGradients

CPU = torch.device("cpu")
STAGES = st.sampled_from((0, 1, 2, 3))
SHAPES = st.lists(
    st.one_of(st.tuples(st.integers(0, 90)), st.tuples(st.integers(1, 9), st.integers(1, 9))),
    min_size=1,
    max_size=4,
)


def pool_of(numels: Sequence[int], count: int = 2) -> BucketPool:
    pool = BucketPool(numels, count, torch.float32, CPU)
    for bucket in pool.tensors():
        bucket.fill_(float("nan"))  # whatever is not written shows
    return pool


# ---- the pool


@given(
    st.lists(st.integers(1, 200), max_size=5),
    st.integers(0, 3),
    st.lists(st.one_of(st.integers(1, 300), st.none()), max_size=12),
)
def test_no_bucket_is_lent_twice_and_all_come_back(
    fitting: list[int], count: int, wishes: list[int | None]
) -> None:
    pool = BucketPool(fitting, count, torch.float32, CPU)
    most, largest = min(count, len(fitting)), max(fitting, default=0)
    lent: list[Tensor] = []
    for wish in wishes:
        if wish is None:
            if lent:
                pool.give(lent.pop(0))
            continue
        taken = pool.take(wish)
        shared = [bucket for bucket in lent if bucket.numel() <= largest]
        if wish <= largest:
            assert (taken is None) == (len(shared) == most)
        else:
            assert taken is not None
        if taken is not None:
            assert (taken.numel(), taken.dtype) == (wish, torch.float32)
            assert pool.owns(taken) == (wish <= largest)
            assert taken.data_ptr() not in {bucket.data_ptr() for bucket in lent}
            lent.append(taken)
        assert len(pool.tensors()) == most - sum(map(pool.owns, lent))
    for bucket in lent:
        pool.give(bucket)
    assert [bucket.numel() for bucket in pool.tensors()] == [largest] * most
    assert len({bucket.data_ptr() for bucket in pool.tensors()}) == most


def test_a_bucket_is_used_again_and_memory_of_large_units_is_not_kept() -> None:
    pool = BucketPool([64, 128], 1, torch.bfloat16, CPU)
    first = pool.take(64)
    assert first is not None
    assert pool.take(128) is None
    pool.give(first)
    again = pool.take(128)
    assert again is not None
    assert again.data_ptr() == first.data_ptr()
    borrowed = pool.take(129)
    assert borrowed is not None
    pool.give(borrowed)
    assert pool.tensors() == []


# ---- one unit


@st.composite
def passes(draw: st.DrawFn, parameters: int) -> list[list[int]]:
    """For each backward pass the positions whose gradients arrive, some twice and some never."""
    return draw(st.lists(st.lists(st.integers(0, parameters - 1), max_size=6), min_size=1, max_size=3))


def gradients_of(unit: UnitGradients, stage: int, route: RecordingRoute) -> Tensor:
    """What this rank keeps, at its place in the whole unit; zero elsewhere."""
    whole = torch.zeros(unit.unit.numel)
    kept = unit.updated
    whole[kept.start : kept.stop] = unit.of(kept)
    return whole


def bring(unit: UnitGradients, position: int, gradient: Tensor, factor: float) -> None:
    if unit.batches:
        if position in unit.waiting:
            unit.fill_waiting(factor)
        unit.waiting[position] = gradient
    else:
        unit.fill(position, gradient, factor)


@given(SHAPES, STAGES, st.integers(0, 2), st.booleans(), st.booleans(), st.data())
def test_the_sum_over_ranks_and_passes_whatever_arrives(
    shapes: list[tuple[int, ...]],
    stage: int,
    rank: int,
    batches: bool,
    half: bool,
    data: st.DataObject,
) -> None:
    """Integers, so that sums are exact: 4 ranks bring the same gradients, each a quarter of them."""
    route = RecordingRoute(rank, 4)
    (storage,) = flat_units(route, stage, [shapes], dtype=torch.bfloat16 if half else torch.float32)
    unit = UnitGradients(storage, torch.float32)
    unit.batches = batches
    pool = pool_of([unit.unit.numel] if unit.cut else [])
    expected = torch.zeros(unit.unit.numel)
    value = 0
    for arrivals in data.draw(passes(len(shapes))):
        unit.begin_pass()
        assert unit.prepare(pool)
        for position in arrivals:
            value += 1
            part = unit.unit.slices[position]
            bring(unit, position, torch.full(shapes[position], float(value), dtype=storage.dtype), 0.25)
            expected[part.memory.start : part.memory.stop] += value
        unit.fill_waiting(0.25)
        assert not unit.waiting
        work = unit.reduce(route, 1.0)
        assert unit.phase is Phase.REDUCING
        work.wait()
        unit.finish(pool)
        assert unit.summed
        assert unit.carry is None
        if not stage:
            bucket = unit.bucket
            assert bucket is not None
            route.wholes[0] = expected
            route.all_gather(unit.unit, bucket).wait()
        kept = unit.updated
        found = gradients_of(unit, stage, route)[kept.start : kept.stop]
        assert torch.equal(found, expected[kept.start : kept.stop])
        assert (unit.bucket is None) == unit.cut
        assert len(pool.tensors()) == unit.cut
    unit.forget(pool)
    assert not unit.summed
    assert not unit.filled
    assert len(pool.tensors()) == unit.cut


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_what_fills_the_bucket(batches: bool, factor: float) -> None:
    """The first of a parameter is written over what the bucket held, later ones are added, each times the factor."""
    route = RecordingRoute()
    (storage,) = flat_units(route, 2, [[(3,), (2, 2)]])
    unit = UnitGradients(storage, torch.float32)
    unit.batches = batches
    pool = pool_of([unit.unit.numel])
    assert unit.prepare(pool)
    assert unit.bucket is not None
    for value in (2.0, 4.0):
        bring(unit, 0, torch.full((3,), value), factor)
        bring(unit, 1, torch.full((2, 2), 10 * value), factor)
        unit.fill_waiting(factor)
    assert unit.filled == {0, 1}
    assert unit.bucket[:3].tolist() == [6.0 * factor] * 3
    assert unit.bucket[64:68].tolist() == [60.0 * factor] * 4
    assert unit.bucket[3:64].tolist() == [0.0] * 61
    assert unit.bucket[68:].tolist() == [0.0] * 60


def test_some_gradients_of_a_unit_are_scaled_without_the_others() -> None:
    """A factor over the whole bucket would spoil what an earlier arrival has been multiplied by."""
    (storage,) = flat_units(RecordingRoute(), 2, [[(3,), (2,)]])
    unit = UnitGradients(storage, torch.float32)
    assert unit.prepare(pool_of([unit.unit.numel]))
    for position, shape in ((0, 3), (1, 2)):
        unit.waiting[position] = torch.full((shape,), 8.0)
        unit.fill_waiting(0.5)
    assert unit.bucket is not None
    assert unit.bucket[:3].tolist() == [4.0] * 3
    assert unit.bucket[64:66].tolist() == [4.0] * 2


def test_a_unit_without_a_bucket_left_has_to_wait() -> None:
    route = RecordingRoute()
    units = [UnitGradients(s, torch.float32) for s in flat_units(route, 3, [[(4,)], [(4,)]])]
    pool = pool_of([128, 128], count=1)
    assert units[0].prepare(pool)
    assert not units[1].prepare(pool)
    units[0].fill(0, torch.ones(4), 1.0)
    units[0].reduce(route, 1.0).wait()
    units[0].finish(pool)
    assert units[1].prepare(pool)
    units[0].forget(pool)  # what was given back is not given again
    assert pool.take(128) is None


def test_a_bucket_of_ones_own_serves_where_the_pool_has_none() -> None:
    (storage,) = flat_units(RecordingRoute(), 3, [[(4,)]])
    unit = UnitGradients(storage, torch.float32)
    pool = pool_of([unit.unit.numel], count=1)
    assert pool.take(unit.unit.numel) is not None
    assert not unit.prepare(pool)
    unit.prepare_own()
    assert unit.of(unit.updated).numel() == 64
    assert unit.prepare(pool)
    unit.fill(0, torch.ones(4), 1.0)
    unit.forget(pool)
    assert unit.bucket is None
    assert pool.tensors() == []


def test_a_gradient_that_is_a_whole_unit_becomes_the_bucket() -> None:
    (storage,) = flat_units(RecordingRoute(), 3, [[(2, 64)]])
    unit = UnitGradients(storage, torch.float32)
    gradient = torch.full((2, 64), 6.0)
    assert not unit.may_steal(gradient.t())
    assert not unit.may_steal(gradient.bfloat16())
    assert unit.may_steal(gradient)
    unit.steal(gradient, 0.5)
    assert unit.bucket is not None
    assert unit.bucket.data_ptr() == gradient.data_ptr()
    assert unit.bucket.tolist() == [3.0] * 128
    assert not unit.may_steal(gradient)  # it would take the place of what has arrived
    unit.fill(0, torch.full((2, 64), 2.0), 0.5)
    assert unit.bucket.tolist() == [4.0] * 128


@pytest.mark.parametrize("shapes", [[(127,)], [(64,), (64,)]])
def test_padding_and_neighbours_need_a_bucket(shapes: list[tuple[int, ...]]) -> None:
    (storage,) = flat_units(RecordingRoute(), 1, [shapes])
    assert not UnitGradients(storage, torch.float32).may_steal(torch.ones(shapes[0]))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_clearing_one_parameter_leaves_the_others(stage: int) -> None:
    route = RecordingRoute(rank=1)
    (storage,) = flat_units(route, stage, [[(100,), (100,)]])  # rank 1 begins at the second
    unit = UnitGradients(storage, torch.float32)
    pool = pool_of([unit.unit.numel])
    assert unit.prepare(pool)
    for position in (0, 1):
        unit.fill(position, torch.ones(100), 1.0)
    unit.reduce(route, 1.0).wait()
    unit.finish(pool)
    assert unit.shard[:100].tolist() == [2.0] * 100
    unit.clear(0)
    assert unit.shard[:100].tolist() == [2.0] * 100
    unit.clear(1)
    assert unit.shard.tolist() == [0.0] * 128


@pytest.mark.parametrize("stage", [0, 1])
def test_a_sum_that_is_carried_can_be_cleared(stage: int) -> None:
    route = RecordingRoute()
    (storage,) = flat_units(route, stage, [[(100,), (100,)]])
    unit = UnitGradients(storage, torch.float32)
    pool = pool_of([])
    for _ in range(2):
        assert unit.prepare(pool)
        unit.fill(0, torch.ones(100), 1.0)
        if unit.carry is not None:
            assert unit.carry[:100].tolist() == [2.0] * 100
            unit.clear(0)
            unit.filled.clear()
            unit.fill(0, torch.ones(100), 1.0)
        unit.reduce(route, 1.0).wait()
        unit.finish(pool)
    assert unit.shard[:100].tolist() == [2.0] * 100


@given(SHAPES, STAGES, st.integers(0, 2), st.data())
def test_an_interval_shows_the_gradients_of_its_elements(
    shapes: list[tuple[int, ...]], stage: int, rank: int, data: st.DataObject
) -> None:
    (storage,) = flat_units(RecordingRoute(rank, 3), stage, [shapes])
    unit = UnitGradients(storage, torch.float32)
    unit.prepare_own()
    kept = unit.kept
    unit.of(kept).copy_(torch.arange(kept.start, kept.stop))
    start = data.draw(st.integers(kept.start, kept.stop))
    stop = data.draw(st.integers(start, kept.stop))
    assert unit.of(Interval(start, stop)).tolist() == list(range(start, stop))
    assert unit.shard.tolist() == list(range(storage.own.start, storage.own.stop))


@pytest.mark.parametrize(
    ("limit", "runs_ahead", "batches"), [(1 << 20, False, True), (128, False, False), (128, True, True)]
)
def test_gradients_of_small_units_wait_for_each_other_and_all_do_on_a_device(
    limit: int, runs_ahead: bool, batches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "_SMALL_BYTES", limit)
    (storage,) = flat_units(RecordingRoute(runs_ahead=runs_ahead), 2, [[(3,), (5,)]])
    assert UnitGradients(storage, torch.float32).batches is batches
