"""Loads from nodes' directories: bits of an ordinary load, on whatever nodes are left, and from the newest place."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.checkpoint.nodes.test_save import KINDS
from tests.support.crashes import Unsynced, read_tree
from tests.support.distributed import run_ranks
from tests.support.nodes import Kind, Training, place
from zerokit import files


def _kind(case: str, root: str) -> Kind:
    if case == "disk":
        states = Path(root, f"states-{dist.get_rank()}")
        states.mkdir(parents=True, exist_ok=True)
        return Kind(states=str(states))
    return KINDS[case]


def _save_all(
    root: str, cases: Sequence[str], nodes: tuple[int, ...], copies: int, stage: Any, mesh: Any
) -> None:
    """Steps 2 and 4 of each case, in a shared run and on nodes."""
    for case in cases:
        folder = f"{root}/{case}"
        training = Training(_kind(case, folder), stage, mesh)
        for first in (0, 2):
            training.train(first, first + 2)
            with files.replaced(Unsynced()):
                training.save(Path(folder, "shared"), first + 2)
                training.save(place(folder, nodes[dist.get_rank()]), first + 2, shared=False, copies=copies)
        dist.barrier()


def _load_all(
    root: str, cases: Sequence[str], nodes: tuple[int, ...], stage: Any, mesh: Any, tag: str
) -> None:
    """Each case from the nodes `nodes`, and from the shared run; both train on, and save."""
    for case in cases:
        folder = f"{root}/{case}"
        own = place(folder, nodes[dist.get_rank()])
        for source, where in (("nodes", [own]), ("ordinary", Path(folder, "shared"))):
            training = Training(_kind(case, folder), stage, mesh)
            extra, said = training.load(where)
            assert extra == {"step": 4}
            assert not said, said
            training.train(4, 5)
            with files.replaced(Unsynced()):
                training.save(Path(root, f"{tag}-{source}", case), 5)
            dist.barrier()


@dataclass(frozen=True)
class Loss:
    """Who saves, and who loads; nodes that load and have saved nothing are empty."""

    saved: tuple[int, ...]
    loaded: tuple[int, ...]
    copies: int = 2
    mesh: Any = None
    stages: tuple[Any, Any] = (2, 3)
    more: tuple[str, ...] = ()
    """Kinds of states beside AdamW's, which are cut at any number."""


LOSSES = {
    "all are there": Loss((0, 1), (0, 1)),
    "one of two is lost, and half the ranks": Loss((0, 1), (0,)),
    "one of two is lost and replaced": Loss((0, 1), (0, 7), stages=(3, 1)),
    "the first is lost and replaced": Loss((0, 1), (7, 1), stages=(1, 0)),
    "all swapped": Loss((0, 0, 1, 1), (1, 0, 1, 0)),
    "more ranks, on new nodes": Loss((0, 1), (7, 1, 8, 0), stages=(0, 2), more=("muon",)),
    "three of four": Loss((0, 1, 2, 3), (3, 0, 1), stages=(2, 2), more=("muon",)),
    "two of four": Loss((0, 1, 2, 3), (0, 2)),
    "one of four, with copies on all": Loss((0, 1, 2, 3), (2,), copies=4),
    "one of four, with two new ones": Loss((0, 1, 2, 3), (8, 2, 9), copies=4),
    "an uneven node is lost": Loss((0, 1, 1, 1), (0, 0, 7)),
    "a replica group is lost": Loss((0, 1, 2, 3), (0, 1), mesh=(2, 2), stages=((0, 3), 2)),
    "a replica group is lost and replaced": Loss(
        (0, 0, 1, 1), (7, 7, 1, 1), mesh=(2, 2), stages=((1, 3), (2, 2))
    ),
}


@pytest.mark.full(
    default=["all are there", "one of two is lost and replaced", "three of four", "a replica group is lost"]
)
@pytest.mark.parametrize("name", LOSSES)
def test_the_nodes_that_are_left_have_the_bits_of_an_ordinary_load(tmp_path: Path, name: str) -> None:
    loss = LOSSES[name]
    cases = ["adamw", *loss.more]
    mesh = loss.mesh if len(loss.loaded) == 4 else None
    run_ranks(
        len(loss.saved), _save_all, str(tmp_path), cases, loss.saved, loss.copies, loss.stages[0], loss.mesh
    )
    for lost in set(loss.saved) - set(loss.loaded):
        for case in cases:
            shutil.rmtree(place(tmp_path / case, lost))
    run_ranks(len(loss.loaded), _load_all, str(tmp_path), cases, loss.loaded, loss.stages[1], mesh, "a")
    assert read_tree(tmp_path / "a-nodes") == read_tree(tmp_path / "a-ordinary")


def test_every_kind_of_state_comes_from_other_nodes(tmp_path: Path) -> None:
    cases = list(KINDS)
    run_ranks(3, _save_all, str(tmp_path), cases, (0, 1, 2), 2, 2, None)
    for case in cases:
        shutil.rmtree(place(tmp_path / case, 1))
    run_ranks(3, _load_all, str(tmp_path), cases, (2, 7, 0), 1, None, "three")
    run_ranks(2, _load_all, str(tmp_path), cases, (0, 2), 3, None, "two")
    for tag in ("three", "two"):
        assert read_tree(tmp_path / f"{tag}-nodes") == read_tree(tmp_path / f"{tag}-ordinary")
