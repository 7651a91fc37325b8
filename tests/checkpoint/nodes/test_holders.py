"""Which nodes hold copies of which, for generated numbers of nodes, copies and replica groups."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from zerokit.checkpoint.nodes.holders import held_by, holders


@st.composite
def meshes(draw: st.DrawFn) -> tuple[int, int, int]:
    """Nodes, copies and groups; some groups do not divide the nodes."""
    groups = draw(st.integers(1, 6))
    nodes = draw(st.one_of(st.integers(1, 24), st.integers(1, 6).map(lambda each: each * groups)))
    return nodes, draw(st.integers(1, 8)), groups


@given(meshes())
def test_each_node_gives_as_many_copies_as_it_gets(mesh: tuple[int, int, int]) -> None:
    nodes, copies, groups = mesh
    found = holders(nodes, copies, groups)
    assert [holding[0] for holding in found] == list(range(nodes))
    assert all(len(set(holding)) == len(holding) == min(copies, nodes) for holding in found)
    held = Counter(node for holding in found for node in holding)
    assert set(held.values()) == {min(copies, nodes)}
    for node in range(nodes):
        assert sorted(held_by(found, node)) == sorted(other for other in range(nodes) if node in found[other])
        assert held_by(found, node)[0] == node


@given(meshes())
def test_copies_go_to_other_replica_groups_while_there_are_any(mesh: tuple[int, int, int]) -> None:
    nodes, copies, groups = mesh
    if nodes % groups:
        return
    each = nodes // groups
    for holding in holders(nodes, copies, groups):
        used = Counter(node // each for node in holding)
        assert len(used) == min(copies, groups, nodes)
        assert max(used.values()) - min(used.values()) <= 1 or len(used) == groups
