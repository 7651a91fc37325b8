"""Fragments and their pieces tile the model exactly, for every split."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from zerokit.layout import Layout, Parameter, Segment, build_layout
from zerokit.training.fragments import Part, divide


@st.composite
def _layouts(draw: st.DrawFn) -> Layout:
    sizes = draw(st.lists(st.integers(0, 5000), min_size=1, max_size=12))
    segments = [
        Segment(f"block{n}", (Parameter(f"p{n}", (size,), trainable=draw(st.booleans()) or n == 0),))
        for n, size in enumerate(sizes)
    ]
    return build_layout(segments, world=draw(st.integers(1, 4)), bucket_bytes=1)


@given(_layouts(), st.data())
def test_pieces_of_all_fragments_are_all_trainable_elements_once(layout: Layout, data: st.DataObject) -> None:
    units = [unit for unit in layout.units if unit.trainable]
    count = data.draw(st.integers(1, len(units)), label="fragments")
    every = data.draw(st.integers(count, 60), label="every")
    islands = data.draw(st.integers(1, 5), label="islands")
    fragments = divide(layout, count, every)
    assert [unit for fragment in fragments for unit in fragment.units] == units
    assert len(fragments) == count
    assert all(fragment.units for fragment in fragments)
    offsets = [fragment.offset for fragment in fragments]
    assert offsets == sorted(offsets)
    assert offsets[0] >= 1
    assert offsets[-1] == every
    total = 0
    for fragment in fragments:
        for rank in range(layout.world):
            parts = [Part(fragment, rank, islands, island) for island in range(islands)]
            assert parts[0].numel >= sum(unit.cut.piece_numel for unit in fragment.units)
            pieces = [part.payload(part.own) for part in parts]
            assert sum(pieces) == parts[0].payload(slice(0, parts[0].numel))
            total += sum(pieces)
    assert total == layout.trainable_numel


@given(st.integers(1, 8), st.integers(8, 50))
def test_equal_units_have_turns_of_equal_length(count: int, every: int) -> None:
    segments = [Segment(f"block{n}", (Parameter(f"p{n}", (640,)),)) for n in range(count)]
    fragments = divide(build_layout(segments, world=2, bucket_bytes=1), count, every)
    assert [fragment.offset for fragment in fragments] == [-(-every * (n + 1) // count) for n in range(count)]
