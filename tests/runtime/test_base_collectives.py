"""What every route does alike: it counts, knows its place in a unit, and keeps a hash of what was issued."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.support.recording import RecordingRoute
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.collectives.base import Numbers, Tally

Call = tuple[bool, int]
CALLS = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=12)


def issue(route: Collectives, calls: Sequence[Call], *, numel: int = 6, payload: int = 5) -> None:
    """Gathers (True) and reductions (False) of units, each waited for."""
    for gathers, unit in calls:
        whole = torch.zeros(route.world * numel)
        if gathers:
            route.all_gather(whole, unit, payload).wait()
        else:
            route.reduce_scatter(whole, torch.zeros(numel), unit, payload, add=False).wait()


@given(CALLS, st.integers(1, 4), st.integers(0, 7), st.integers(0, 24))
def test_payload_is_counted_over_all_ranks_and_what_arrives_with_its_padding(
    calls: list[Call], world: int, numel: int, payload: int
) -> None:
    route = RecordingRoute(0, world)
    issue(route, calls, numel=numel, payload=payload)
    counted = route.counters.by_operation
    for operation, kind in (("all_gather", True), ("reduce_scatter", False)):
        times = [gathers for gathers, _ in calls].count(kind)
        elements = times * (world - 1) * payload
        assert counted.get(operation, Tally()) == Tally(times, elements, 4 * elements)
    assert route.counters.received_bytes == len(calls) * (world - 1) * numel * 4
    assert route.counters.control_calls == 0
    assert route.watch.issued == len(calls)


def test_bytes_are_of_the_wires_type_and_control_values_are_counted_apart() -> None:
    route = RecordingRoute(0, 3)
    route.all_gather(torch.zeros(6, dtype=torch.bfloat16), 0, 6).wait()
    assert route.counters.by_operation["all_gather"] == Tally(1, 12, 24)
    route.all_reduce(torch.zeros(5, dtype=torch.float64), dist.ReduceOp.MAX)
    route.broadcast(torch.zeros(2, dtype=torch.int64))
    assert (route.counters.control_calls, route.counters.control_bytes) == (2, 7 * 8 * 2)
    assert list(route.counters.by_operation) == ["all_gather"]
    assert route.watch.issued == 3


def hashed(calls: Sequence[Call]) -> int:
    route = RecordingRoute()
    issue(route, calls)
    return route.schedule


@given(CALLS, CALLS, st.booleans())
def test_the_hash_tells_sequences_of_a_kind_apart_and_not_how_kinds_interleave(
    one: list[Call], other: list[Call], kind: bool
) -> None:
    assert hashed(one) == hashed(sorted(one, key=lambda call: call[0]))
    same = [unit for _, unit in one] == [unit for _, unit in other]
    assert (hashed([(kind, unit) for _, unit in one]) == hashed([(kind, unit) for _, unit in other])) == same


def test_the_hash_tells_which_kind_went_another_way() -> None:
    assert hashed([(True, 1), (False, 0)]) != hashed([(True, 0), (False, 1)])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_own_piece_that_lies_elsewhere_is_copied_into_its_place(rank: int) -> None:
    route = RecordingRoute(rank, 3)
    route.wholes[7] = torch.arange(6.0)
    whole = torch.full((6,), -1.0)
    own = torch.arange(6.0)[2 * rank : 2 * rank + 2].clone()
    work = route.all_gather(whole, 7, 6, own=own)
    assert whole[2 * rank : 2 * rank + 2].tolist() == own.tolist()
    assert whole.isnan().sum() == 4
    work.wait()
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("given_own", [True, False])
def test_an_own_piece_in_its_place_is_not_written(given_own: bool) -> None:
    route = RecordingRoute(1, 3)
    whole = torch.arange(6.0)
    piece = whole[2:4]
    copies: list[Tensor] = []

    class Counted(Tensor):
        def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:
            copies.append(source)
            return self

    route.all_gather(whole.as_subclass(Counted), 0, 6, own=piece if given_own else None)
    assert copies == []
    route.all_gather(whole.as_subclass(Counted), 0, 6, own=whole[:2])
    assert len(copies) == 1


class Noting:
    """A collective that somebody may chain another to."""

    def __init__(self, route: RecordingRoute) -> None:
        self._route = route

    def wait(self) -> None:
        self._route.events.append(("waited", 0))


def test_a_gather_after_another_collective_waits_for_it_first() -> None:
    route = RecordingRoute()
    route.all_gather(torch.zeros(4), 1, 4, after=Noting(route))
    assert route.take() == [("waited", 0), ("gather", 1)]


def test_empty_units_move_nothing_and_are_counted() -> None:
    route = RecordingRoute()
    route.all_gather(torch.zeros(0), 1, 0).wait()
    route.reduce_scatter(torch.zeros(0), torch.zeros(0), 1, 0, add=True).wait()
    after = Noting(route)
    assert route.all_gather(torch.zeros(0), 2, 0, after=after) is after
    assert route.take() == []
    assert route.counters.by_operation == {"all_gather": Tally(2), "reduce_scatter": Tally(1)}
    assert route.schedule != RecordingRoute().schedule


class Speaking(RecordingRoute):
    """The other rank's control values are the greater ones where `said` has more; rank 0 sends what `sent` holds."""

    said: Tensor
    sent: list[Tensor]

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        assert op == dist.ReduceOp.MAX
        values.copy_(torch.maximum(values, self.said))

    def broadcast(self, values: Tensor) -> None:
        super().broadcast(values)
        if self.rank:
            values.copy_(self.sent.pop(0))


@pytest.mark.parametrize(
    ("flag", "last"), [(None, 0.0), (torch.tensor(True), 1.0), (torch.tensor(False), 0.0)]
)
def test_the_greatest_of_each_value_and_of_the_flag(flag: Tensor | None, last: float) -> None:
    route = Speaking()
    route.said = torch.tensor([5.0, -9.0, 0.0], dtype=torch.float64)
    reading = route.agree_soon([2.0**53 - 1, -2.0], flag)
    assert reading.get() == [2.0**53 - 1, -2.0, last]
    route.said[2] = 1.0
    assert route.agree_soon([1.0, -10.0], flag).get() == [5.0, -9.0, 1.0]


def test_numbers_are_read() -> None:
    route = RecordingRoute()
    assert route.read(torch.tensor([[1.5, 2.0], [3.0, 4.0]])) == [1.5, 2.0, 3.0, 4.0]
    assert route.read(torch.tensor(7)) == [7]
    assert Numbers(torch.tensor([1.0])).get() == [1.0]


@pytest.mark.parametrize("numbers", [[], [3], [2**40, -1, 0]])
def test_rank_0s_list_whatever_this_rank_has(numbers: list[int]) -> None:
    assert Speaking(rank=0).broadcast_list(numbers) == numbers
    other = Speaking(rank=1)
    other.sent = [torch.tensor([len(numbers)]), torch.tensor(numbers, dtype=torch.int64)]
    assert other.broadcast_list([9, 9, 9, 9, 9]) == numbers
    assert other.counters.control_calls == 2


def test_one_rank_alone_asks_nobody() -> None:
    alone = RecordingRoute(0, 1)
    values = torch.tensor([3.0])
    Collectives.all_reduce(alone, values, dist.ReduceOp.SUM)
    Collectives.broadcast(alone, values)
    Collectives.agree(alone, "turns")
    assert values.tolist() == [3.0]
    assert (alone.counters.control_calls, alone.counters.control_bytes) == (2, 0)


def test_a_route_must_say_how_it_moves_tensors() -> None:
    route = RecordingRoute()
    with pytest.raises(NotImplementedError, match="RecordingRoute defines no all-gather"):
        Collectives._all_gather(route, torch.zeros(2), 0)
    with pytest.raises(NotImplementedError, match="RecordingRoute defines no reduce-scatter"):
        Collectives._reduce_scatter(route, torch.zeros(2), torch.zeros(1), 0, False, torch.float32)
