"""The order of collectives: no rank can wait for what another cannot issue, whatever units each of them uses."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from zerokit.runtime.order import BackwardPlan, Order
from zerokit.runtime.passes import ForwardPass

UNITS = st.lists(st.integers(0, 5), min_size=1, max_size=12)


@given(UNITS, st.data())
def test_places_are_issued_once_and_in_order(units: list[int], data: st.DataObject) -> None:
    order = Order(units)
    issued: list[int] = []
    for unit in data.draw(st.lists(st.integers(0, 5), max_size=8)):
        place = order.find(unit)
        if place is None:
            assert unit not in units[max(order.cursor, 0) :]
            continue
        assert place >= max(order.cursor, 0)
        assert unit not in units[max(order.cursor, 0) : place]
        order.cursor = place
        issued += order.issue(place + 1)
        assert order.holds(unit)
        issued += order.issue(place + 2)
    issued += order.issue(len(units))
    assert issued == list(range(len(units)))


def test_a_unit_that_comes_again() -> None:
    order = Order([3, 1, 3])
    order.cursor = 0
    assert list(order.issue(1)) == [0]
    assert order.comes_again(3)
    assert order.holds(3)
    order.cursor = 1
    assert not order.holds(3)
    order.restart()
    assert (order.cursor, order.issued) == (-1, 0)


def plan(gathers: Sequence[int], early: Sequence[int], late: Sequence[int]) -> BackwardPlan:
    return BackwardPlan.of(gathers, early=early, trainable={*gathers, *early, *late}, late=late)


def test_the_order_that_its_note_shows() -> None:
    found = plan([3, 2, 1, 0], early=[9], late=[8])
    assert found.reductions == (9, 3, 2, 1, 0, 8)
    # Before the gathers of d, c, b and a: nothing, the head's, d's, c's.
    assert [found.due(place) for place in range(4)] == [0, 1, 2, 3]
    assert [found.allowed(issued) for issued in range(5)] == [0, 1, 2, 3, 6]


@given(UNITS, st.integers(0, 2), st.integers(0, 2))
def test_what_is_due_is_allowed_and_everything_in_the_end(gathers: list[int], early: int, late: int) -> None:
    found = plan(gathers, list(range(100, 100 + early)), list(range(200, 200 + late)))
    assert sorted(found.reductions) == sorted({*gathers, *range(100, 100 + early), *range(200, 200 + late)})
    assert found.allowed(len(gathers)) == len(found.reductions)
    for place in range(len(gathers)):
        # At the moment when a gather is issued, as many have been as its place says.
        assert found.due(place) == found.allowed(place)


def interleave(found: BackwardPlan, visits: Sequence[int]) -> list[tuple[str, int]]:
    """What a rank issues whose backward visits these places in turn, gradients of a unit arriving after its visit."""
    issued: list[tuple[str, int]] = []
    order, reduced = Order(found.gathers), 0

    def gather(stop: int) -> None:
        nonlocal reduced
        for place in order.issue(stop):
            while reduced < found.due(place):
                issued.append(("reduce", found.reductions[reduced]))
                reduced += 1
            issued.append(("gather", place))

    for place in visits:
        order.cursor = place
        gather(place + 2)
    gather(len(found.gathers))
    issued += [("reduce", unit) for unit in found.reductions[reduced:]]
    return issued


@given(UNITS, st.data())
def test_ranks_that_use_different_units_issue_the_same(gathers: list[int], data: st.DataObject) -> None:
    found = plan(gathers, [100], [200])
    places = st.sets(st.integers(0, len(gathers) - 1)).map(sorted)
    assert interleave(found, data.draw(places)) == interleave(found, data.draw(places))


@given(st.lists(st.integers(0, 5), max_size=10), st.integers(0, 5), st.data())
def test_a_unit_is_over_once_all_its_uses_lie_behind(uses: list[int], unit: int, data: st.DataObject) -> None:
    current = ForwardPass()
    for used in uses:
        current.use(used)
    assert current.uses == len(uses)
    # Backward meets an output made after so many uses: later uses, and only those, have been differentiated.
    behind = data.draw(st.integers(0, len(uses)))
    assert current.used(unit) == (unit in uses)
    assert current.over(unit, behind) == (unit not in uses[:behind])
    assert current.over(unit, None) == (unit not in uses)


@given(UNITS, st.integers(0, 9))
def test_what_is_issued_ahead_ends_before_a_unit_in_use(units: list[int], cursor: int) -> None:
    order = Order(units)
    order.cursor = min(cursor, len(units) - 1)
    needed = list(order.issue(order.cursor + 1))
    assert needed == list(range(order.cursor + 1))
    for place in order.issue(len(units), ahead=True):
        assert units[place] not in units[order.cursor : place]
    if order.issued < len(units):
        assert units[order.issued] in units[order.cursor : order.issued]
