"""Nodes' own directories, made of an ordinary step by dealing out its files as a save without a shared disk does."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from zerokit.checkpoint.manifest import NAME, read_manifest
from zerokit.checkpoint.nodes.holders import held_by, holders
from zerokit.checkpoint.nodes.record import NODE_NAME, NodeRecord

RUN = "0123456789abcdef" * 2


def deal(
    step: Path,
    folder: Path,
    *,
    nodes: int = 2,
    copies: int = 2,
    run: str = RUN,
    saved: int = 1000,
    uncut: Sequence[Sequence[str]] = (),
) -> list[Path]:
    """The runs of `nodes` nodes in `folder`, each with its part of the step; ranks go to nodes in turn.

    `uncut`: by rank, its files of states that are not cut; by default they are all rank 0's.
    """
    manifest, crc = read_manifest(step)
    world = manifest.world
    wrote = tuple(tuple(range(node * world // nodes, (node + 1) * world // nodes)) for node in range(nodes))
    found = holders(nodes, copies)
    holds = tuple(
        tuple(rank for other in held_by(found, node) for rank in wrote[other]) for node in range(nodes)
    )
    names = [tuple(own) for own in uncut] or [tuple(one.name for one in manifest.uncut)] + [()] * (world - 1)
    runs = []
    for node in range(nodes):
        record = NodeRecord(run, saved, manifest.step, crc, node, wrote, holds, tuple(names))
        place = folder / f"node-{node}" / step.name
        place.mkdir(parents=True)
        for name in (NAME, *(file.name for file in record.files(manifest))):
            shutil.copy2(step / name, place)
        (place / NODE_NAME).write_bytes(record.to_bytes())
        runs.append(place.parent)
    return runs


def contents(run: Path) -> dict[str, bytes]:
    """All files of a run, by their paths in it."""
    return {
        str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()
    }
