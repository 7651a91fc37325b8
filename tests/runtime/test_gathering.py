"""Stages 0 to 2: what owners have updated is gathered at once, and waited for when somebody needs it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerokit
from tests.support.recording import RecordingRoute, flat_units
from tests.support.walking import gathers
from zerokit.placement import Placement
from zerokit.runtime.collectives import Work
from zerokit.runtime.gathering import Gathering
from zerokit.runtime.passes import ForwardPass
from zerokit.runtime.storage import FlatUnit


class OneRank:
    """Units of four elements each over a route that records."""

    def __init__(
        self,
        count: int,
        stage: int = 2,
        *,
        rest: Sequence[int] = (),
        frozen: Sequence[int] = (),
    ) -> None:
        self.route = RecordingRoute()
        self.units = flat_units(self.route, stage, [[(4,)]] * count, rest=rest, frozen=frozen)
        self.gathering = Gathering(self.units, self.route, Placement.of(stage, self.route.mesh))

    def forward(self, uses: Sequence[int], *, training: bool = True) -> None:
        self.gathering.begin_forward(ForwardPass())
        for index in uses:
            self.enter(self.units[index])
        self.gathering.end_forward(training=training)

    def enter(self, unit: FlatUnit) -> None:
        self.gathering.enter(unit)
        self.gathering.activate(unit)
        assert not unit.guarded
        self.gathering.leave(unit)

    def gathered(self) -> list[int]:
        return [unit for kind, unit in self.route.take() if kind == "gathered"]


@pytest.mark.parametrize("stage", [1, 2])
def test_updates_are_gathered_in_the_order_of_forward_and_waited_for_at_the_end_of_it(stage: int) -> None:
    one = OneRank(4, stage, frozen=[2])
    one.gathering.adopt_order([3, 1, 0, 1, 2], lazy=[0, 1, 2, 3], kept=[])
    one.gathering.gather_updated()
    assert one.route.take() == gathers(3, 1, 0)
    one.gathering.begin_forward(ForwardPass())
    assert one.gathered() == []
    one.enter(one.units[1])
    assert one.gathered() == [1]
    joined = one.route.joined
    one.gathering.end_forward(training=True)
    assert one.gathered() == [0, 3]
    assert one.route.joined == joined + 1
    assert all(unit.guarded for unit in one.units)


def test_stage_0_has_nothing_to_gather() -> None:
    one = OneRank(2, 0)
    one.gathering.gather_updated()
    one.forward([0, 1])
    assert one.route.take() == []


def test_what_is_not_lazy_is_waited_for_when_forward_begins() -> None:
    one = OneRank(3, rest=[0])
    one.gathering.free_all()
    one.gathering.adopt_order([0, 1, 2], lazy=[1], kept=[0])
    one.gathering.gather_updated()
    one.gathering.begin_forward(ForwardPass())
    assert one.gathered() == [0, 2]
    assert [unit.guarded for unit in one.units] == [False, True, False]


def test_reading_one_parameter_waits_for_its_unit_alone() -> None:
    one = OneRank(3)
    one.gathering.gather_updated()
    one.gathering.read(1, "unit1.0", in_forward=False, in_backward=False)
    assert one.gathered() == [1]
    one.gathering.make_current()
    assert one.gathered() == [0, 2]
    one.gathering.make_current()
    assert one.gathered() == []


class Leaving(RecordingRoute):
    """The others leave after their last step: every gather from number `after` on fails, until they are back."""

    after: int | None = None

    def all_gather(self, *arguments: Any, **options: Any) -> Work:
        if self.after is not None:
            if self.after == 0:
                raise zerokit.ScheduleError("nobody is there")
            self.after -= 1
        return super().all_gather(*arguments, **options)


def test_a_gather_that_fails_after_the_last_step_is_heard_of_by_whoever_needs_it() -> None:
    route = Leaving()
    units = flat_units(route, 2, [[(4,)]] * 3)
    gathering = Gathering(units, route, Placement.of(2, route.mesh))
    route.after = 1
    gathering.gather_updated()
    assert route.take() == gathers(0)
    with pytest.raises(zerokit.ScheduleError, match="nobody"):
        gathering.read(0, "unit0.0", in_forward=False, in_backward=False)
    with pytest.raises(zerokit.ScheduleError, match="nobody"):
        gathering.begin_forward(ForwardPass())
    route.after = None
    gathering.begin_forward(ForwardPass())
    assert [event for event in route.take() if event[0] == "gather"] == gathers(1, 2)  # each once


def test_a_module_called_by_itself_waits_for_its_unit() -> None:
    one = OneRank(2)
    one.gathering.gather_updated()
    one.gathering.enter_aside(one.units[1])
    assert one.gathered() == [1]
    assert not one.units[1].guarded


def test_parameters_are_plain_while_the_model_runs_and_guarded_between() -> None:
    one = OneRank(2)
    one.gathering.free_all()
    assert all(unit.guarded for unit in one.units)
    one.forward([0])
    assert all(unit.guarded for unit in one.units)
    one.gathering.begin_backward()
    assert not any(unit.guarded for unit in one.units)
    one.gathering.end_backward(None)
    one.gathering.free_all()
    assert all(unit.guarded for unit in one.units)


def test_open_and_close() -> None:
    one = OneRank(2)
    one.gathering.gather_updated()
    one.gathering.open()
    assert one.gathered() == [0, 1]
    one.gathering.open()
    one.gathering.close()
    assert one.gathering.is_open
    one.gathering.close()
    assert not one.gathering.is_open


def test_units_at_work_are_known_and_the_outermost_return_is_told() -> None:
    one = OneRank(2)
    gathering, unit = one.gathering, one.units[1]
    assert not gathering.is_active(unit)
    gathering.activate(unit)
    gathering.activate(unit)
    assert gathering.active_units() == [unit]
    assert not gathering.leave(unit)
    assert gathering.leave(unit)
    assert gathering.active_units() == []


# ---- the order that is recorded


def test_a_trace_has_the_rest_first_and_what_was_left_out_beside_its_neighbours() -> None:
    one = OneRank(7, rest=[0, 4])
    one.forward([5, 4, 2, 2, 5, 0])
    # 4 and 0 are kept, so once; 1 follows 0, 3 follows 2's last use, 6 follows 5's.
    assert one.gathering.trace(()) == [0, 1, 4, 5, 2, 3, 5, 6]
    assert one.gathering.trace([4]) == [0, 1, 5, 4, 2, 3, 5, 6]
    assert one.gathering.used_anywhere() == [0, 4]


@given(
    st.integers(1, 6).flatmap(
        lambda count: st.tuples(
            st.just(count),
            st.sets(st.integers(0, count - 1)),
            st.lists(st.integers(0, count - 1), max_size=10),
            st.sets(st.integers(0, count - 1)),
        )
    )
)
def test_a_trace_holds_every_unit_and_this_forwards_uses_in_order(
    drawn: tuple[int, set[int], list[int], set[int]],
) -> None:
    count, rest, uses, lazy = drawn
    gathering = OneRank(count, rest=sorted(rest)).gathering
    for index in uses:
        gathering._note(index)
    order = gathering.trace(lazy)
    assert set(order) == set(range(count))
    assert all(one != following for one, following in pairwise(order))
    assert all(order.count(index) == 1 for index in rest)
    # What backward and the next forward meet: the uses of scoped units, in order.
    scoped = [index for index in uses if index not in rest]
    left = iter(order)
    merged = [one for place, one in enumerate(scoped) if scoped[place - 1 : place] != [one]]
    assert all(index in left for index in merged)


def test_an_order_is_adopted() -> None:
    gathering = OneRank(3, rest=[0]).gathering
    assert gathering.forward_order == [0, 1, 2]
    before = gathering.recorded
    gathering.adopt_order([0, 2, 1], lazy=[2], kept=[0, 1])
    assert gathering.forward_order == [0, 2, 1]
    assert (gathering.lazy, gathering.kept) == (frozenset({2}), frozenset({0, 1}))
    assert (before, gathering.recorded) == (False, True)
    assert gathering.plan is None
