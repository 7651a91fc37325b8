"""The stages: what each divides, and that what ranks keep covers a unit."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerokit
from zerokit.layout import Interval, Parameter, Unit
from zerokit.placement import stage_of

STAGES = st.sampled_from(Stage)


@st.composite
def units(draw: st.DrawFn) -> Unit:
    shapes = draw(st.lists(st.tuples(st.integers(0, 300)), min_size=1, max_size=5))
    parameters = tuple(Parameter(f"p{place}", shape) for place, shape in enumerate(shapes))
    return Unit(0, ("module",), parameters, draw(st.integers(1, 9)))


@pytest.mark.parametrize(
    ("number", "optimizer", "gradients", "parameters"),
    [(0, False, False, False), (1, True, False, False), (2, True, True, False), (3, True, True, True)],
)
def test_each_stage_divides_one_thing_more(
    number: int, optimizer: bool, gradients: bool, parameters: bool
) -> None:
    stage = stage_of(number)
    assert int(stage) == number
    assert stage.divides_optimizer is optimizer
    assert stage.divides_gradients is gradients
    assert stage.divides_parameters is parameters


@pytest.mark.parametrize(
    ("stage", "gradients", "updates", "buckets"),
    [
        (Stage.NOTHING, True, False, 0),
        (Stage.OPTIMIZER, False, True, 0),
        (Stage.GRADIENTS, False, True, 3),
        (Stage.PARAMETERS, False, False, 2),
    ],
)
def test_what_is_gathered_and_how_many_buckets_are_shared(
    stage: Stage, gradients: bool, updates: bool, buckets: int
) -> None:
    assert stage.gathers_gradients is gradients
    assert stage.gathers_updates is updates
    assert stage.pooled_buckets == buckets


@pytest.mark.parametrize("number", [-1, 4, 2.5, "3", None])
def test_other_stages_are_refused(number: int) -> None:
    with pytest.raises(zerokit.UsageError, match="is unknown"):
        stage_of(number)


@given(units(), STAGES)
def test_what_is_divided_tiles_the_unit_over_ranks_and_the_rest_is_whole(unit: Unit, stage: Stage) -> None:
    ranks = range(unit.world)
    for divided, pieces in (
        (stage.divides_parameters, [stage.kept_parameters(unit, rank) for rank in ranks]),
        (stage.divides_gradients, [stage.kept_gradients(unit, rank) for rank in ranks]),
        (stage.divides_optimizer, [stage.updated(unit, rank) for rank in ranks]),
    ):
        assert pieces[0].start == 0
        assert pieces[-1].stop == unit.numel
        if divided:
            assert pieces == [unit.shard(rank) for rank in ranks]
            assert all(one.stop == following.start for one, following in pairwise(pieces))
            assert len({piece.numel for piece in pieces}) == 1
        else:
            assert set(pieces) == {Interval(0, unit.numel)}


@given(units(), STAGES)
def test_a_rank_has_gradients_of_what_it_updates_and_parameters_of_both(unit: Unit, stage: Stage) -> None:
    for rank in range(unit.world):
        kept, reduced = stage.kept_parameters(unit, rank), stage.kept_gradients(unit, rank)
        updated = stage.updated(unit, rank)
        assert updated.intersection(reduced) == updated
        assert reduced.intersection(kept) == reduced
