"""Frozen parameters that the steps of a run share, in a directory beside them that is named after its contents.

    run/
      frozen-1a2b3c4d5e6f7a8b/    a checkpoint of weights alone: the frozen parameters
      step-00000100/              the manifest names the directory, and states every frozen parameter's checksum
      step-00000200/

The name follows from the parameters' names, dtypes, shapes and checksums. So equal parameters have one directory,
whatever world size wrote it, and parameters that have changed have another: none is ever out of date.
"""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from zerokit.checkpoint.disk import (
    check_file,
    despite_damage,
    entries_of,
    is_directory,
    is_file,
    is_kind,
    read_whole,
)
from zerokit.checkpoint.manifest import BASE, FROZEN, NAME, Manifest, read_manifest
from zerokit.checkpoint.staging import leftovers
from zerokit.checkpoint.strict import canonical
from zerokit.errors import CheckpointError
from zerokit.layout import Parameter

_MENTION = re.compile(BASE.pattern.encode())


def base_name(parameters: Iterable[tuple[Parameter, str, int]]) -> str:
    """The name of the directory with these frozen parameters, each with its dtype there and its CRC-32."""
    contents = sorted([p.name, dtype, list(p.shape), crc] for p, dtype, crc in parameters)
    return f"frozen-{hashlib.sha256(canonical(contents).encode()).hexdigest()[:16]}"


def frozen_in(manifest: Manifest) -> str:
    """The name that `base_name` gives the frozen parameters of a checkpoint."""
    return base_name(
        (manifest.layout.parameters[position], stream.dtype, manifest.whole(number, position).crc)
        for number, stream in enumerate(manifest.streams)
        if stream.kind == FROZEN
        for position in stream.parameters
    )


def base_of(step: Path, manifest: Manifest) -> tuple[Path, Manifest]:
    """The directory with a step's frozen parameters, and its manifest.

    Raises `CheckpointError` where it is not beside the step, or has other parameters than the step.
    """
    if not manifest.frozen:
        raise CheckpointError(
            f"{step}: its frozen parameters are in no file, because it was saved with frozen='never': load it into a "
            "model that was built with the same ones, and save that with frozen='once' or 'always'"
        )
    path = step.resolve().parent / manifest.frozen
    if not is_directory(path):
        raise CheckpointError(
            f"{step}: its frozen parameters are in a directory {path.name} that is not beside it: copy that from the "
            f"run in which the step was saved to {path.parent}, or take another step"
        )
    base, _ = read_manifest(path)
    if base.frozen is not None or not frozen_in(base) == frozen_in(manifest) == manifest.frozen:
        raise CheckpointError(
            f"{step}: {path.name} beside it has other frozen parameters than this step: copy the directory of that "
            "name from the run in which the step was saved"
        )
    return path, base


def check_base(step: Path, manifest: Manifest) -> None:
    """Raise `CheckpointError` unless the files with a step's frozen parameters are there, with the right sizes."""
    if manifest.frozen:
        _check_files(*base_of(step, manifest))


def holds(path: Path) -> bool:
    """Whether a directory has the frozen parameters that it is named after, in files of the right sizes."""
    with despite_damage():
        base, _ = read_manifest(path)
        _check_files(path, base)
        return base.frozen is None and frozen_in(base) == path.name
    return False


def _check_files(path: Path, manifest: Manifest) -> None:
    for file in manifest.all_files:
        check_file(path / file.name, file.size)


def bases_of(run: Path) -> list[Path]:
    """The directories of frozen parameters in a run."""
    return [Path(e.path) for e in entries_of(run) if BASE.fullmatch(e.name) and is_kind(e, stat.S_ISDIR)]


def unreferenced(run: Path, without: Collection[Path] = ()) -> list[Path]:
    """The directories of frozen parameters that nothing in the run names, apart from the steps `without`.

    A manifest that mentions one in any way keeps it, a damaged one too. There are none while another process writes
    into the run: it may be about to name them.
    """
    bases = bases_of(run)
    if not bases or any(not left.gone for left in leftovers(run)):
        return []
    named: set[str] = set()
    for path in (Path(entry.path) for entry in entries_of(run)):
        if path not in without and is_file(path / NAME):
            named.update(name.decode() for name in _MENTION.findall(read_whole(path / NAME)))
    return [base for base in bases if base.name not in named]
