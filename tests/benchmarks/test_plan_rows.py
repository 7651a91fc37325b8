"""Published throughput beside the plan's: rows beyond one node, which nothing was fitted to, meet the bars."""

from __future__ import annotations

from statistics import median

import pytest

from benchmarks.plan_memory import plan_memory
from benchmarks.plan_rows import CHECKED, purpose, read_rows, throughput
from zerokit.planning.efficiency import SHARES


def test_rows_beyond_one_node_are_planned_within_the_bars() -> None:
    rows = [row for row in read_rows() if purpose(row, SHARES[row.device]) == CHECKED]
    errors = {row: abs(throughput(row, SHARES[row.device]) / row.tokens_per_s_per_gpu - 1) for row in rows}
    assert len(rows) > 70
    assert median(errors.values()) <= 0.05
    assert max(errors.values()) <= 0.15, max(errors, key=errors.__getitem__)


def test_every_device_is_calibrated_on_rows_of_one_node() -> None:
    rows = read_rows()
    assert {row.device for row in rows} == {row.device for row in rows if row.one_node} == set(SHARES)


def test_published_memory() -> None:
    """The row of an eager model: `python -m benchmarks.plan_memory` has the others, which take as long each."""
    (row,) = (row for row in read_rows() if row.memory is not None and row.model == "llama-3-15b")
    assert row.memory is not None
    assert plan_memory(row) / 2**30 == pytest.approx(row.memory.gib, rel=0.02)
