"""Which step is taken of what directories hold together, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from zerokit.checkpoint.nodes.complete import Holding, standing
from zerokit.checkpoint.nodes.holders import held_by, holders
from zerokit.checkpoint.nodes.record import NodeRecord
from zerokit.checkpoint.safetensors import file_name

UNCUT = "states-00004-00000.safetensors"
"""A file of rank 1's."""


def record_of(
    node: int, nodes: int = 3, copies: int = 2, *, step: int = 120, saved: int = 5, run: str = "a" * 32
) -> NodeRecord:
    """Two ranks a node."""
    wrote = tuple((2 * one, 2 * one + 1) for one in range(nodes))
    found = holders(nodes, copies)
    holds = tuple(tuple(r for other in held_by(found, one) for r in wrote[other]) for one in range(nodes))
    uncut = tuple((UNCUT,) if rank == 1 else () for rank in range(2 * nodes))
    return NodeRecord(run, saved, step, 7, node, wrote, holds, uncut)


def holding_of(record: NodeRecord, *, without: frozenset[int] = frozenset(), crc: int = 7) -> Holding:
    """What a node holds, but for the ranks `without`."""
    world, held = len(record.uncut), {*record.holds[record.node]} - without
    lacks = [file_name(rank, world) for rank in range(world) if rank not in held]
    if 1 not in held:
        lacks.append(UNCUT)
    place = f"/node-{record.node}/step-{record.step:08d}"
    return Holding(place, record.node, record.step, crc, True, record, tuple(lacks))


@given(st.data())
def test_a_step_is_complete_where_every_file_is_somewhere(data: st.DataObject) -> None:
    nodes, copies = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    alive = data.draw(st.sets(st.integers(0, nodes - 1), min_size=1))
    steps = {}
    for step in (100, 110, 120):
        lost = {
            one: frozenset(data.draw(st.sets(st.integers(0, 2 * nodes - 1), max_size=2))) for one in alive
        }
        steps[step] = [
            holding_of(record_of(node, nodes, copies, step=step), without=lost[node])
            for node in sorted(alive)
        ]
    everything = {file_name(rank, 2 * nodes) for rank in range(2 * nodes)} | {UNCUT}
    complete = [
        step
        for step, own in sorted(steps.items(), reverse=True)
        if everything == set().union(*(everything - set(one.lacks) for one in own))
    ]
    found = standing([one for own in steps.values() for one in own])
    taken = found.newest()
    assert (None if taken is None else taken.step) == next(iter(complete), None)
    newer = [step for step in (120, 110, 100) if taken is None or step > taken.step]
    assert [text.split(":")[0] for text in found.told(taken)] == [f"step {step}" for step in newer]
    if taken is not None:
        second = found.newest(besides=[taken])
        assert (None if second is None else second.step) == next(iter(complete[1:]), None)


def test_who_has_what_is_missing_is_said() -> None:
    found = standing([holding_of(record_of(0), without=frozenset({5}))])
    assert found.newest() is None
    assert found.told(None) == (
        "step 120: files of ranks 2 and 3 are missing: node 1 wrote them, nodes 1 and 2 have them; files of rank 5 are "
        "missing: node 2 wrote them, nodes 0 and 2 have them, though /node-0/step-00000120 of node 0 does not",
    )
    found = standing([holding_of(record_of(2))])
    assert found.told(None) == (
        "step 120: files of ranks 0 and 1 are missing: node 0 wrote them, nodes 0 and 1 have them",
    )
    assert standing([holding_of(record_of(node)) for node in (0, 2)]).told(None) == ()
    lacks = tuple(sorted(file_name(rank, 99) for rank in range(9)))
    found = standing([replace(holding_of(record_of(0)), record=None, lacks=lacks)])
    assert "00006-of-00099.safetensors and 2 more are missing in /node-0/step-" in found.told(None)[0]


def test_the_training_that_saved_last_counts() -> None:
    other = [holding_of(record_of(node, step=500, saved=4, run="b" * 32), crc=8) for node in range(3)]
    own = [holding_of(record_of(node)) for node in range(3)]
    for holdings in (other + own, own + other):
        found = standing(holdings)
        taken = found.newest()
        assert taken is not None
        assert taken.step == 120
        (note,) = found.told(taken)
        assert "/node-0/step-00000500, /node-1/step-00000500 and /node-2/step-00000500 are of another" in note
        assert "(step 500)" in note
    # An ordinary step says nothing of its training.
    ordinary = Holding("run/step-00000300", 0, 300, 9, True)
    found = standing([*other, *own, ordinary])
    assert [one.step for one in found.candidates] == [300, 120]


def test_two_saves_of_one_step_are_not_mixed() -> None:
    """A node that was away has the step as it was before the training went back."""
    stale = [holding_of(record_of(node, saved=4), crc=6) for node in (0,)]
    own = [holding_of(record_of(node)) for node in (1, 2)]
    found = standing([*stale, *own])
    taken = found.newest()
    assert taken is not None
    assert [one.holder for one in taken.holdings] == [1, 2]
    assert [one.manifest_crc for one in found.candidates] == [7, 6]


def test_steps_of_weights_are_passed_over_where_a_whole_one_is_wanted() -> None:
    weights = [replace(holding_of(record_of(node, step=130)), whole=False) for node in range(3)]
    own = [holding_of(record_of(node)) for node in range(3)]
    assert standing([*weights, *own]).candidates[0].step == 130
    found = standing([*weights, *own], whole=True)
    assert [one.step for one in found.candidates] == [120]
    assert found.notes == ("step 130 is weights without an optimizer's state: passed over",)
    assert standing([]).newest() is None
