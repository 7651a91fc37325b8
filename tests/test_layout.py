"""Properties of the layout, over hundreds of generated models; small ones are checked element by element."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zerokit.layout import (
    ALIGNMENT,
    LAYOUT_BYTES,
    Cut,
    Interval,
    Layout,
    Parameter,
    Segment,
    Unit,
    build_layout,
    default_bucket_bytes,
)
from zerokit.placement import Axis, Mesh

SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 200)),
    st.tuples(st.integers(0, 40), st.integers(1, 40)),
    st.sampled_from([(0,), (1,), (63,), (64,), (65,), (128,), (4096, 33), (50257, 768), (3, 3, 3, 3)]),
)
DTYPES = st.sampled_from(["float32", "bfloat16", "int64"])
WORLDS = st.one_of(st.integers(1, 9), st.sampled_from([16, 100, 1023, 1024]))
BUCKETS = st.one_of(st.just(0), st.integers(0, 40_000), st.just(1 << 40))


@st.composite
def models(draw: st.DrawFn, most: int = 12) -> list[Segment]:
    """A line of segments: modules and stretches of the rest, groups, frozen parameters, other dtypes."""
    shapes = draw(st.lists(SHAPES, min_size=0, max_size=most))
    groups = draw(st.integers(1, 3))
    segments: list[Segment] = []
    members: list[Parameter] = []
    for index, shape in enumerate(shapes):
        trainable = draw(st.integers(0, 4)) > 0
        members.append(
            Parameter(
                f"p{index}",
                shape,
                draw(DTYPES) if not trainable else "float32",
                draw(st.integers(0, groups - 1)),
                trainable,
                (f"alias.{index}",) if draw(st.integers(0, 5)) == 0 else (),
            )
        )
        if draw(st.booleans()):
            scope = f"module.{len(segments)}" if draw(st.booleans()) else None
            segments.append(Segment(scope, tuple(members)))
            members = []
    if members:
        segments.append(Segment(None, tuple(members)))
    return segments


def units_of(segments: list[Segment], world: int, bucket: int) -> tuple[Unit, ...]:
    return build_layout(segments, world=world, bucket_bytes=bucket).units


@settings(max_examples=300)
@given(models(), WORLDS, BUCKETS)
def test_any_model_is_divided_as_promised(segments: list[Segment], world: int, bucket: int) -> None:
    layout = build_layout(segments, world=world, bucket_bytes=bucket)
    given_names = [parameter.name for segment in segments for parameter in segment.parameters]
    assert sorted(given_names) == sorted(parameter.name for parameter in layout.parameters)
    assert layout.trainable_numel == sum(p.numel for s in segments for p in s.parameters if p.trainable)
    place = {name: index for index, name in enumerate(given_names)}
    last_of_kind: dict[tuple[bool, str], int] = {}
    for unit in layout.units:
        _require_tiles(layout, unit)
        assert unit.cut.piece_numel % ALIGNMENT == 0
        assert all(whole.offset % ALIGNMENT == 0 for whole in unit.slices)
        groups = len({parameter.group for parameter in unit.parameters})
        padding = unit.numel - unit.payload_numel
        assert 0 <= padding < ALIGNMENT * (len(unit.parameters) + groups) + ALIGNMENT * world
        assert padding == sum(gap.numel for gap in unit.gaps())
        assert len({parameter.trainable for parameter in unit.parameters}) == 1
        if not unit.trainable:
            assert len({parameter.dtype for parameter in unit.parameters}) == 1
        # The line's order holds between units of a kind, and inside a unit inside each group.
        kind = (unit.trainable, "" if unit.trainable else unit.parameters[0].dtype)
        order = [place[parameter.name] for parameter in unit.parameters]
        assert min(order) > last_of_kind.get(kind, -1)
        last_of_kind[kind] = max(order)
        by_group = [(parameter.group, place[parameter.name]) for parameter in unit.parameters]
        assert by_group == sorted(by_group)
    with pytest.raises(KeyError):
        layout.find("no such parameter")


def _require_tiles(layout: Layout, unit: Unit) -> None:
    """Shards tile the unit, and what ranks own of a parameter, by `cuts` and by the unit, tiles the parameter."""
    shards = [unit.shard(rank) for rank in range(layout.world)]
    assert [shard.start for shard in shards] == [unit.cut.piece_numel * rank for rank in range(layout.world)]
    assert shards[-1].stop == unit.numel
    for parameter in unit.parameters:
        found, whole = layout.find(parameter.name)
        assert (found, whole.parameter) == (unit, parameter)
        end, last = 0, -1
        for rank, cut, part in layout.cuts(layout.positions[parameter.name]):
            (own,) = (one for one in unit.owned(rank) if one.parameter is parameter)
            assert own.interval == cut == part
            assert own.memory.intersection(shards[rank]) == own.memory
            assert (part.start, rank > last) == (end, True)
            end, last = part.stop, rank
        assert end == parameter.numel
        owners = layout.owners(layout.positions[parameter.name])
        assert (owners[-1] if owners else -1) == last


@settings(max_examples=300)
@given(
    models(6).filter(lambda s: sum(p.numel for x in s for p in x.parameters) < 20_000),
    st.integers(1, 9),
    BUCKETS,
)
def test_small_models_painted_element_by_element(segments: list[Segment], world: int, bucket: int) -> None:
    for unit in units_of(segments, world, bucket):
        canvas: list[tuple[str, int] | None] = [None] * unit.numel
        for whole in unit.slices:
            for element in range(whole.parameter.numel):
                assert canvas[whole.offset + element] is None  # nothing overlaps
                canvas[whole.offset + element] = (whole.parameter.name, element)
        for gap in unit.gaps():
            assert gap.numel > 0
            assert canvas[gap.start : gap.stop] == [None] * gap.numel
        assert sum(gap.numel for gap in unit.gaps()) == canvas.count(None)
        group_of = {parameter.name: parameter.group for parameter in unit.parameters}
        for rank in range(world):
            piece = unit.shard(rank)
            found: list[tuple[str, int] | None] = [None] * piece.numel
            for part in unit.owned(rank):
                for element in range(part.interval.numel):
                    entry = (part.parameter.name, part.interval.start + element)
                    found[part.memory.start - piece.start + element] = entry
            assert found == canvas[piece.start : piece.stop]
            assert unit.payload_within(piece) == piece.numel - found.count(None)
            stretches = list(unit.groups_within(piece))
            assert len({group for group, _ in stretches}) == len(stretches)
            owner: list[int | None] = [None] * unit.numel
            for group, stretch in stretches:
                assert stretch.start % ALIGNMENT == 0 == stretch.stop % ALIGNMENT
                assert piece.start <= stretch.start < stretch.stop <= piece.stop
                assert owner[stretch.start : stretch.stop] == [None] * stretch.numel
                owner[stretch.start : stretch.stop] = [group] * stretch.numel
            for position in range(piece.start, piece.stop):
                entry_here = canvas[position]
                if entry_here is not None:
                    assert owner[position] == group_of[entry_here[0]]


@settings(max_examples=150)
@given(models(), st.integers(1, 9), BUCKETS)
def test_segments_join_exactly_while_they_fit_the_bucket(
    segments: list[Segment], world: int, bucket: int
) -> None:
    modules = {segment.scope: segment.parameters for segment in segments if segment.scope is not None}
    units = units_of(segments, world, bucket)
    for unit in units:
        names = {parameter.name for parameter in unit.parameters}
        # A unit is made of modules or of the rest, never of both.
        inside = [p.name for scope in unit.scopes for p in modules[scope]]
        assert not unit.scopes or names <= set(inside)
        if len(unit.scopes) > 1:
            assert unit.payload_numel * LAYOUT_BYTES <= bucket
    # Joining is greedy: a unit and the first segment of the next one of its kind would not have fitted.
    trainable = [unit for unit in units if unit.trainable]
    for before, after in pairwise(trainable):
        if bool(before.scopes) == bool(after.scopes):
            first = after.scopes[0] if after.scopes else None
            if first is not None:
                piece = sum(p.numel for p in modules[first] if p.trainable)
                assert (before.payload_numel + piece) * LAYOUT_BYTES > bucket


@settings(max_examples=100)
@given(models(), st.integers(1, 9), BUCKETS)
def test_the_dtype_of_trainable_parameters_moves_no_boundary(
    segments: list[Segment], world: int, bucket: int
) -> None:
    half = [
        replace(
            segment,
            parameters=tuple(replace(p, dtype="bfloat16") if p.trainable else p for p in segment.parameters),
        )
        for segment in segments
    ]
    before, after = (
        [[p.name for p in unit.parameters] for unit in units_of(s, world, bucket)] for s in (segments, half)
    )
    assert before == after


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Equal cuts, and bounds anywhere, some pieces of which may be empty."""
    if draw(st.booleans()):
        return Cut.equal(draw(st.integers(0, 5000)), draw(st.integers(1, 40)))
    return Cut(tuple(sorted(draw(st.lists(st.integers(0, 60), min_size=2, max_size=12)))))


@settings(max_examples=300)
@given(cuts(), st.data())
def test_pieces_tile_what_is_cut_and_owners_agree_with_them(cut: Cut, data: st.DataObject) -> None:
    pieces = [cut.piece(index) for index in range(len(cut))]
    assert all(one.stop == other.start for one, other in pairwise(pieces))
    assert cut.whole == Interval(pieces[0].start, pieces[-1].stop)
    ends = st.integers(cut.whole.start, cut.whole.stop)
    wanted = Interval(*sorted((data.draw(ends), data.draw(ends))))
    owners = cut.owners(wanted)
    assert {i for i in owners if pieces[i].numel} == {
        index for index, piece in enumerate(pieces) if piece.intersection(wanted).numel
    }
    if wanted.numel:  # neither end is a piece that has none of it
        assert pieces[owners[0]].intersection(wanted).numel
        assert pieces[owners[-1]].intersection(wanted).numel


@given(st.integers(0, 100_000), st.integers(1, 2000))
def test_equal_pieces_are_aligned_and_pad_as_little_as_that_takes(numel: int, pieces: int) -> None:
    cut = Cut.equal(numel, pieces)
    assert len(cut) == pieces
    assert {cut.piece(index).numel for index in range(pieces)} == {cut.piece_numel}
    assert cut.piece_numel % ALIGNMENT == 0
    assert 0 <= cut.whole.numel - numel < ALIGNMENT * pieces


@given(st.integers(0, 100_000), st.lists(st.integers(0, 1000), min_size=1, max_size=50))
def test_pieces_have_their_shares_to_within_an_alignment(numel: int, shares: list[int]) -> None:
    assume(any(shares))
    cut = Cut.weighted(numel, shares)
    assert len(cut) == len(shares)
    if len(set(shares)) == 1:
        assert cut == Cut.equal(numel, len(shares))
        return
    assert numel <= cut.whole.numel < numel + ALIGNMENT
    for index, share in enumerate(shares):
        piece = cut.piece(index)
        assert piece.start % ALIGNMENT == 0
        assert abs(piece.numel - numel * share / sum(shares)) < ALIGNMENT
        assert share or not piece.numel
    owners = list(cut.owners(cut.whole))
    assert owners == [index for index in range(len(cut)) if cut.piece(index).numel]


@given(models(), st.lists(st.integers(0, 9), min_size=1, max_size=6), BUCKETS)
def test_layouts_of_shares_have_every_element_once(
    segments: list[Segment], shares: list[int], bucket: int
) -> None:
    assume(any(shares))
    layout = build_layout(segments, world=len(shares), bucket_bytes=bucket, shares=shares)
    assert layout == build_layout(segments, world=1, bucket_bytes=bucket).for_world(len(shares), shares)
    owned = {rank: dict(layout.owned(rank)) for rank in range(layout.world)}
    for position, parameter in enumerate(layout.parameters):
        end = 0
        for rank, cut, _ in layout.cuts(position):
            assert cut.start == end < cut.stop
            assert owned[rank][position] == cut
            end = cut.stop
        assert end == parameter.numel
        assert [rank for rank, _, _ in layout.cuts(position)] == list(layout.owners(position))


@pytest.mark.parametrize("shares", [(1,), (0, 0), (-1, 2), (1, 2, 3), (1, 2**21)])
def test_shares_that_fit_no_world_are_refused(shares: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shares"):
        build_layout([], world=2, bucket_bytes=1, shares=shares)


@given(st.integers(0, 5000), st.integers(1, 6), st.integers(1, 6))
def test_joined_cuts_agree_with_the_mesh(numel: int, outer: int, inner: int) -> None:
    unit = Unit.equal(0, (), (Parameter("p", (numel,)),), outer * inner)
    mesh = Mesh(outer, inner)
    for rank in range(mesh.world):
        shard = unit.shard(mesh.position(rank))
        within = mesh.cut(Axis.INNER, unit, rank)
        assert within.whole == unit.cut.whole
        apart = mesh.cut(Axis.OUTER, unit, rank)
        s, m = (mesh.members(axis, rank).index(rank) for axis in (Axis.INNER, Axis.OUTER))
        assert within.piece(s) == apart.whole
        assert apart.piece(m) == shard


def test_what_needs_equal_pieces_refuses_others() -> None:
    assert Cut((5, 8, 11)).piece_numel == 3
    with pytest.raises(ValueError, match="into equal pieces, not one at 0, 64, 192"):
        _ = Cut((0, 64, 192)).piece_numel


def _variants() -> dict[str, Layout]:
    def layout(world: int = 2, bucket: int = 100, **changes: object) -> Layout:
        values: dict[str, object] = {"name": "b", "shape": (3, 2)} | changes
        second = Parameter(**values)  # type: ignore[arg-type]
        first = Segment("m", (Parameter("a", (4,)),))
        return build_layout([first, Segment("n", (second,))], world=world, bucket_bytes=bucket)

    return {
        "base": layout(),
        "world": layout(world=3),
        "bucket": layout(bucket=0),
        "name": layout(name="c"),
        "shape": layout(shape=(2, 3)),
        "dtype": layout(dtype="bfloat16"),
        "group": layout(group=1),
        "frozen": layout(trainable=False),
        "alias": layout(aliases=("c",)),
    }


@pytest.mark.parametrize(
    ("elements", "mib"), [(0, 1), (4_000_000, 1), (4_900_000, 2), (33_700_000, 16), (10**9, 16)]
)
def test_default_buckets_are_an_eighth_of_small_models(elements: int, mib: int) -> None:
    halves = [
        Segment(f"s{i}", (Parameter(f"p{i}", (elements // 2,), "float32", 0, True, ()),)) for i in (0, 1)
    ]
    assert default_bucket_bytes(halves) == mib * 2**20


def test_the_digest_tells_every_difference_and_nothing_else() -> None:
    digests = {name: layout.digest() for name, layout in _variants().items()}
    assert len(set(digests.values())) == len(digests)
    assert digests == {name: layout.digest() for name, layout in _variants().items()}
    assert json.loads(json.dumps(_variants()["base"].describe()))["world"] == 2


@given(*[st.integers(0, 30)] * 4)
def test_intersection_of_intervals(a: int, b: int, c: int, d: int) -> None:
    first, second = Interval(min(a, b), max(a, b)), Interval(min(c, d), max(c, d))
    both = set(range(first.start, first.stop)) & set(range(second.start, second.stop))
    found = first.intersection(second)
    assert found.numel == len(both)
    assert set(range(found.start, found.stop)) == both
    assert second.intersection(first).numel == found.numel
    assert found.shifted(5) == Interval(found.start + 5, found.stop + 5)


def test_a_world_of_nobody_and_a_parameter_named_twice_are_refused() -> None:
    for world in (0, -1):
        with pytest.raises(ValueError, match="world size"):
            build_layout([], world=world, bucket_bytes=1)
    segment = Segment("m", (Parameter("w", (2,)),))
    with pytest.raises(ValueError, match=r"\bw\b"):
        build_layout([segment, segment], world=1, bucket_bytes=1)
