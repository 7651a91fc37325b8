"""Plans as data: what is held, gathered, freed and reduced at each stop, for generated models and parts of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerokit.layout import Parameter, Unit
from zerokit.schedule import Cursor, Kind, Operation, Order, Plan


def line(scopes: list[tuple[str, ...]], frozen: set[int] = frozenset()) -> list[Unit]:  # type: ignore[assignment]
    return [
        Unit.equal(index, names, (Parameter(f"p{index}", (64,), trainable=index not in frozen),), 2)
        for index, names in enumerate(scopes)
    ]


def tell(plan: Plan) -> str:
    return " ".join(
        f"[{' '.join(map(str, plan.stops[number]))}]" if kind is Kind.USE else f"{kind.value}{number}"
        for kind, number in plan.operations
    )


def test_the_docstring_s_example() -> None:
    order = Order(((0,), (1,), (2,), (3,)), frozenset(), (3, 2, 1, 0))
    assert tell(order.forward) == "G0 [0] G1 F0 [1] G2 F1 [2] G3 F2 [3]"
    assert tell(order.backward) == "[3] G2 R3 F3 [2] G1 R2 F2 [1] G0 R1 F1 [0] R0"
    assert tell(order.backward_afresh) == f"G3 {tell(order.backward)}"


def test_a_frozen_base_and_its_adapters_share_stops() -> None:
    """Blocks of LoRA: frozen units 0, 2 and 4 with an adapter of their own, or with one unit of all adapters."""
    own = Order.of_line(line([("a",), ("a",), ("b",), ("b",), ("c",), ("c",)], {0, 2, 4}))
    assert tell(own.forward) == "G0 G1 [0 1] G2 G3 F0 F1 [2 3] G4 G5 F2 F3 [4 5]"
    assert own.reduced == (5, 3, 1)
    joined = Order.of_line(line([("a",), ("a", "b", "c"), ("b",), ("c",)], {0, 2, 3}))
    assert tell(joined.forward) == "G0 G1 [0 1] G2 F0 [1 2] G3 F2 [1 3]"
    assert tell(joined.backward) == "[1 3] G2 F3 [1 2] G0 F2 [0 1] R1"


def test_kept_units_stay_from_their_first_use_to_the_end() -> None:
    order = Order.of_line(line([(), ("a",), ("b",), ()])).recorded([(1,), (2,), (3,)], frozenset({0, 3}), [0])
    assert order.stops == ((0,), (1,), (2,), (3,))
    assert tell(order.forward) == "G0 [0] G1 [1] G2 F1 [2] G3 [3]"
    assert tell(order.backward) == "[2] G1 R3 R2 F2 [1] R1 R0"


def test_a_recorded_order_ends_with_each_unit_once_at_least() -> None:
    units = line([("a",), ("b",), ("c",), ("d",)])
    order = Order.of_line(units).recorded([(2,), (2,), (0,), (2,)], frozenset(), [])
    assert order.stops == ((2,), (0,), (1,), (2,), (3,))


# ---- generated


@st.composite
def orders(draw: st.DrawFn) -> Order:
    count = draw(st.integers(1, 6))
    rest = draw(st.sets(st.integers(0, count - 1), max_size=2))
    names = iter("abcdefghij")
    scopes: list[tuple[str, ...]] = []
    for index in range(count):
        shared = (
            index and index - 1 not in rest and draw(st.booleans())
        )  # a unit of the same module, as frozen ones are
        scopes.append(() if index in rest else scopes[-1] if shared else (next(names),))
    frozen = draw(st.sets(st.integers(0, count - 1)))
    prefetch = draw(st.integers(0, 3))
    order = Order.of_line(line(scopes, frozen), prefetch, draw(st.frozensets(st.integers(0, count - 1))))
    if draw(st.booleans()):
        stop = st.sets(st.integers(0, count - 1), min_size=1, max_size=3).map(
            lambda units: tuple(sorted(units))
        )
        early = draw(st.sets(st.integers(0, count - 1), max_size=1))
        first = draw(st.sets(st.sampled_from(sorted(rest)), max_size=2)) if rest else set()
        order = order.recorded(draw(st.lists(stop, max_size=8)), order.kept | early, sorted(first))
    return order


class Memory:
    """What a rank holds while it performs operations; every gather and free must be of use."""

    def __init__(self, order: Order, held: set[int]) -> None:
        self.order, self.held, self.issued = order, held - order.whole, list[Operation]()

    def perform(self, operations: Any) -> None:
        for operation in operations:
            self.issued.append(operation)
            if operation.kind is Kind.GATHER:
                assert operation.number not in self.held, "gathered twice"
                assert operation.number not in self.order.whole
                self.held.add(operation.number)
            elif operation.kind is Kind.FREE:
                self.held.remove(operation.number)

    def use(self, cursor: Cursor, number: int, plan: Plan) -> None:
        """Come to the stop `number` of a plan."""
        use = next(at for at, each in enumerate(plan.operations) if each == (Kind.USE, number))
        stop = plan.stops[number]
        self.perform(cursor.come_to(use))
        assert (self.held | self.order.whole).issuperset(stop)
        self.perform(cursor.go_ahead())
        assert (self.held | self.order.whole).issuperset(stop)
        moving = [stop for stop in plan.stops if not self.order.kept.issuperset(stop)]
        widest = max((len(set(stop) - self.order.kept) for stop in moving), default=0)
        assert self.order.prefetch is not None
        assert len(self.held - self.order.kept) <= widest * (1 + self.order.prefetch)


def pass_through(order: Order, plan: Plan, held: set[int], made: list[int]) -> Memory:
    memory, cursor = Memory(order, held), Cursor(plan)
    for number in made:
        memory.use(cursor, number, plan)
    memory.perform(cursor.finish())
    return memory


@given(orders(), st.data())
def test_ranks_that_leave_stops_out_issue_the_same(order: Order, data: st.DataObject) -> None:
    """Whatever part of a plan a rank makes, it issues the plan's collectives in the plan's order."""
    for plan, held in (
        (order.forward, set[int]()),
        (order.backward, {*order.kept, *order.last}),
        (order.backward_afresh, set(order.kept)),
    ):
        numbers = [operation.number for operation in plan.operations if operation.kind is Kind.USE]
        whole = pass_through(order, plan, set(held), numbers)
        part = pass_through(order, plan, set(held), [n for n in numbers if data.draw(st.booleans())])
        assert whole.issued == part.issued == [each for each in plan.operations if each.kind is not Kind.USE]
        assert whole.held == part.held


@given(orders())
def test_each_pass_ends_with_what_the_next_one_expects(order: Order) -> None:
    everything = {unit for stop in order.stops for unit in stop}
    assert everything == set(order.units)
    forward = pass_through(order, order.forward, set(), [])
    assert forward.held == {*order.kept, *order.last} - order.whole
    reduced = Counter(order.backward.units(Kind.REDUCE))
    assert reduced == Counter(order.reduced) == Counter(order.backward_afresh.units(Kind.REDUCE))
    backward = pass_through(order, order.backward, forward.held, [])
    first = next((moving for stop in order.stops if (moving := set(stop) - order.kept)), set())
    assert backward.held == (order.kept | first) - order.whole


@given(orders())
def test_a_unit_is_reduced_behind_its_last_stop(order: Order) -> None:
    at: dict[int, int] = {}
    for place, (kind, number) in enumerate(order.backward.operations):
        if kind is Kind.USE:
            at |= dict.fromkeys(order.backward.stops[number], place)
        elif kind is Kind.REDUCE and number not in order.kept:
            assert at[number] < place
    for unit, place in at.items():
        reduced = [p for p, each in enumerate(order.backward.operations) if each == (Kind.REDUCE, unit)]
        assert not reduced or place < reduced[0]


@given(orders())
def test_recomputation_frees_nothing_that_backward_has_not_left(order: Order) -> None:
    """A checkpoint over all stops comes to each of them in forward order, before backward does."""
    plan = order.backward
    cursor = Cursor(plan)
    uses = [at for at, each in enumerate(plan.operations) if each.kind is Kind.USE]
    if not uses:
        return
    issued = list(cursor.come_to(uses[-1], leaves=False))
    assert Kind.FREE not in {kind for kind, _ in issued}
    frees = []
    for use in uses:
        frees += [*cursor.come_to(use), *cursor.go_ahead()]
    frees += cursor.finish()
    gathers = [op for op in [*issued, *frees] if op.kind is Kind.GATHER]
    assert gathers == [op for op in plan.operations if op.kind is Kind.GATHER]
    assert [op for op in frees if op.kind is Kind.FREE] == [
        op for op in plan.operations if op.kind is Kind.FREE
    ]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_a_cursor_finds_uses_from_where_it_is(prefetch: int) -> None:
    order = Order(((0,), (1,), (0,)), frozenset(), (1, 0), prefetch)
    cursor = Cursor(order.forward)
    first = cursor.find(0)
    assert first is not None
    list(cursor.come_to(first))
    assert cursor.find(0) == first
    between = cursor.find(1)
    assert between is not None
    assert between > first
    list(cursor.come_to(between))
    assert cursor.find(0) not in (None, first)
    assert cursor.find(2) is None
