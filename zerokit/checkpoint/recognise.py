"""Whether a directory is an output of zerokit's and nothing else, so that it may be replaced.

Each function returns what the directory holds that zerokit has not written there, as text; "" if there is nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from zerokit import files
from zerokit.checkpoint.disk import opened
from zerokit.checkpoint.manifest import COMMON_NAME, EXTRA_NAME, NAME
from zerokit.checkpoint.reader import read_header
from zerokit.checkpoint.run import LATEST_NAME, STEP, SUPERSEDED_NAME, stated_checksum
from zerokit.errors import CheckpointError

PRODUCER = "zerokit"
"""The member "producer" in the metadata of consolidated weights."""

_STEP_FILE = re.compile(
    rf"rank-\d{{5,}}-of-\d{{5,}}\.safetensors|{re.escape(COMMON_NAME)}|{re.escape(EXTRA_NAME)}|{SUPERSEDED_NAME}"
)
_WEIGHTS = re.compile(r"model(-\d{5,}-of-\d{5,})?\.safetensors")
_DCP_FILE = re.compile(r"\.metadata|__\d+_\d+\.distcp")
_DEEPSPEED_FILE = re.compile(r"(bf16_)?(zero_pp_rank_\d+_)?mp_rank_\d+_(model|optim)_states\.pt")
_INDEX = "model.safetensors.index.json"


def foreign_to_step(folder: Path) -> str:
    """Beside the files of one step."""
    if stated_checksum(folder) is None:
        return f"no {NAME} of zerokit's"
    for entry in _entries(folder):
        if entry.name != NAME and not (
            entry.is_file(follow_symlinks=False) and _STEP_FILE.fullmatch(entry.name)
        ):
            return _named(entry)
    return ""


def foreign_to_checkpoint(folder: Path) -> str:
    """Beside a step, or a run of one step."""
    return foreign_to_run(folder) if stated_checksum(folder) is None else foreign_to_step(folder)


def foreign_to_run(folder: Path) -> str:
    """Beside a run of one step, as `reshard` writes it."""
    steps = []
    for entry in _entries(folder):
        if STEP.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            steps.append(entry.name)
            if strange := foreign_to_step(Path(entry.path)):
                return f"{strange} in {entry.name}"
        elif entry.name != LATEST_NAME and not files.TEMPORARY.fullmatch(entry.name):
            return _named(entry)
    return "" if len(steps) == 1 else f"{len(steps) or 'no'} steps, where an output of this kind has one"


def foreign_to_weights(folder: Path, renewed: Collection[str]) -> str:
    """Beside consolidated weights and what the new output will have as well: paths in the folder."""
    folders = {path.split("/")[0] for path in renewed if "/" in path}
    for entry in _entries(folder):
        if _WEIGHTS.fullmatch(entry.name):
            if not _consolidated(Path(entry.path)):
                return f"{_named(entry)} of another program"
        elif entry.name in folders and entry.is_dir(follow_symlinks=False):
            for inner in _entries(Path(entry.path)):
                if f"{entry.name}/{inner.name}" not in renewed:
                    return f"{_named(inner)} in {entry.name}"
        elif entry.name != _INDEX and entry.name not in renewed:
            return _named(entry)
    weights = any(_WEIGHTS.fullmatch(entry.name) for entry in _entries(folder))
    return "" if weights else "no weights of zerokit's"


def foreign_to_dcp(folder: Path) -> str:
    """Beside the files of one DCP checkpoint."""
    return _foreign_to(folder, _DCP_FILE, "of DCP's")


def foreign_to_deepspeed(folder: Path) -> str:
    """Beside the files of one DeepSpeed checkpoint, or of a run with one tag."""
    tags = [entry for entry in _entries(folder) if entry.is_dir(follow_symlinks=False)]
    if len(tags) == 1 and (folder / "latest").is_file() and len(_entries(folder)) == 2:
        folder = Path(tags[0].path)
    return _foreign_to(folder, _DEEPSPEED_FILE, "of DeepSpeed's")


def _foreign_to(folder: Path, own: re.Pattern[str], whose: str) -> str:
    entries = _entries(folder)
    for entry in entries:
        if not (entry.is_file(follow_symlinks=False) and own.fullmatch(entry.name)):
            return _named(entry)
    return "" if entries else f"no file {whose}"


def _consolidated(path: Path) -> bool:
    try:
        with opened(path) as fd:
            return read_header(fd, os.fstat(fd).st_size, path).metadata.get("producer") == PRODUCER
    except CheckpointError:
        return False


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """Empty for a directory that another process removes meanwhile."""
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)
    return []


def _named(entry: os.DirEntry[str]) -> str:
    kind = "directory" if entry.is_dir(follow_symlinks=False) else "file"
    return f"the {kind} {entry.name!r}"
