"""What a directory has of steps: manifests and records are read, and the sizes of files looked at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zerokit.checkpoint.disk import is_there
from zerokit.checkpoint.manifest import NAME, read_manifest
from zerokit.checkpoint.nodes.complete import Holding
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


def has_nodes(path: Path) -> bool:
    """Whether a directory is a node's own: a step with `node.json`, or a run with such a step."""
    return any(is_there(step / NODE_NAME) and is_there(step / NAME) for step in (path, *committed(path)))
