"""Nodes killed −9 amid a training with copies: the nodes that are left go on with the bits of an ordinary restart."""

from __future__ import annotations

import random
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.crashes import read_tree
from tests.support.killing import EVERY, Job
from tests.support.nodes import place
from zerokit.checkpoint.run import step_name

AMID = 9
"""The step whose copy a node is killed in."""


def _resumed(root: Path, nodes: tuple[int, ...], saved_by: int) -> int:
    """Go on from nodes' directories; the step that was loaded. `saved_by`: how many ranks the killed training had."""
    job = Job(root, nodes, "resume", load="nodes", then=7, waits=True)
    assert not (errors := job.end()), errors
    step = int((job.folder / "loaded-0").read_text().splitlines()[0])
    apart = root / "apart"
    ordinary = Job(apart, (0,) * saved_by, "ordinary", steps=step)
    assert not (errors := ordinary.end()), errors
    restart = Job(apart, (0,) * len(nodes), "restart", load=str(ordinary.folder / "end"), then=7)
    assert not (errors := restart.end()), errors
    for name in ("loaded", "end"):
        assert read_tree(job.folder / name) == read_tree(restart.folder / name), (step, name)
    for node in set(nodes):
        names = {path.name for path in place(root, node).iterdir()}
        due = [step_name(number) for number in range(step + 1, step + 8) if number % EVERY == 0]
        assert names == {"latest", *due[-2:]}
    return step


def _without(nodes: tuple[int, ...], dead: int, *, replaced: bool) -> tuple[int, ...]:
    return tuple(9 if node == dead else node for node in nodes if replaced or node != dead)


@pytest.mark.full(default="nodes0-left")
@pytest.mark.parametrize("replaced", [False, True], ids=["left", "replaced"])
@pytest.mark.parametrize("nodes", [(0, 1), (0, 1, 2), (0, 0, 1, 1)])
def test_a_node_killed_at_a_random_moment(tmp_path: Path, nodes: tuple[int, ...], replaced: bool) -> None:
    choose = random.Random(10 * len(nodes) + replaced)
    job = Job(tmp_path, nodes, "job", waits=replaced)
    job.wait_for_progress()
    while not any(lines and lines[-1][1] for lines in map(job.progress, range(len(nodes)))):
        time.sleep(0.01)
    time.sleep(choose.uniform(0, 0.5))
    dead = choose.choice(nodes)
    job.kill(dead)
    last = [job.progress(rank)[-1] for rank in range(len(nodes))]
    made, known = (max(values) for values in zip(*last, strict=True))
    shutil.rmtree(place(tmp_path, dead))
    step = _resumed(tmp_path, _without(nodes, dead, replaced=replaced), len(nodes))
    assert step >= known
    if replaced:  # no copy was under way when the next was due
        assert made - step <= EVERY


def _stop(copies: Any, folder: Path, rank: int, *, moment: str, other: str) -> None:
    """Rank 1 stops for ever at a moment of its copy of step `AMID`, and says so."""
    import zerokit.checkpoint.commit as commit
    import zerokit.checkpoint.nodes.generations as generations
    import zerokit.checkpoint.nodes.sending as sending
    from zerokit.checkpoint.together import Together

    sending.PIECE_BYTES = 4096
    calls = 0
    owner, name = {
        "sending": (Together, "swap"),
        "renaming": (commit, "_publish"),
        "removing": (generations, "remove_steps"),
        "removed": (generations, "remove_steps"),
    }[moment.split()[0]]
    before = getattr(owner, name)

    def stopped(*args: Any, **named: Any) -> Any:
        nonlocal calls
        if copies._begun != AMID:
            return before(*args, **named)
        calls += 1
        if moment == "sending 4" and calls < 4:
            return before(*args, **named)
        if moment == "removed":
            before(*args, **named)
        while moment == "renaming" and not Path(other, step_name(AMID)).exists():
            time.sleep(0.005)
        (folder / "stopped").touch()
        while True:
            time.sleep(60)

    if rank == 1:
        setattr(owner, name, stopped)


@pytest.mark.full(default=["sending 1-*", "renaming-nodes2-*", "removed-*"])
@pytest.mark.parametrize(
    ("moment", "nodes", "found"),
    [
        ("sending 1", (0, 1), 6),
        ("sending 4", (0, 1, 2), 6),
        # The other node has both nodes' files.
        ("renaming", (0, 1), AMID),
        # The other two have the files of all three.
        ("renaming", (0, 1, 2), AMID),
        ("removing", (0, 1), 6),
        ("removed", (0, 1, 2), 6),
    ],
)
def test_a_node_killed_amid_a_copy(tmp_path: Path, moment: str, nodes: tuple[int, ...], found: int) -> None:
    other = str(place(tmp_path, 0))
    job = Job(
        tmp_path, nodes, "job", waits=True, steps=AMID, shots=partial(_stop, moment=moment, other=other)
    )
    while not (job.folder / "stopped").exists():
        assert not job.errors()
        time.sleep(0.01)
    if moment == "renaming":
        while not all((place(tmp_path, node) / step_name(AMID)).exists() for node in nodes if node != 1):
            time.sleep(0.01)
    job.kill(1)
    shutil.rmtree(place(tmp_path, 1))
    assert _resumed(tmp_path, _without(nodes, 1, replaced=len(nodes) == 2), len(nodes)) == found


def test_of_three_nodes_one_has_renamed(tmp_path: Path) -> None:
    """The others are killed before they have: what one node has is not all, so the step before is taken."""
    nodes = (0, 1, 2)
    shots = partial(_stop, moment="renaming", other=str(place(tmp_path, 2)))
    job = Job(tmp_path, nodes, "job", waits=True, steps=AMID, shots=shots)
    while not all((place(tmp_path, node) / step_name(AMID)).exists() for node in (0, 2)):
        assert not job.errors()
        time.sleep(0.01)
    job.kill(1)
    shutil.rmtree(place(tmp_path, 2) / step_name(AMID))  # as if node 2 had been as slow as node 1
    assert _resumed(tmp_path, nodes, 3) == 6
