"""Kinds of devices by rank, and the arithmetic of shares and batches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerokit.cuts import MAX_SHARE
from zerokit.errors import UsageError
from zerokit.placement import Mesh
from zerokit.planning.hardware import DEVICES
from zerokit.planning.kinds import (
    LARGEST_SHARE,
    Kind,
    by_rank,
    deal,
    lies_alike,
    paces_of,
    parse_devices,
    shares_of,
    stand_in,
    world_of,
)

BYTES = st.integers(-(10**12), 10**12)


def test_kinds_have_ranks_in_the_order_of_their_names() -> None:
    kinds = parse_devices("h100-80x2, l40s-48x1,h100-80x1")
    assert [(str(kind), kind.ranks) for kind in kinds] == [("h100-80", (0, 1, 3)), ("l40s", (2,))]
    assert by_rank(kinds) == (0, 0, 1, 0)
    assert stand_in(kinds).name == "h100-80x2,l40sx1,h100-80x1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("h100-81x4", "device 'h100-81' is unknown: choose one of a100-40"),
        ("h100-81x4,l40sx4", "device 'h100-81' is unknown"),
        ("l40s-80x4", "device 'l40s-80' is unknown"),
        ("h100-80x0,l40sx4", "'h100-80x0' has no name and number: expected a kind, x and how many"),
        ("h100-80x-1", "'h100-80x-1' has no name and number"),
        ("h100-80x²", "has no name and number"),
        ("h100-80", "'h100-80' has no name and number"),
        ("x4", "'x4' has no name and number"),
        ("h100-80x4,", "'' has no name and number"),
        ("", "'' has no name and number"),
        ("cpux2,l40sx4", "cpu is no kind in a mixture.*--gpus 2 --device cpu"),
        ("h100-80x16384,l40sx1", "names more than 16,384 ranks"),
        ("h100-80x99999999999", "has no name and number"),
    ],
)
def test_what_is_no_kind_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_devices(text)


@given(st.lists(st.tuples(st.sampled_from(sorted(DEVICES)), st.integers(1, 9)), min_size=1, max_size=6))
def test_every_rank_has_the_kind_that_its_place_names(parts: list[tuple[str, int]]) -> None:
    text = ",".join(f"{name}x{count}" for name, count in parts)
    kinds = parse_devices(text)
    named = [name for name, count in parts for _ in range(count)]
    assert world_of(kinds) == len(named)
    assert [str(kinds[number]) for number in by_rank(kinds)] == named
    assert parse_devices(stand_in(kinds).name) == kinds
    assert len({str(kind) for kind in kinds}) == len(kinds)


@given(st.lists(st.sampled_from("ab"), min_size=1, max_size=6), st.integers(1, 4))
def test_repeated_groups_lie_alike_and_others_do_not(group: list[str], outer: int) -> None:
    def kinds(names: list[str]) -> list[Kind]:
        ranks = {name: tuple(rank for rank, each in enumerate(names) if each == name) for name in names}
        return [Kind(DEVICES[{"a": "h200", "b": "l40s"}[name]], own) for name, own in ranks.items()]

    assert lies_alike(kinds(group * outer), Mesh(outer, len(group)))
    other = [{"a": "b", "b": "a"}[group[0]], *group[1:]]
    assert not lies_alike(kinds(group * outer + other), Mesh(outer + 1, len(group)))


@given(st.lists(BYTES, min_size=1, max_size=5), st.data())
def test_more_memory_never_gives_a_smaller_share(spare: list[int], data: st.DataObject) -> None:
    shares = shares_of(spare)
    assert all(0 <= share <= LARGEST_SHARE <= MAX_SHARE for share in shares)
    assert any(shares)
    for (one, own), (two, other) in zip(
        zip(spare, shares, strict=True), zip(spare[1:], shares[1:], strict=True), strict=False
    ):
        assert one < two or own >= other
        assert two < one or other >= own
    number = data.draw(st.integers(0, len(spare) - 1))
    counts = data.draw(st.lists(st.integers(1, 64), min_size=len(spare), max_size=len(spare)))
    more = [each + (at == number) * data.draw(st.integers(0, 10**12)) for at, each in enumerate(spare)]
    grown = shares_of(more)

    def part(shares: tuple[int, ...]) -> float:
        total = sum(share * count for share, count in zip(shares, counts, strict=True))
        return shares[number] / total

    if any(each > 0 for each in spare):
        assert part(grown) >= part(shares)


@given(st.lists(st.integers(1, 10**12), min_size=1, max_size=5))
def test_shares_are_in_proportion_to_what_is_spare(spare: list[int]) -> None:
    for each, share in zip(spare, shares_of(spare), strict=True):
        assert abs(share - LARGEST_SHARE * each / max(spare)) <= 0.5


SPEEDS = st.lists(st.floats(1.0, 20.0), min_size=1, max_size=8)


@given(SPEEDS, st.integers(1, 16))
def test_samples_are_dealt_so_that_the_slowest_rank_is_done_soonest(speeds: list[float], mean: int) -> None:
    pace = paces_of(speeds)
    assert min(pace) == 1.0
    assert pace == pytest.approx([speed / min(speeds) for speed in speeds], rel=0.051)
    total = mean * len(pace)
    dealt = deal(total, pace)
    assert sum(dealt) == total
    assert min(dealt) >= 1
    slowest = max(own / each for own, each in zip(dealt, pace, strict=True))
    # No time below would do: in it ranks could compute fewer samples than there are.
    sooner = min(slowest / 1.0011, slowest - 1e-9)
    assert sum(int(sooner * each) for each in pace) < total or sooner < 1


@given(st.integers(1, 8), st.integers(1, 8), st.integers(2, 20))
def test_a_device_twice_as_fast_gets_about_twice_the_samples(slow: int, fast: int, mean: int) -> None:
    dealt = deal(mean * (slow + fast), paces_of([3.0] * slow + [6.0] * fast))
    for own in dealt[slow:]:
        for other in dealt[:slow]:
            assert abs(own - 2 * other) <= 3


@given(st.integers(1, 16), st.integers(1, 16))
def test_equal_devices_get_equal_batches(world: int, mean: int) -> None:
    assert deal(mean * world, paces_of([0.7] * world)) == (mean,) * world
