"""What ranks hold at each stage of each axis: the table, the pieces and the hops."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import zerokit
from zerokit.layout import Interval, Parameter, Unit
from zerokit.placement import Axis, Mesh, Placement, stage_of

PAIRS = [(outer, inner) for inner in range(4) for outer in range(inner + 1)]
OUTER, INNER = Axis


@st.composite
def placed(draw: st.DrawFn) -> tuple[Unit, Placement]:
    """A unit of any parameters, on a mesh of one axis or two."""
    shapes = draw(st.lists(st.tuples(st.integers(0, 300)), min_size=1, max_size=5))
    mesh = Mesh(draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    pair = draw(st.sampled_from(PAIRS))
    stage: Any = pair if mesh.outer > 1 else pair[1]
    parameters = tuple(Parameter(f"p{place}", shape) for place, shape in enumerate(shapes))
    return Unit.equal(0, ("module",), parameters, mesh.world), Placement.of(stage, mesh)


@pytest.mark.parametrize(
    ("stage", "use", "update", "sums", "buckets"),
    [
        (0, (), (), (INNER,), 0),
        (1, (), (INNER,), (), 0),
        (2, (), (INNER,), (), 3),
        (3, (INNER,), (), (), 2),
        ((0, 0), (), (), (OUTER, INNER), 0),
        ((0, 1), (), (INNER,), (OUTER,), 0),
        ((1, 1), (), (OUTER, INNER), (), 0),
        ((0, 3), (INNER,), (), (OUTER,), 2),
        ((1, 3), (INNER,), (OUTER,), (), 2),
        ((2, 3), (INNER,), (OUTER,), (), 2),
        ((3, 3), (OUTER, INNER), (), (), 2),
    ],
)
def test_the_hops(stage: Any, use: Any, update: Any, sums: Any, buckets: int) -> None:
    placement = Placement.of(stage, Mesh(2, 2) if isinstance(stage, tuple) else Mesh(1, 4))
    assert (placement.use, placement.update, placement.sums) == (use, update, sums)
    assert placement.pooled_buckets == buckets
    assert str(placement) == str(stage).strip("()").replace(", ", "/")


@given(placed())
def test_pieces_tile_the_unit_and_contain_what_is_updated(case: tuple[Unit, Placement]) -> None:
    unit, placement = case
    positions = range(unit.world)
    assert sorted(map(placement.mesh.position, positions)) == list(positions)
    for kind in (placement.parameters, placement.gradients, placement.updated):
        pieces = sorted({kind(unit, position) for position in positions})
        assert pieces[0].start == 0
        assert pieces[-1].stop == unit.numel
        assert all(one.stop >= other.start for one, other in pairwise(pieces))
    for rank in positions:
        position = placement.mesh.position(rank)
        assert placement.mesh.rank(position) == rank
        own, updated = unit.shard(position), placement.updated(unit, position)
        for smaller, larger in (
            (own, updated),
            (updated, placement.gradients(unit, position)),
            (updated, placement.parameters(unit, position)),
        ):
            assert smaller.intersection(larger) == smaller


@given(placed())
def test_ranks_of_an_axis_hold_the_same_or_each_a_piece(case: tuple[Unit, Placement]) -> None:
    unit, placement = case
    mesh = placement.mesh
    for rank in range(mesh.world):
        for axis in mesh.axes:
            members = mesh.members(axis, rank)
            assert rank in members
            assert len(members) == mesh.size(axis)
            held = {placement.parameters(unit, mesh.position(member)) for member in members}
            whole = sum(piece.numel for piece in held)
            if axis in placement.use:
                outside = Interval(0, unit.numel) if axis is INNER else None
                assert outside is None or whole * (mesh.outer if OUTER in placement.use else 1) == unit.numel
            else:
                assert len(held) == 1


@pytest.mark.parametrize("number", [-1, 4, 2.5, "3", None, True])
def test_other_stages_are_refused(number: Any) -> None:
    with pytest.raises(zerokit.UsageError, match="is unknown: 0 shards nothing"):
        stage_of(number)
    with pytest.raises(zerokit.UsageError, match="is unknown"):
        Placement.of((0, number), Mesh(2, 2))


@pytest.mark.parametrize(
    ("stage", "mesh", "text"),
    [
        ((3, 1), Mesh(2, 2), r"write stage=\(1, 3\)"),
        ((1, 3), Mesh(1, 4), r"the mesh has one \(4 ranks\): pass mesh=\(outer, inner\)"),
        ((1, 2, 3), Mesh(2, 2), "expected one stage, or two"),
    ],
)
def test_pairs_that_do_not_fit_are_refused(stage: Any, mesh: Mesh, text: str) -> None:
    with pytest.raises(zerokit.UsageError, match=text):
        Placement.of(stage, mesh)
