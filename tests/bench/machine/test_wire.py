"""Measurements of the wire: who exchanges with whom."""

from __future__ import annotations

import pytest

from zerokit.bench.machine.wire import neighbour


@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 3), (2, 1), (4, 4, 4)])
def test_neighbours_on_an_axis_agree_about_each_other(sizes: tuple[int, ...]) -> None:
    ranks = iter(range(sum(sizes)))
    lines = [[next(ranks) for _ in range(size)] for size in sizes]
    for rank in range(sum(sizes)):
        other = neighbour(rank, lines)
        assert other is None or neighbour(other, lines) == rank
    alone = [rank for rank in range(sum(sizes)) if neighbour(rank, lines) is None]
    assert alone == [line[-1] for line in lines if len(line) % 2]
