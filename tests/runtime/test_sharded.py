"""Stage 3: which gather is issued when, what is freed when, and that no rank's choice of units changes the order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import zerokit
from tests.support.recording import Event
from tests.support.walking import Walk, gathers

# ---- one pass


def test_the_first_forward_gathers_in_line_order_and_backward_in_reverse() -> None:
    walk = Walk(4)
    seen: dict[int, tuple[list[Event], list[int]]] = {}

    def look(unit: int) -> None:
        seen[unit] = (walk.issued(), walk.resident)

    current = walk.forward([0, 1, 2, 3], look)
    # The next gather is in flight before a unit's work begins; what was left is freed before.
    assert seen == {
        0: (gathers(0, 1), [0, 1]),
        1: (gathers(2), [1, 2]),
        2: (gathers(3), [2, 3]),
        3: ([], [3]),
    }
    assert walk.resident == []
    assert walk.gathering.plan.gathers == (3, 2, 1, 0)
    walk.backward(current, [0, 1, 2, 3], look)
    assert seen == {
        3: (gathers(3, 2), [2, 3]),
        2: ([("reduce", 3), *gathers(1)], [1, 2]),
        1: ([("reduce", 2), *gathers(0)], [0, 1]),
        0: ([("reduce", 1)], [0]),
    }
    assert walk.issued() == [("reduce", 0)]
    assert walk.resident == []


def test_from_the_second_forward_on_the_last_unit_stays_for_backward() -> None:
    walk = Walk(3)
    walk.backward(walk.forward([0, 1, 2]), [0, 1, 2])
    walk.issued()
    current = walk.forward([0, 1, 2])
    assert walk.issued() == gathers(0, 1, 2)
    assert walk.resident == [2]
    walk.backward(current, [0, 1, 2])
    assert walk.issued() == [*gathers(1), ("reduce", 2), *gathers(0), ("reduce", 1), ("reduce", 0)]
    assert walk.resident == []


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_as_many_units_are_in_flight_as_prefetch_says(prefetch: int) -> None:
    walk = Walk(5, prefetch=prefetch)
    uses = [0, 1, 2, 3, 4]
    walk.backward(walk.forward(uses), uses)
    walk.issued()
    ahead: list[list[int]] = []
    current = walk.forward(uses, lambda unit: ahead.append(walk.resident))
    assert walk.issued() == gathers(*uses)
    assert ahead == [list(range(unit, min(unit + 1 + prefetch, 5))) for unit in uses]
    assert walk.resident == [4]
    ahead.clear()
    walk.backward(current, uses, lambda unit: ahead.append(walk.resident))
    assert ahead == [list(range(max(unit - prefetch, 0), unit + 1)) for unit in reversed(uses)]
    assert [event for event in walk.issued() if event[0] == "gather"] == gathers(3, 2, 1, 0)


def test_reductions_stand_behind_the_gathers_that_are_ahead() -> None:
    issued = {}
    for prefetch in (0, 1, 2):
        walk = Walk(4, prefetch=prefetch)
        walk.backward(walk.forward([0, 1, 2, 3]), [0, 1, 2, 3])
        issued[prefetch] = "".join(f" {kind[0]}{unit}" for kind, unit in walk.issued()[4:])
    assert issued == {
        0: " g3 r3 g2 r2 g1 r1 g0 r0",
        1: " g3 g2 r3 g1 r2 g0 r1 r0",
        2: " g3 g2 g1 r3 g0 r2 r1 r0",
    }


def test_without_gradients_nothing_stays() -> None:
    walk = Walk(3, rest=[0])
    walk.backward(walk.forward([0, 1, 2]), [0, 1, 2])
    walk.issued()
    walk.forward([1, 2], training=False)
    assert walk.issued() == gathers(0, 1, 2)
    assert walk.resident == []


# ---- other orders


def test_a_rank_that_leaves_units_out_issues_them_all_the_same() -> None:
    walk = Walk(4)
    walk.backward(walk.forward([0, 1, 2, 3]), [0, 1, 2, 3])
    walk.gradients.forget()
    walk.issued()
    current = walk.forward([2])
    assert walk.issued() == gathers(0, 1, 2, 3)
    assert walk.resident == [3]  # backward begins with it, on every rank
    walk.backward(current, [2])
    assert walk.issued() == [
        *gathers(2),
        ("reduce", 3),
        *gathers(1),
        ("reduce", 2),
        *gathers(0),
        ("reduce", 1),
        ("reduce", 0),
    ]
    assert [float(shard[0]) for shard in walk.gradients.shards()] == [0.0, 0.0, 3.0, 0.0]
    assert walk.resident == []


def test_what_a_rank_leaves_out_at_the_end_is_there_one_unit_at_a_time() -> None:
    walk = Walk(6)
    walk.backward(walk.forward(list(range(6))), list(range(6)))
    at_once: list[int] = []
    walk.route.at_gather = lambda unit: at_once.append(len(walk.resident))
    walk.backward(walk.forward([]), [])
    assert max(at_once) <= 3  # counted when the next one has its memory


def test_a_unit_that_stands_twice_in_the_order_is_gathered_twice() -> None:
    walk = Walk(3)
    uses = [0, 1, 0, 2]
    walk.backward(walk.forward(uses), uses)
    assert walk.gathering.forward_order == uses
    walk.issued()
    current = walk.forward(uses)
    assert walk.issued() == gathers(*uses)
    walk.backward(current, uses)
    assert walk.issued() == [
        *gathers(0),
        ("reduce", 2),
        *gathers(1, 0),
        ("reduce", 1),
        ("reduce", 0),
    ]


def test_leaving_the_order_is_agreed_on_and_recorded_anew() -> None:
    walk = Walk(3)
    uses = [0, 1, 2]
    walk.backward(walk.forward(uses), uses)
    walk.issued()
    longer = [0, 1, 0, 1, 2]
    residents: list[list[int]] = []
    current = walk.forward(longer, lambda unit: residents.append(walk.resident))
    assert len(walk.route.agreements) == 1
    assert "uses unit0 again" in walk.route.agreements[0]
    assert walk.gathering.deviated
    assert residents[2:] == [[0], [1], [2]]  # nothing is ahead
    assert walk.gathering.forward_order == longer
    assert walk.resident == []
    walk.backward(current, longer)
    assert sorted(unit for kind, unit in walk.issued() if kind == "reduce") == uses
    current = walk.forward(longer)
    assert len(walk.route.agreements) == 1
    assert walk.issued() == gathers(*longer)
    walk.backward(current, longer)


def test_a_unit_that_is_still_there_is_used_again_without_a_word() -> None:
    walk = Walk(3)
    walk.backward(walk.forward([0, 1, 2]), [0, 1, 2])
    walk.issued()
    walk.forward([0, 0, 1, 2])
    assert walk.route.agreements == []
    assert walk.issued() == gathers(0, 1, 2)


@st.composite
def lines(draw: st.DrawFn) -> tuple[int, list[int], list[int], list[int]]:
    """(units, those of the rest, those that are frozen, the recorded order of the others)."""
    count = draw(st.integers(1, 5))
    rest = draw(st.lists(st.integers(0, count - 1), max_size=1))
    frozen = draw(st.lists(st.integers(0, count - 1), max_size=1))
    order = draw(st.lists(st.sampled_from([i for i in range(count) if i not in rest] or [0]), max_size=7))
    return count, rest, frozen, order


def subsequences(order: list[int]) -> st.SearchStrategy[list[int]]:
    places = st.sets(st.integers(0, max(len(order) - 1, 0)))
    return places.map(lambda kept: [unit for place, unit in enumerate(order) if place in kept])


@given(lines(), st.integers(0, 2), st.data())
def test_ranks_that_use_different_units_issue_the_same(
    line: tuple[int, list[int], list[int], list[int]], prefetch: int, data: st.DataObject
) -> None:
    """Over three steps each rank uses its own part of what rank 0 used in its first."""
    count, rest, frozen, order = line
    walks = [Walk(count, prefetch=prefetch, rest=rest, frozen=frozen) for _ in range(2)]
    repeats = len(set(order)) < len(order)
    recorded: list[int] | None = None
    for step in range(3):
        issued = []
        for rank, walk in enumerate(walks):
            # A first pass that uses a unit again leaves the order that was guessed, on all ranks.
            together = step == 0 and (rank == 0 or repeats)
            uses = order if together else data.draw(subsequences(order), label=f"rank {rank} uses")
            current = walk.forward(uses, record=recorded)
            recorded = recorded or list(walk.gathering.forward_order)
            assert len(walk.resident) <= len(rest) + 1  # of the others, what backward begins with
            missing = st.sets(st.sampled_from(uses)) if uses and not repeats else st.just(set[int]())
            walk.backward(current, uses, without=data.draw(missing, label="without a gradient"))
            assert walk.resident == []
            issued.append(walk.issued())
            reduced = [unit for kind, unit in issued[-1] if kind == "reduce"]
            assert sorted(reduced) == [unit for unit in range(count) if unit not in frozen]
            walk.gradients.forget()
        assert issued[0] == issued[1]
    assert all(len(walk.route.agreements) <= repeats for walk in walks)


def test_a_gradient_that_is_missing_on_one_rank_between_uses_of_a_unit() -> None:
    """One rank must not hold back a reduction that another has issued: it may wait for it before its next gather."""
    uses = [0, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5]
    issued = []
    for without in ([], [5]):
        walk = Walk(6)
        walk.backward(walk.forward(uses), uses)
        walk.gradients.forget()
        current = walk.forward(uses)
        walk.issued()
        walk.backward(current, uses, without=without)
        issued.append(walk.issued())
    assert issued[0] == issued[1]


def test_a_rank_that_leaves_many_units_out_does_not_hold_them_all() -> None:
    walk = Walk(6)
    walk.backward(walk.forward(list(range(6))), list(range(6)))
    residents: list[int] = []
    current = walk.forward([4], lambda unit: residents.append(len(walk.resident)))
    walk.backward(current, [4])
    current = walk.forward([0])
    walk.backward(current, [0], lambda unit: residents.append(len(walk.resident)))
    assert max(residents) <= 3  # the unit, the one ahead, and the one that backward begins with


# ---- what stays


def test_the_rest_stays_until_the_end_of_backward() -> None:
    walk = Walk(4, rest=[0, 3])
    current = walk.forward([0, 1, 2, 3], lambda unit: None)
    assert walk.resident == [0, 3]
    walk.backward(current, [0, 1, 2, 3], lambda unit: walk.require_current(walk.units[0]))
    assert walk.resident == []
    walk.issued()
    current = walk.forward([1, 2])  # whoever uses the rest, and whether anybody does
    assert walk.issued()[:2] == gathers(0, 3)
    walk.backward(current, [1, 2])
    assert [unit for kind, unit in walk.issued() if kind == "reduce"] == [2, 1, 3, 0]


def test_what_backward_begins_with_outlasts_a_lazy_head_of_the_rest() -> None:
    walk = Walk(3, rest=[2])
    walk.backward(walk.forward([0, 1, 2], record=[0, 1, 2]), [0, 1, 2])
    residents: list[list[int]] = []
    walk.forward([0, 1, 2], lambda unit: residents.append(walk.resident))
    assert residents[-1] == [1, 2]


def test_a_head_of_the_rest_is_reduced_before_the_gathers() -> None:
    walk = Walk(4, rest=[0, 3])
    walk.backward(walk.forward([0, 1, 2, 3]), [0, 1, 2, 3])
    walk.gathering.adopt_early([3])
    current = walk.forward([0, 1, 2, 3])
    walk.issued()
    walk.backward(current, [0, 1, 2, 3])
    assert walk.issued() == [("reduce", 3), *gathers(1), ("reduce", 2), ("reduce", 1), ("reduce", 0)]


def test_a_unit_of_which_nobody_tells_stays_until_backward_ends() -> None:
    walk = Walk(4)
    walk.forward([0, 1, 2, 3])

    def pin(unit: int) -> None:
        if unit == 1:
            walk.gathering.pin(walk.units[1])

    current = walk.forward([0, 1, 2, 3], pin)
    assert walk.resident == [1, 3]
    residents: list[list[int]] = []
    walk.backward(current, [0, 1, 2, 3], lambda unit: residents.append(walk.resident))
    assert residents == [[1, 2, 3], [1, 2], [0, 1], [0, 1]]
    assert walk.resident == []


def test_a_pass_that_is_held_frees_nothing_until_it_is_dropped() -> None:
    walk = Walk(3)
    current = walk.forward([0, 1, 2])
    walk.issued()
    walk.gradients.follow(walk.gathering.plan.reductions)
    walk.gathering.begin_backward()
    walk.gathering.hold()
    for index in (2, 1, 0):
        walk.gathering.enter_backward([walk.units[index]], current)
        walk.bring(index)
    walk.gathering.end_backward(current)
    walk.gradients.end_backward()
    walk.gathering.free_all()
    assert walk.resident == [0, 1, 2]
    current = walk.forward([0, 1, 2])
    walk.gathering.drop()
    assert walk.resident == []


def test_recomputation_inside_backward_moves_nothing() -> None:
    walk = Walk(4)
    current = walk.forward([0, 1, 2, 3])
    walk.issued()
    walk.gathering.begin_backward()
    walk.gathering.enter_backward([walk.units[3]], current)
    assert walk.resident == [2, 3]
    walk.gathering.enter_backward([walk.units[2]], None, recomputing=True)
    walk.require_current(walk.units[2])
    walk.require_current(walk.units[3])
    walk.gathering.enter_backward([walk.units[2]], current)
    assert 3 not in walk.resident


def test_a_module_called_by_itself_gathers_its_unit_and_frees_the_one_before() -> None:
    walk = Walk(3)
    walk.gathering.enter_aside(walk.units[1])
    walk.require_current(walk.units[1])
    walk.gathering.enter_aside(walk.units[2])
    assert walk.resident == [2]
    assert walk.issued() == gathers(1, 2)
    walk.gathering.free_all()
    assert walk.resident == []


# ---- reading and whole parameters


def test_reading_gathers_inside_passes_and_is_refused_outside() -> None:
    walk = Walk(3)
    with pytest.raises(zerokit.UsageError, match=r"unit1\.0 is divided.*gathered\(\)"):
        walk.gathering.read(1, "unit1.0", in_forward=False, in_backward=False)
    assert walk.issued() == []

    def read(unit: int) -> None:
        if unit == 0:
            walk.gathering.read(2, "unit2.0", in_forward=True, in_backward=False)
            walk.require_current(walk.units[2], guarded=True)  # what is done to its others is noticed, too

    current = walk.forward([0, 1, 2], read)
    assert 2 in walk.gathering.kept  # read outside its modules: it stays from now on
    walk.issued()
    walk.gathering.begin_backward()
    walk.gathering.read(1, "unit1.0", in_forward=False, in_backward=True)
    walk.require_current(walk.units[1])
    walk.end_backward(current)
    assert walk.resident == []


@pytest.mark.parametrize("depth", [1, 2])
def test_open_shows_every_parameter_until_the_last_close(depth: int) -> None:
    walk = Walk(3, rest=[0])
    gathering = walk.gathering
    for _ in range(depth):
        gathering.open()
        assert gathering.is_open
    assert walk.issued() == gathers(0, 1, 2)
    assert all(unit.guarded and unit.resident for unit in walk.units)
    gathering.read(1, "unit1.0", in_forward=False, in_backward=False)
    with torch._C.DisableTorchFunctionSubclass():
        assert walk.units[1].parameters[0].tolist() == [5.0, 6.0, 7.0, 8.0]
    current = walk.forward([0, 1, 2])  # the model can run inside
    walk.backward(current, [0, 1, 2]) if current.plan is not None else None
    assert [event for event in walk.issued() if event[0] == "gather"] == []
    gathering.gather_updated()
    assert walk.issued() == gathers(0, 1, 2)
    for left in reversed(range(depth)):
        assert walk.resident == [0, 1, 2]
        gathering.close()
        assert gathering.is_open == bool(left)
    assert walk.resident == []


def test_after_a_step_nothing_is_gathered_before_it_is_used() -> None:
    walk = Walk(2)
    walk.gathering.gather_updated()
    assert walk.issued() == []
    joined = walk.route.joined
    walk.gathering.make_current()
    assert (walk.issued(), walk.route.joined) == ([], joined + 1)
