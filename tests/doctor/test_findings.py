"""Who shares a finding, and how its place is answers."""

from __future__ import annotations

from tests.doctor.healthy import seat
from zerokit.doctor.findings import by_machine, by_rank, ok, warning, where

SEATS = [seat(rank, ranks_a_node=2) for rank in range(8)]


def test_places_are_whole_nodes_where_they_can_be() -> None:
    assert where(SEATS, SEATS) == ""
    assert where(SEATS[2:4], SEATS) == "node 1 (host-1)"
    assert where(SEATS[2:], SEATS) == "nodes 1–3 (host-1, host-2, host-3)"
    assert where([SEATS[3]], SEATS) == "rank 3 (host-1)"
    assert where([SEATS[0], *SEATS[2:5]], SEATS) == "ranks 0, 2–4 (host-0, host-1, host-2)"


def test_ranks_with_the_same_verdict_share_a_finding() -> None:
    answers = [(one, one.rank % 2) for one in SEATS]
    findings = by_rank("ZD403", answers, lambda odd: warning("few", "m", "r") if odd else ok("many"))
    assert [(one.found, one.where) for one in findings] == [
        ("many", "ranks 0, 2, 4, 6 (host-0, host-1, host-2, host-3)"),
        ("few", "ranks 1, 3, 5, 7 (host-0, host-1, host-2, host-3)"),
    ]


def test_of_a_machine_the_first_rank_is_asked() -> None:
    answers = [(one, one.rank) for one in SEATS]
    findings = by_machine("ZD401", answers, lambda rank: ok(str(rank)))
    assert [(one.found, one.where[:6]) for one in findings] == [
        (str(2 * node), f"node {node}") for node in range(4)
    ]
