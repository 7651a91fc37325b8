"""Gradients: in which order their units are reduced and when, and how many are in flight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zerokit
from tests.support.recording import RecordingRoute, flat_units
from tests.support.reductions import bring, gradients_of, reduced, values
from zerokit.placement import Placement
from zerokit.runtime import buckets
from zerokit.runtime.gradients import Gradients

STAGES = st.sampled_from((0, 1, 2, 3))
DIVIDED = pytest.mark.parametrize("stage", [2, 3])
SMALL = [[(4,)], [(4,)], [(4,)], [(4,)]]


# ---- the order


def test_before_it_is_recorded_the_order_is_reversed_and_the_rest_comes_last() -> None:
    gradients = gradients_of(RecordingRoute(), 1, [[(4,)]] * 5, rest=[0, 4], frozen=[2])
    assert gradients.order == [3, 1, 4, 0]


@given(STAGES, st.booleans(), st.permutations(range(4)), st.integers(0, 4))
def test_reductions_follow_one_order_whenever_gradients_arrive(
    stage: int, runs_ahead: bool, arrivals: list[int], count: int
) -> None:
    """The first `count` of `arrivals` come; the others are reduced with zeros at the end."""
    route = RecordingRoute(runs_ahead=runs_ahead)
    gradients = gradients_of(route, stage, SMALL)
    for place, index in enumerate(arrivals[:count]):
        bring(gradients, index, value=float(index + 1))
        complete = 0
        while complete < 4 and 3 - complete in arrivals[: place + 1]:
            complete += 1
        assert [event for event in route.events if event[0] == "reduce"] == reduced(*[3, 2, 1, 0][:complete])
    gradients.end_backward()
    events = route.take()
    assert [event for event in events if event[0] == "reduce"] == reduced(3, 2, 1, 0)
    assert [unit for kind, unit in events if kind == "reduced"] == [3, 2, 1, 0]
    assert gradients.summed
    assert not gradients.pending
    for index in range(4):
        assert values(gradients, index) == [float(index + 1) if index in arrivals[:count] else 0.0]
    assert gradients.completed_order() == [
        *arrivals[:count],
        *(i for i in (3, 2, 1, 0) if i not in arrivals[:count]),
    ]


def test_the_order_that_rank_0_recorded_is_followed_from_then_on() -> None:
    route = RecordingRoute()
    gradients = gradients_of(route, 2, SMALL)
    gradients.adopt_order([1, 3, 0, 2])
    for index in (3, 2, 1, 0):
        bring(gradients, index)
    assert route.take("reduce") == reduced(1, 3, 0, 2)
    gradients.end_backward()
    assert gradients.completed_order() == [1, 3, 0, 2]


# ---- at stage 3, what the gathers allow


def test_reductions_wait_until_they_are_allowed() -> None:
    route = RecordingRoute()
    gradients = gradients_of(route, 3, SMALL)
    gradients.follow([2, 3, 1, 0])
    bring(gradients, 2)
    bring(gradients, 3)
    assert route.take() == []
    gradients.allow(1)
    assert route.take() == reduced(2)
    gradients.allow(3)
    assert route.take() == reduced(3)
    bring(gradients, 1)
    assert route.take("reduce") == reduced(1)
    gradients.end_backward()
    assert route.take("reduce") == reduced(0)


def test_an_order_is_not_changed_in_the_middle_of_a_pass() -> None:
    route = RecordingRoute()
    gradients = gradients_of(route, 3, SMALL)
    bring(gradients, 3)
    gradients.follow([0, 1, 2, 3])
    assert gradients.order == [3, 2, 1, 0]
    gradients.end_backward()
    gradients.follow([0, 1, 2, 3])
    assert gradients.order == [0, 1, 2, 3]


def test_what_is_due_goes_with_zeros_unless_gradients_may_still_come() -> None:
    route = RecordingRoute()
    gradients = gradients_of(route, 3, [[(4,), (4,)], [(4,)], [(4,)]])
    gradients.follow([0, 1, 2])
    bring(gradients, 0, 0, value=3.0)
    gradients.over = {0}.__contains__
    gradients.reduce_due(0)
    assert route.take() == []
    gradients.reduce_due(2)
    assert route.take("reduce") == reduced(0)  # its second gradient is missing; unit 1 may still get one
    bring(gradients, 1)
    gradients.reduce_due(2)
    assert route.take("reduce") == reduced(1)
    gradients.reduce_due(9)
    assert route.take("reduce") == []
    gradients.end_backward()
    assert values(gradients, 0) == [3.0]


def test_a_gradient_after_the_reduction_is_refused_by_name() -> None:
    gradients = gradients_of(RecordingRoute(), 3, [[(4,), (4,)], [(4,)]])
    gradients.follow([0, 1])
    gradients.over = lambda index: True
    bring(gradients, 0, 0)
    gradients.reduce_due(1)
    with pytest.raises(zerokit.ScheduleError, match=r"unit0\.1 came after.*use_reentrant=False"):
        bring(gradients, 0, 1)
    bring(gradients, 1)
    with pytest.raises(zerokit.ScheduleError, match=r"unit1\.0 came after"):
        bring(gradients, 1)  # complete, though nothing has been issued


# ---- memory and what is in flight


@DIVIDED
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_no_more_units_are_in_flight_than_there_are_buckets(stage: int, runs_ahead: bool) -> None:
    route = RecordingRoute(runs_ahead=runs_ahead)
    gradients = gradients_of(route, stage, [[(4,)]] * 7)
    most = 0
    for index in reversed(range(7)):
        bring(gradients, index)
        most = max(most, route.in_flight)
    assert most == {2: 3, 3: 2}[stage]
    gradients.end_backward()
    assert len(gradients.pool.tensors()) == {2: 3, 3: 2}[stage]


@DIVIDED
def test_a_unit_that_needs_a_bucket_waits_for_the_oldest_reduction(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "_SMALL_BYTES", 0)  # gradients go into the bucket as they arrive
    route = RecordingRoute()
    gradients = gradients_of(route, stage, [[(4,), (4,)]] * 5)
    lent = {2: 3, 3: 2}[stage]
    for index in reversed(range(5 - lent, 5)):
        bring(gradients, index, 0)
        bring(gradients, index, 1)
    assert route.take() == reduced(*reversed(range(5 - lent, 5)))
    bring(gradients, 4 - lent, 0)
    assert route.take() == [("reduced", 4)]
    bring(gradients, 4 - lent, 1)
    assert route.take() == reduced(4 - lent)


def test_a_unit_has_memory_of_its_own_where_buckets_wait_for_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "_SMALL_BYTES", 0)
    route = RecordingRoute()
    gradients = gradients_of(route, 3, SMALL)
    for index in range(4):  # the last in the order first
        bring(gradients, index, value=float(index))
    gradients.end_backward()
    assert route.take("reduce") == reduced(3, 2, 1, 0)
    assert [values(gradients, index) for index in range(4)] == [[0.0], [1.0], [2.0], [3.0]]
    assert len(gradients.pool.tensors()) == 2


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("runs_ahead", "limit"), [(False, 3), (True, 7)])
def test_hosts_limit_what_is_in_flight_and_devices_do_not(stage: int, runs_ahead: bool, limit: int) -> None:
    route = RecordingRoute(runs_ahead=runs_ahead)
    gradients = gradients_of(route, stage, [[(4,)]] * 7)
    most = 0
    for index in reversed(range(7)):
        bring(gradients, index)
        most = max(most, route.in_flight)
    assert most == limit


def test_a_large_unit_borrows_memory_while_it_is_in_flight() -> None:
    route = RecordingRoute()
    storages = flat_units(route, 2, [[(4,)], [(300,)]])
    gradients = Gradients(
        storages, route, torch.float32, placement=Placement.of(2, route.mesh), fitting=[128]
    )
    bring(gradients, 1, value=2.0)
    bring(gradients, 0, value=3.0)
    gradients.end_backward()
    assert (values(gradients, 0), values(gradients, 1)) == ([3.0], [2.0])
    assert [bucket.numel() for bucket in gradients.pool.tensors()] == [128]
    assert gradients.units[1].bucket is None


# ---- stage 0 gathers the sums


def test_hosts_gather_a_sum_that_has_been_waited_for() -> None:
    route = RecordingRoute()
    gradients = gradients_of(route, 0, SMALL[:2])
    bring(gradients, 1)
    bring(gradients, 0)
    gradients.end_backward()
    assert route.take() == [
        *reduced(1, 0),
        ("reduced", 1),
        ("gather", 1),
        ("reduced", 0),
        ("gather", 0),
        ("gathered", 1),
        ("gathered", 0),
    ]
    assert route.joined == 1


def test_a_device_gathers_right_behind_the_reduction() -> None:
    route = RecordingRoute(runs_ahead=True)
    gradients = gradients_of(route, 0, SMALL[:2])
    bring(gradients, 1)
    assert route.take() == [("reduce", 1), ("chain", 1)]
    bring(gradients, 0)
    gradients.end_backward()
    assert route.take() == [
        ("reduce", 0),
        ("chain", 0),
        ("reduced", 1),
        ("reduced", 0),
        ("gathered", 1),
        ("gathered", 0),
    ]


def test_a_sum_that_is_added_to_an_earlier_one_is_gathered_after_that() -> None:
    route = RecordingRoute(runs_ahead=True)
    gradients = gradients_of(route, 0, [[(4,)]])
    for _ in range(2):
        route.take()
        bring(gradients, 0, value=3.0)
        gradients.end_backward()
    assert route.take() == [("reduce", 0), ("reduced", 0), ("gather", 0), ("gathered", 0)]
    assert values(gradients, 0) == [6.0]
