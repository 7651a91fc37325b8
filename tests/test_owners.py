"""Properties of owners, over hundreds of generated models; small ones are checked element by element."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zerokit.errors import UsageError
from zerokit.layout import ALIGNMENT, Interval, Layout, Parameter, Segment, build_layout
from zerokit.owners import Cost, Owners, Shape, deal, default_cost, rows_of, whole_tensors
from zerokit.placement import AnyPlacement, Axis, Mesh, Placement, placed

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 200)),
    st.tuples(st.integers(0, 40), st.integers(1, 40)),
    st.sampled_from([(1, 97), (97, 1), (0, 4), (64, 64), (5, 3, 4), (2, 3, 3, 7), (300, 20)]),
)
MESHES = st.one_of(
    st.builds(Mesh, st.just(1), st.integers(1, 9)),
    st.sampled_from([Mesh(2, 2), Mesh(2, 3), Mesh(3, 2), Mesh(4, 4), Mesh(1, 64)]),
)
COSTS: st.SearchStrategy[Cost] = st.sampled_from(
    [default_cost, lambda shape: 1, lambda shape: 1.5 ** len(shape), lambda shape: 1 + sum(shape) % 7]
)
LINE = [0, 1, 2, 3]
PAIRS = [(outer, inner) for inner in range(4) for outer in range(inner + 1)]


@st.composite
def models(draw: st.DrawFn) -> tuple[Layout, dict[str, tuple[int, ...]]]:
    """A layout of parameters of two groups, some frozen, and rows of blocks of some."""
    segments = []
    rows = {}
    for index, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=12))):
        trainable = draw(st.integers(0, 6)) > 0
        scope = f"module.{index // 2}" if draw(st.booleans()) else None
        segments.append(
            Segment(
                scope, (Parameter(f"p{index}", shape, group=draw(st.integers(0, 1)), trainable=trainable),)
            )
        )
        if shape and shape[0] > 1 and draw(st.booleans()):
            first = draw(st.integers(1, shape[0] - 1))
            rows[f"p{index}"] = rows_of(f"p{index}", shape, (first, shape[0] - first))
    return build_layout(segments, world=1, bucket_bytes=draw(st.sampled_from([0, 4000, 1 << 20]))), rows


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layout, AnyPlacement, dict[str, tuple[int, ...]], Cost]:
    """A model on a mesh, at one stage or at several, with blocks and costs."""
    mesh = draw(MESHES)
    layout, rows = draw(models())
    layout = layout.for_world(mesh.world)
    stages = st.sampled_from(PAIRS if mesh.outer > 1 else LINE)
    one = draw(stages)
    each = [draw(stages) if draw(st.booleans()) else one for _ in layout.units]
    return layout, placed(each, mesh), rows, draw(COSTS)


def _by_owner(owners: Owners, layout: Layout, index: int) -> dict[int, list[Interval]]:
    found: dict[int, list[Interval]] = {}
    for tensor in owners.of_unit(index):
        found.setdefault(tensor.owner, []).append(tensor.interval)
    return found


@settings(max_examples=300, deadline=None)
@given(cases())
def test_every_element_has_one_owner_and_moves_there_once(case: Any) -> None:
    layout, placement, rows, cost = case
    owners = Owners(layout, placement, [1], rows, cost)
    assert owners.groups == {1}
    assert bool(owners) == bool(owners.units)
    for unit in layout.units:
        cut, tensors = owners.cut(unit), owners.of_unit(unit.index)
        elements = Counter(at for tensor in tensors for at in range(*_ends(tensor.interval)))
        wanted = [s for s in unit.slices if s.parameter.trainable and s.parameter.group == 1]
        assert elements == Counter(at for part in wanted for at in range(*_ends(part.memory)))
        assert all(math.prod(tensor.shape) == tensor.interval.numel > 0 for tensor in tensors)
        assert all(unit.parameters[tensor.position].group == tensor.group == 1 for tensor in tensors)
        # What an owner has at first, and what moves to it, are the whole tensor.
        moves = list(owners.moves(unit.index))
        for tensor in tensors:
            here = [cut.piece(tensor.owner).intersection(tensor.interval)]
            moved = [move.interval for move in moves if move.tensor == tensor]
            assert all(move.piece != tensor.owner for move in moves if move.tensor == tensor)
            assert all(cut.piece(move.piece).start <= move.interval.start for move in moves)
            assert all(move.interval.stop <= cut.piece(move.piece).stop for move in moves)
            ends = sorted(_ends(part) for part in here + moved if part.numel)
            assert [ends[0][0], ends[-1][1]] == list(_ends(tensor.interval))
            assert all(one[1] == other[0] for one, other in pairwise(ends))
        _require_apart(owners, unit.index, len(cut))


def _ends(interval: Interval) -> tuple[int, int]:
    return interval.start, interval.stop


def _require_apart(owners: Owners, index: int, pieces: int) -> None:
    """Where an owner has its tensors: aligned, one behind the other, in as much memory as it says."""
    for owner in range(pieces):
        end = 0
        for tensor in owners.owned(index, owner):
            assert tensor.start == end
            end = tensor.start + -(-tensor.interval.numel // ALIGNMENT) * ALIGNMENT
        assert owners.owned_numel(index, owner) == end
    assert sum(len(owners.owned(index, owner)) for owner in range(pieces)) == len(owners.of_unit(index))


@settings(max_examples=200, deadline=None)
@given(cases())
def test_at_most_two_psi_less_a_rank_move_there_and_back(case: Any) -> None:
    layout, placement, rows, cost = case
    owners = Owners(layout, placement, [0, 1], rows, cost)
    moved: Counter[int] = Counter()
    held: Counter[int] = Counter()
    for unit in layout.units:
        pieces = len(owners.cut(unit))
        held[pieces] += sum(tensor.interval.numel for tensor in owners.of_unit(unit.index))
        moved[pieces] += sum(move.interval.numel for move in owners.moves(unit.index))
        # Over all ranks: as many times as there are ranks that hold the same.
        crossing = owners.crossings(unit.index)
        copies = placement.mesh.world // pieces
        assert sum(crossing.values()) == copies * sum(
            move.interval.numel for move in owners.moves(unit.index)
        )
        assert placement.mesh.outer > 1 or not crossing.keys() - {Axis.INNER}
    for pieces, elements in moved.items():
        assert elements * pieces <= held[pieces] * (pieces - 1)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_every_rank_finds_the_same_owners(case: Any) -> None:
    layout, placement, rows, cost = case
    ones, others = (Owners(layout, placement, [1, 0], rows, cost) for _ in range(2))
    assert [ones.of_unit(unit.index) for unit in layout.units] == [
        others.of_unit(unit.index) for unit in layout.units
    ]
    assert ones.balance == others.balance >= 1.0 or not ones
    total = sum(ones.costs[tensor.shape] for index in ones.units for tensor in ones.of_unit(index))
    assert sum(ones.loads) >= total - 1e-6


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.lists(st.integers(0, 9), min_size=1, max_size=9))
def test_costs_are_dealt_out_by_shares(costs: list[int], shares: list[int]) -> None:
    """Who has most for its share had least for it when it was given the last."""
    assume(any(shares))
    loads = [0] * len(shares)
    for cost, owner in zip(costs, deal(costs, shares), strict=True):
        loads[owner] += cost
    assert all(share or not load for load, share in zip(loads, shares, strict=True))
    most = max(costs, default=0)
    by_share = [load / share for load, share in zip(loads, shares, strict=True) if share]
    last = [most / share for share in shares if share]
    assert max(by_share) - min(by_share) <= max(last)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 9))
def test_costs_are_dealt_out_evenly(costs: list[int], owners: int) -> None:
    """By LPT: at most 4/3 of the best, which is no less than the mean and the dearest (Graham 1969)."""
    loads = [0] * owners
    for cost, owner in zip(costs, deal(costs, [1] * owners), strict=True):
        loads[owner] += cost
    # Who has most was given the last one when it had least.
    assert max(loads) <= max(sum(costs) / owners + max(costs, default=0), max(costs, default=0))
    assert max(loads) - min(loads) <= max(costs, default=0)


def _llama_8b() -> list[Segment]:
    """The 224 matrices of Llama 8B's 32 blocks, a unit a block, and its embeddings and norms."""
    own = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096)}
    own |= {"gate": (14336, 4096), "up": (14336, 4096), "down": (4096, 14336)}
    blocks = [
        Segment(
            f"layers.{number}",
            (
                *(Parameter(f"layers.{number}.{name}", shape) for name, shape in own.items()),
                *(Parameter(f"layers.{number}.norm{at}", (4096,), group=1) for at in range(2)),
            ),
        )
        for number in range(32)
    ]
    rest = [Parameter("embedding", (128256, 4096), group=1), Parameter("head", (128256, 4096), group=1)]
    return [Segment(None, (rest[0],)), *blocks, Segment(None, (rest[1],))]


def test_the_matrices_of_llama_8b_are_even() -> None:
    whole = build_layout(_llama_8b(), world=1, bucket_bytes=16 << 20)
    psi = sum(math.prod(tensor.shape) for tensor in whole_tensors(whole, [0], {}))
    for ranks in (1, 2, 4, 8, 16, 32, 64, 128):
        layout = whole.for_world(ranks)
        owners = Owners(layout, Placement.of(2, Mesh(1, ranks)), [0])
        assert sum(len(owners.of_unit(index)) for index in owners.units) == 224
        assert owners.balance <= 1.06, ranks
        moved = sum(sum(owners.crossings(index).values()) for index in owners.units)
        assert 2 * moved <= 2 * psi * (ranks - 1) / ranks


def test_what_cannot_be_divided_evenly_is_divided_as_well_as_it_can_be() -> None:
    """Some of 80 ranks have two of the 96 largest matrices, and those ranks nothing else."""
    layout = build_layout(_llama_8b(), world=80, bucket_bytes=16 << 20)
    owners = Owners(layout, Placement.of(2, Mesh(1, 80)), [0])
    assert max(owners.loads) == 2 * default_cost((4096, 14336))


def test_the_cost_of_newton_and_schulz() -> None:
    assert default_cost((3, 5)) == default_cost((5, 3)) == 4 * 9 * 5 + 2 * 27
    assert [default_cost(shape) for shape in ((), (7,), (2, 3, 4))] == [1, 7, 24]


def test_costs_of_the_user_decide() -> None:
    segments = [Segment("m", tuple(Parameter(f"p{at}", (64, 1 + at)) for at in range(4)))]
    layout = build_layout(segments, world=2, bucket_bytes=0)
    asked: list[Shape] = []

    def by_columns(shape: Shape) -> float:
        asked.append(shape)
        return 10.0 if shape == (64, 1) else 1

    owners = Owners(layout, Placement.of(2, Mesh(1, 2)), [0], cost=by_columns)
    first, *others = owners.of_unit(0)
    assert {tensor.owner for tensor in others} == {1 - first.owner}
    assert owners.balance == 10 * 2 / 13
    assert sorted(asked) == [(64, 1), (64, 2), (64, 3), (64, 4)], "each shape is asked for once"
    whole = Owners(layout, Placement.of(0, Mesh(1, 2)), [0], cost=by_columns)
    assert {tensor.owner for tensor in whole.of_unit(0)} == {0}
    assert whole.loads == [13.0, 13.0]
    assert whole.balance == 1.0
    assert not list(whole.moves(0))


@pytest.mark.parametrize("cost", [0, -1.0, math.nan, math.inf, None, "3", 1j])
def test_other_costs_are_refused(cost: Any) -> None:
    layout = build_layout([Segment("m", (Parameter("p", (2, 3)),))], world=1, bucket_bytes=0)
    with pytest.raises(
        UsageError, match=r"update_cost gives .* for shape \[2, 3\]: expected a number above 0"
    ):
        Owners(layout, Placement.of(1, Mesh(1, 1)), [0], cost=lambda shape: cost)


def test_ranks_of_mixed_stages_add_up() -> None:
    """Ranks that all update what no axis cuts have that beside what they own of the rest."""
    segments = [Segment(f"m{at}", (Parameter(f"p{at}", (64, 64)),)) for at in range(3)]
    layout = build_layout(segments, world=4, bucket_bytes=0)
    mesh = Mesh(2, 2)
    owners = Owners(layout, placed([(0, 0), (0, 3), (2, 2)], mesh), [0], cost=lambda shape: 1)
    assert [len(owners.cut(unit)) for unit in layout.units] == [1, 2, 4]
    assert sorted(owners.loads) in ([1, 1, 2, 3], [1, 2, 2, 2])
    assert owners.balance == max(owners.loads) * 4 / sum(owners.loads)


@pytest.mark.parametrize(
    ("shape", "given", "rows"),
    [
        ((6, 4), 1, (6,)),
        ((6, 4), 3, (2, 2, 2)),
        ((6, 4), (1, 5), (1, 5)),
        ((6, 4), [2, 2, 2], (2, 2, 2)),
        ((6,), 2, (3, 3)),
        ((4, 3, 2, 5), 4, (1, 1, 1, 1)),
    ],
)
def test_rows_of_blocks(shape: Shape, given: Any, rows: tuple[int, ...]) -> None:
    assert rows_of("a.b", shape, given) == rows
    layout = build_layout([Segment("a", (Parameter("a.b", shape),))], world=1, bucket_bytes=0)
    blocks = list(whole_tensors(layout, [0], {"a.b": rows}))
    assert [block.shape for block in blocks] == [(count, *shape[1:]) for count in rows]


@pytest.mark.parametrize(
    ("shape", "given"),
    [
        ((6, 4), 4),
        ((6, 4), 0),
        ((6, 4), -2),
        ((6, 4), True),
        ((6, 4), 2.0),
        ((6, 4), "2"),
        ((6, 4), ()),
        ((6, 4), (3, 4)),
        ((6, 4), (6, 0)),
        ((6, 4), (7, -1)),
        ((6, 4), (3.0, 3.0)),
        ((6, 4), None),
        ((), 1),
        ((), (1,)),
        ((0, 4), 2),
        ((0, 4), ()),
    ],
)
def test_other_blocks_are_refused(shape: Shape, given: Any) -> None:
    with pytest.raises(UsageError, match=r"row_blocks: a\.b is \["):
        rows_of("a.b", shape, given)
