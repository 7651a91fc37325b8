"""What a directory has of steps: manifests and records are read, and the sizes of files looked at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from zerokit.checkpoint.disk import despite_damage, is_there
from zerokit.checkpoint.manifest import NAME, parse_manifest, read_manifest
from zerokit.checkpoint.nodes.complete import Holding, Key
from zerokit.checkpoint.nodes.held import holding_of
from zerokit.checkpoint.nodes.record import NODE_NAME
from zerokit.checkpoint.run import STEP, committed, is_step, number_of, step_name, superseded
from zerokit.errors import CheckpointError


def scan(directory: Path, *, holder: int = 0, above: int = -1) -> list[Holding]:
    """The steps after step `above` of a run's directory, or the one step whose directory it is.

    What is damaged, or cannot be read, is a holding that says so.
    """
    if is_step(directory):
        return [_look(directory, holder)]
    return [_look(step, holder) for step in committed(directory) if number_of(step) > above]


def _look(path: Path, holder: int) -> Holding:
    try:
        manifest, crc = read_manifest(path)
        if STEP.fullmatch(path.name) and path.name != step_name(manifest.step):
            raise CheckpointError(f"{path / NAME}: describes step {manifest.step}")
        return replace(holding_of(path, manifest, crc, holder), superseded=superseded(path))
    except CheckpointError as error:
        return Holding(str(path), holder, -1, damaged=str(error))


def adopted(one: Holding, manifests: Mapping[Key, bytes]) -> Holding:
    """A step whose manifest is damaged, by another directory's of this save, if there is one; any other as it is."""
    place = Path(one.place)
    for (step, crc), content in manifests.items() if one.damaged else ():
        with despite_damage():
            if place.name == step_name(step):
                manifest = parse_manifest(content, one.place)
                found = holding_of(place, manifest, crc, one.holder)
                if not found.damaged and len(found.lacks) < len(manifest.all_files):
                    return replace(found, superseded=superseded(place), note=one.damaged, adopted=True)
    return one


def has_nodes(path: Path) -> bool:
    """Whether a directory is a node's own: a step with `node.json`, or a run with such a step."""
    return any(is_there(step / NODE_NAME) and is_there(step / NAME) for step in (path, *committed(path)))
