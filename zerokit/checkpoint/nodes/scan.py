"""What a directory has of steps: a run's directory, shared or a node's own, or a step's. Its files are not trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zerokit.checkpoint.disk import explained, is_directory, is_there
from zerokit.checkpoint.manifest import NAME, Manifest, read_manifest
from zerokit.checkpoint.nodes.complete import Holding
from zerokit.checkpoint.nodes.held import holding_of
from zerokit.checkpoint.nodes.record import NODE_NAME
from zerokit.checkpoint.run import STEP, committed, is_step, island_runs, step_name, superseded
from zerokit.checkpoint.staging import finish_replacement, finish_replacements
from zerokit.errors import CheckpointError, MissingPath, StorageError

_ORDINARY = 2
"""Complete ordinary steps that are looked at in a run: the newest, and one to go back to. It may have thousands."""

Key = tuple[int, int]
"""A step and the CRC-32 of its manifest."""


@dataclass(frozen=True, slots=True)
class Scan:
    """The steps of one directory, the newest first, each with its directory and its manifest, which was read once.

    `path`: the directory that was looked at. `notes`: what was passed over, as sentences.
    """

    path: Path
    holdings: tuple[Holding, ...]
    steps: Mapping[Key, tuple[Path, Manifest]]
    notes: tuple[str, ...]


def scan(path: Path, holder: int = 0, *, shown: str | None = None) -> Scan:
    """Look at a run's or a step's directory; `shown` is what it is called in messages, by default its path.

    What is damaged is named in the notes. Raises `MissingPath` where nothing is there, `CheckpointError` for what is no
    directory or has the runs of islands, and `StorageError` where an ordinary step cannot be read: another must not
    take its place.
    """
    shown = str(path) if shown is None else shown
    with explained(path, "opened"):
        finish_replacement(path)
        if not is_directory(path):
            if not is_there(path):
                raise MissingPath(f"{shown}: does not exist: give the directory of a step, or of a run")
            raise CheckpointError(f"{shown}: is not a directory: give the directory of a step, or of a run")
        alone = is_step(path)
        if not alone:
            finish_replacements(path)
            if island_runs(path):
                raise CheckpointError(f"{shown}: holds the runs of islands: give one of them")
    holdings, steps, notes, ordinary = [], {}, list[str](), 0
    for step in [path] if alone else reversed(committed(path)):
        place = shown if alone else f"{shown}/{step.name}"
        own = is_there(step / NODE_NAME)
        if ordinary >= _ORDINARY and not own:
            continue
        try:
            manifest, crc = _manifest_of(step)
            holding, fault = holding_of(step, manifest, crc, holder=holder, place=place)
        except CheckpointError as error:
            if not is_there(step):
                continue  # a save beside this has removed it
            if isinstance(error, StorageError) and not own:
                raise
            notes.append(str(error).replace(str(step), place))
            continue
        if fault:
            notes.append(fault.replace(str(step), place))
        if superseded(step):
            notes.append(f"{place}: superseded, another training has begun before it: passed over")
            continue
        ordinary += not own and not holding.lacks and holding.whole
        holdings.append(holding)
        steps[manifest.step, crc] = step, manifest
    return Scan(path, tuple(holdings), steps, tuple(notes))


def _manifest_of(step: Path) -> tuple[Manifest, int]:
    manifest, crc = read_manifest(step)
    if STEP.fullmatch(step.name) and step.name != step_name(manifest.step):
        raise CheckpointError(f"{step / NAME}: describes step {manifest.step}")
    return manifest, crc


def has_nodes(path: Path) -> bool:
    """Whether a directory is a node's own: a step with `node.json`, or a run with such a step."""
    if is_there(path / NODE_NAME) and is_there(path / NAME):
        return True
    return is_directory(path) and any(is_there(step / NODE_NAME) for step in committed(path))
