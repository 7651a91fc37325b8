"""What a directory has of steps: manifests and records are read, and the sizes of files looked at."""

from __future__ import annotations

from pathlib import Path

from zerokit.checkpoint.bases import check_base
from zerokit.checkpoint.disk import is_file, status_of
from zerokit.checkpoint.manifest import Manifest, read_manifest
from zerokit.checkpoint.nodes.complete import Holding
from zerokit.checkpoint.nodes.record import NODE_NAME, read_record
from zerokit.checkpoint.run import committed, is_step, number_of, superseded
from zerokit.errors import CheckpointError


def scan(directory: Path, *, holder: int = 0, above: int = -1) -> list[Holding]:
    """The steps after step `above` of a run's directory, or the one step whose directory it is.

    What is damaged, or cannot be read, is a holding that says so.
    """
    if is_step(directory):
        return [_look(directory, holder)]
    return [_look(step, holder) for step in committed(directory) if number_of(step) > above]


def _look(path: Path, holder: int) -> Holding:
    record, note = None, ""
    try:
        manifest, crc = read_manifest(path)
    except CheckpointError as error:
        return Holding(str(path), holder, -1, damaged=str(error))
    try:
        record = read_record(path)
        if record is not None and (record.step, record.manifest_crc) != (manifest.step, crc):
            return Holding(
                str(path),
                holder,
                manifest.step,
                damaged=f"{path / NODE_NAME}: is of another save than the manifest",
            )
    except CheckpointError as error:
        note = str(error)
    whole = not manifest.weights_only
    lacks = tuple(_lacking(path, manifest))
    return Holding(str(path), holder, manifest.step, crc, whole, superseded(path), record, lacks, note=note)


def _lacking(path: Path, manifest: Manifest) -> list[str]:
    lacks = []
    for file in manifest.all_files:
        status = status_of(path / file.name)
        if status is None or status.st_size != file.size or not is_file(path / file.name):
            lacks.append(file.name)
    try:
        check_base(path, manifest)
    except CheckpointError:
        lacks.append(manifest.frozen or "")
    return lacks
