"""What one step's directory has: the files that are there with their sizes, and its node's record."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zerokit.checkpoint.bases import check_base
from zerokit.checkpoint.disk import despite_damage, entries_of, explained, is_there
from zerokit.checkpoint.manifest import NAME, Manifest
from zerokit.checkpoint.nodes.complete import Holding, describe_lack
from zerokit.checkpoint.nodes.record import NODE_NAME, NodeRecord, read_record
from zerokit.errors import CheckpointError, StorageError

NAME_THEM = "name the directories of those nodes too, or make one run of all with zerokit gather"
"""What to do about files that are on other nodes."""


def holding_of(step: Path, manifest: Manifest, crc: int, holder: int = 0) -> Holding:
    """What the directory of a step with this manifest has. One listing tells, however many files the manifest names.

    `crc`: the CRC-32 that the manifest begins with. A damaged record is a note, and one of another save makes all of
    the directory useless. Whether the step is superseded is not looked at. Raises `StorageError`.
    """
    record, damaged, note = None, "", ""
    try:
        record = read_record(step)
    except StorageError:
        raise
    except CheckpointError as error:
        note = str(error)
    if record is not None and (strange := _strange(record, manifest, crc)):
        record, damaged = None, f"{step / NODE_NAME}: {strange}"
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
    return Holding(
        str(step),
        holder,
        manifest.step,
        crc,
        not manifest.weights_only,
        record=record,
        lacks=tuple(lacks),
        damaged=damaged,
        note=note,
    )


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
    if not is_there(step / NODE_NAME):
        return False
    holding = holding_of(step, manifest, crc)
    lacks = own_lacks(holding, manifest) if part and holding.record is not None else holding.lacks
    if lacks:
        told = holding.damaged or holding.note or describe_lack([replace(holding, lacks=lacks)])
        raise CheckpointError(f"{step}: {told}: {NAME_THEM}")
    return True


def own_lacks(holding: Holding, manifest: Manifest) -> tuple[str, ...]:
    """The names of files that a directory should have by its record, and does not; none without a record."""
    own = () if holding.record is None else holding.record.files(manifest)
    return tuple(sorted({file.name for file in own}.intersection(holding.lacks)))


def missing_here(step: Path, manifest: Manifest, crc: int) -> str:
    """Which files of a node's step are not in its directory, and which nodes have them; "" if none, or of others."""
    return describe_lack([holding_of(step, manifest, crc)]) if is_there(step / NODE_NAME) else ""
