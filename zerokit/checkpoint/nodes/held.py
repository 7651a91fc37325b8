"""What one step's directory has: the files that are there with their sizes, and its node's record."""

from __future__ import annotations

from pathlib import Path

from zerokit.checkpoint.bases import check_base
from zerokit.checkpoint.disk import despite_damage, entries_of, explained
from zerokit.checkpoint.manifest import NAME, Manifest
from zerokit.checkpoint.nodes.complete import Candidate, Holding
from zerokit.checkpoint.nodes.record import NODE_NAME, NodeRecord, read_record
from zerokit.errors import CheckpointError, StorageError

NAME_THEM = "name the directories of those nodes too, or make one run of all with zerokit gather"
"""What to do about files that are on other nodes."""


def holding_of(
    step: Path, manifest: Manifest, crc: int, *, holder: int = 0, place: str | None = None
) -> tuple[Holding, str]:
    """What a step's directory has, and what is wrong with its `node.json`, as a sentence; "" if nothing is.

    `crc`: the CRC-32 that the manifest begins with. `place`: what the directory is called in messages; by default its
    path. One listing tells all, however many files the manifest names. Raises `StorageError`.
    """
    record, fault = None, ""
    try:
        record = read_record(step)
        if record is not None and (strange := _strange(record, manifest, crc)):
            raise CheckpointError(f"{step / NODE_NAME}: {strange}, so it is not used")
    except StorageError:
        raise
    except CheckpointError as error:
        record, fault = None, str(error)
    sizes = {}
    for entry in entries_of(step):
        with explained(entry.path, "looked at"):
            if entry.is_file():
                sizes[entry.name] = entry.stat().st_size
    lacks = [file.name for file in manifest.all_files if sizes.get(file.name) != file.size]
    if manifest.frozen:
        lacks.append(manifest.frozen)
        with despite_damage():
            check_base(step, manifest)
            lacks.pop()
    whole = not manifest.weights_only
    where = str(step) if place is None else place
    return Holding(where, holder, manifest.step, crc, whole, record, tuple(lacks)), fault


def _strange(record: NodeRecord, manifest: Manifest, crc: int) -> str:
    """Why a record is not of the step with this manifest; "" if it is."""
    if (record.step, record.manifest_crc) != (manifest.step, crc):
        return f"is of step {record.step} and the manifest {record.manifest_crc:08x}, {NAME} beside it is {crc:08x}"
    if len(record.uncut) != manifest.world:
        return f"is of {len(record.uncut)} ranks, {NAME} beside it of {manifest.world}"
    known = {one.name for one in manifest.uncut}
    if strange := [name for names in record.uncut for name in names if name not in known]:
        return f"names {strange[0][:60]!r}, which {NAME} beside it does not"
    return ""


def require_files(step: Path, manifest: Manifest, crc: int, *, part: bool = False) -> bool:
    """Whether the directory is a node's own; then raise `CheckpointError` where files of the step are not in it.

    The error names the nodes that have them. With `part` those files are enough that the node should have.
    """
    with despite_damage():
        if read_record(step) is None:
            return False
    holding, fault = holding_of(step, manifest, crc)
    if part and holding.record is not None:
        own = [file.name for file in holding.record.files(manifest) if file.name in holding.lacks]
        if own:
            raise CheckpointError(f"{step / own[0]}: missing, or not of the size that {NAME} says")
    elif holding.lacks:
        told = Candidate(manifest.step, crc, (holding,)).fault()
        raise CheckpointError(f"{step}: {fault or told}: {NAME_THEM}")
    return True
