"""Saves into nodes' own directories: together an ordinary step, byte for byte, each file on as many nodes as asked."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.crashes import read_tree
from tests.support.distributed import run_ranks
from tests.support.nodes import Kind, Training, joined, place, spread, warned
from zerokit.checkpoint.manifest import read_manifest
from zerokit.checkpoint.nodes.record import read_record
from zerokit.checkpoint.run import step_name

STEP = step_name(2)

KINDS = {
    "adamw": Kind(),
    "muon": Kind(classes="muon"),
    "soap": Kind(classes="soap"),
    "adafactor": Kind(classes="adafactor", base=True),
    "ema": Kind(ema=True, precision="bf16"),
    "fp8": Kind(states="fp8"),
    "disk": Kind(states="disk"),
    "frozen": Kind(base=True),
    "never": Kind(base=True, frozen="never"),
}


def _extra(case: str) -> Any:
    return {"own": dist.get_rank() if case == "by rank" else 7, "deep": [1, {2: "x"}]}


def _saved(
    root: str,
    case: str,
    nodes: tuple[int, ...],
    stage: Any = 2,
    mesh: Any = None,
    copies: int = 2,
    *,
    blocking: bool = True,
) -> None:
    """The same step in a shared run and on nodes."""
    kind = KINDS.get(case, Kind())
    if kind.states == "disk":
        states = Path(root, f"states-{dist.get_rank()}")
        states.mkdir(parents=True)
        kind = Kind(states=str(states))
    training = Training(kind, stage, mesh)
    training.train(0, 2)
    more: Any = {"extra": _extra(case), "weights_only": case == "weights only"}
    training.save(Path(root, "shared"), 2, **more)
    run = place(root, nodes[dist.get_rank()])
    _, said = warned(lambda: training.save(run, 2, shared=False, copies=copies, blocking=blocking, **more))
    assert len(said) == (dist.get_rank() == 0 and copies > 1 + max(nodes)), said
    training.train(2, 3)


def _require_equal(root: Path, nodes: tuple[int, ...], copies: int) -> None:
    """All nodes together have the ordinary step; each has its ranks' files, and `copies` of each are there."""
    count = 1 + max(nodes)
    steps = [place(root, node) / STEP for node in range(count)]
    assert joined(steps) == read_tree(root / "shared" / STEP)
    manifest, crc = read_manifest(steps[0])
    for file in (*manifest.files, *(one for one in manifest.whole_files if one.name.startswith("state"))):
        assert sum((step / file.name).exists() for step in steps) == min(copies, count), file.name
    for node, step in enumerate(steps):
        record = read_record(step)
        assert record is not None
        here = {file.name for file in record.files(manifest)}
        assert here | {"manifest.json", "node.json"} == {path.name for path in step.iterdir()}
        assert (record.manifest_crc, record.step) == (crc, 2)
        ranks = {rank for rank, its in enumerate(nodes) if its == node}
        # On a mesh, files have positions' numbers.
        assert len(record.wrote[record.node]) == len(ranks)
        assert stat.S_IMODE(step.parent.stat().st_mode) == 0o700
        assert sorted(path.name for path in step.parent.iterdir()) == ["latest", STEP]


@pytest.mark.full(default="2")
@pytest.mark.parametrize("world", [2, 3])
def test_all_nodes_together_have_the_ordinary_step_for_every_optimizer(tmp_path: Path, world: int) -> None:
    cases = [*KINDS, "by rank", "weights only"]
    nodes = spread(world, world)
    run_ranks(world, _each_saved, str(tmp_path), cases, nodes)
    for case in cases:
        _require_equal(tmp_path / case, nodes, 2)


def _each_saved(root: str, cases: list[str], nodes: tuple[int, ...]) -> None:
    for number, case in enumerate(cases):
        _saved(f"{root}/{case}", case, nodes, stage=number % 4, blocking=number % 2 == 0)
        dist.barrier()


SHAPES: list[tuple[tuple[int, ...], Any, Any, int]] = [
    ((0, 1, 1, 1), 2, None, 2),
    ((0, 0, 0, 1), 1, None, 2),
    ((0, 1, 0, 1), 3, None, 2),
    ((0, 0, 1, 2), 0, None, 3),
    ((0, 1, 2, 3), 2, None, 1),
    ((0, 1, 2, 3), 3, None, 4),
    ((0, 0, 0, 0), 2, None, 2),
    ((0, 1, 2, 3), (0, 3), (2, 2), 2),
    ((0, 0, 1, 1), (1, 3), (2, 2), 2),
    ((0, 1, 2, 3), (2, 2), (2, 2), 3),
    ((0, 1, 1, 0), (0, 3), (2, 2), 2),
]


def _each_shape(root: str) -> None:
    for number, (nodes, stage, mesh, copies) in enumerate(SHAPES):
        case = ("adamw", "muon")[number % 2]
        _saved(f"{root}/{number}", case, nodes, stage, mesh, copies, blocking=number % 3 > 0)
        dist.barrier()


def test_nodes_of_any_size_and_meshes(tmp_path: Path) -> None:
    run_ranks(4, _each_shape, str(tmp_path))
    for number, (nodes, _, _, copies) in enumerate(SHAPES):
        _require_equal(tmp_path / str(number), nodes, copies)


def test_copies_of_a_replica_group_lie_in_another(tmp_path: Path) -> None:
    """A mesh of (2, 2) on four nodes: ranks 0 and 1 are a group, and have all pieces of the model."""
    run_ranks(4, _saved, str(tmp_path), "adamw", (0, 1, 2, 3), (0, 3), (2, 2))
    for node in range(4):
        record = read_record(place(tmp_path, node) / STEP)
        assert record is not None
        own, copied = (
            record.wrote[record.node],
            set(record.holds[record.node]) - set(record.wrote[record.node]),
        )
        # Position s · 2 + m is that of the rank (m, s).
        groups = {position % 2 for position in copied}
        assert groups == {1 - position % 2 for position in own}
    _require_equal(tmp_path, (0, 1, 2, 3), 2)
