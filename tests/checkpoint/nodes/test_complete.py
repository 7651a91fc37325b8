"""Which step is taken of what directories hold together, and what is said of the others."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from zerokit.checkpoint.nodes.complete import Holding, choose, lacking
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
    return Holding(place, record.node, record.step, crc, True, record=record, lacks=tuple(lacks))


@given(st.data())
def test_a_step_is_complete_where_every_file_is_somewhere(data: st.DataObject) -> None:
    nodes, copies = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 4))
    alive = sorted(data.draw(st.sets(st.integers(0, nodes - 1), min_size=1)))
    steps = {}
    for step in (100, 110, 120):
        lost = [data.draw(st.sets(st.integers(0, 2 * nodes - 1), max_size=2)) for _ in alive]
        steps[step] = [
            holding_of(record_of(node, nodes, copies, step=step), without=frozenset(own))
            for node, own in zip(alive, lost, strict=True)
        ]
    everything = {file_name(rank, 2 * nodes) for rank in range(2 * nodes)} | {UNCUT}
    complete = [
        step
        for step in (120, 110, 100)
        if everything == set().union(*(everything - set(one.lacks) for one in steps[step]))
    ]
    found = choose(data.draw(st.permutations([one for own in steps.values() for one in own])), whole=True)
    assert [step for step, _ in found.complete] == complete
    newer = [step for step in (120, 110, 100) if step > max(complete, default=0)]
    assert [text.split(" is incomplete: ")[0] for text in found.notes] == [f"step {step}" for step in newer]


def notes_of(*holdings: Holding) -> tuple[str, ...]:
    return choose(holdings, whole=False).notes


def test_who_has_what_is_missing_is_said() -> None:
    assert notes_of(holding_of(record_of(0), without=frozenset({5}))) == (
        "step 120 is incomplete: files of ranks 2 and 3 are missing: node 1 wrote them, nodes 1 and 2 have them; files "
        "of rank 5 are missing: node 2 wrote them, nodes 0 and 2 have them, though /node-0/step-00000120 of node 0 "
        "does not",
    )
    assert notes_of(holding_of(record_of(2))) == (
        "step 120 is incomplete: files of ranks 0 and 1 are missing: node 0 wrote them, nodes 0 and 1 have them",
    )
    two = [holding_of(record_of(node)) for node in (0, 2)]
    assert (lacking(two), notes_of(*two)) == (set(), ())
    lacks = tuple(file_name(rank, 99) for rank in reversed(range(9)))
    (note,) = notes_of(replace(holding_of(record_of(0)), record=None, lacks=lacks))
    assert note.endswith("rank-00006-of-00099.safetensors and 2 more are missing")


def test_a_large_record_is_described_in_one_pass() -> None:
    """A node of many ranks lacks all of them: no rank is looked for among all others."""
    world = 1 << 17
    ranks = tuple(range(world))
    record = NodeRecord("a" * 32, 5, 120, 7, 0, (ranks, ()), ((), ranks), ((),) * world)
    lacks = tuple(file_name(rank, world) for rank in ranks)
    (note,) = notes_of(Holding("/node-0/step-00000120", 0, 120, 7, True, record=record, lacks=lacks))
    assert note.endswith("6 and 131065 more are missing: node 0 wrote them, node 1 has them")
    nobody = replace(record, holds=((), ()))
    (note,) = notes_of(Holding("/node-0/step-00000120", 0, 120, 7, True, record=nobody, lacks=lacks[:1]))
    assert note.endswith("files of rank 0 are missing: node 0 wrote them, no node has them")


def test_the_training_that_saved_last_counts() -> None:
    other = [holding_of(record_of(node, step=500, saved=4, run="b" * 32), crc=8) for node in range(3)]
    own = [holding_of(record_of(node)) for node in range(3)]
    for holdings in (other + own, own + other):
        found = choose(holdings, whole=True)
        assert found.complete == ((120, 7),)
        assert len(found.notes) == 3
        assert all("/step-00000500: step 500 is of another training" in note for note in found.notes)
    # An ordinary step says nothing of its training.
    ordinary = Holding("run/step-00000300", 0, 300, 9, True)
    assert choose([*other, *own, ordinary], whole=True).complete == ((300, 9), (120, 7))


def test_two_saves_of_one_step_are_not_mixed() -> None:
    """A node that was away has the step as it was before the training went back."""
    stale = holding_of(record_of(0, saved=4), crc=6)
    own = [holding_of(record_of(node)) for node in (1, 2)]
    found = choose([stale, *own], whole=True)
    assert found.complete == ((120, 7),)
    assert found.notes[0].startswith("step 120 (manifest 00000006) is incomplete: files of ranks 2 and 3 ")


def test_what_does_not_count_is_left_out() -> None:
    weights = [replace(holding_of(record_of(node, step=130)), whole=False) for node in range(3)]
    old = [replace(holding_of(record_of(node, step=140)), superseded=True) for node in range(3)]
    bad = Holding("/node-1/step-00000150", 1, -1, damaged="manifest.json: damaged", note="and more")
    own = [holding_of(record_of(node)) for node in range(3)]
    every = [bad, *old, *weights, *own]
    assert choose(every, whole=False).complete == ((130, 7), (120, 7))
    found = choose(every, whole=True)
    assert found.complete == ((120, 7),)
    assert found.notes == ("manifest.json: damaged", "and more")
    assert choose([], whole=True).complete == ()
