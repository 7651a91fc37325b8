"""A tensor that holds a stretch of a unit: what is asked for by coordinates is what was put there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.recording import plain_unit
from zerokit.layout import Cut, Interval, Parameter, Unit
from zerokit.runtime.shards import Shards, same_place

NUMEL = 24
UNIT = plain_unit(0, NUMEL, 3)
STRETCHES = st.tuples(st.integers(0, NUMEL), st.integers(0, NUMEL)).map(lambda ends: Interval(*sorted(ends)))


def _numbered(interval: Interval) -> Shards:
    """Elements that are called by their coordinates."""
    return Shards(UNIT, torch.arange(interval.start, interval.stop), interval)


@given(STRETCHES, STRETCHES)
def test_an_element_is_found_by_its_coordinate(held: Interval, wanted: Interval) -> None:
    shards = _numbered(held)
    assert shards.at(wanted).tolist() == sorted(
        {*range(held.start, held.stop)} & {*range(wanted.start, wanted.stop)}
    )
    if wanted.numel:
        assert shards.covers(wanted) == (len(shards.at(wanted)) == wanted.numel)
    shards.at(wanted).fill_(-1)  # the tensor's own memory
    assert (shards.tensor == -1).sum() == len(shards.at(wanted))


@given(STRETCHES, STRETCHES)
def test_a_copy_takes_what_both_have(held: Interval, given: Interval) -> None:
    shards = _numbered(held).like(torch.zeros(held.numel))
    shards.copy(_numbered(given))
    assert shards.tensor.tolist() == [
        float(at if given.start <= at < given.stop else 0) for at in range(held.start, held.stop)
    ]


def test_pieces_and_rows_are_those_of_a_cut_of_what_is_held() -> None:
    shards = _numbered(Interval(8, 24))
    assert [piece.tolist() for piece in shards.pieces(Cut((8, 9, 24)))] == [[8], list(range(9, 24))]
    assert shards.rows(UNIT.cut.part(1, 2)).tolist() == [list(range(8, 16)), list(range(16, 24))]
    with pytest.raises(ValueError, match="into equal pieces, not one at 8, 9, 24"):
        shards.rows(Cut((8, 9, 24)))


def test_parameters_are_views_of_a_whole_unit() -> None:
    unit = Unit.equal(0, (), (Parameter("a", (2, 3)), Parameter("nothing", (0, 4)), Parameter("b", ())), 2)
    whole = Shards(unit, torch.arange(float(unit.numel)))
    assert [tuple(view.shape) for view in whole.views()] == [(2, 3), (0, 4), ()]
    assert whole.views()[2].item() == 64.0
    assert whole.payload_numel == 7
    assert same_place(whole.views()[0].view(-1), whole.tensor[:6])
    assert not same_place(whole.tensor[1:7], whole.tensor[:6])
    assert not same_place(whole.tensor.clone(), whole.tensor)
