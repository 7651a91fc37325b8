"""The file `latest` of a run: the newest step's name, and the CRC-32 that its manifest begins with."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from zerokit import files
from zerokit.checkpoint.disk import despite_damage, explained, is_there, read_whole
from zerokit.errors import CheckpointError

LATEST_NAME = "latest"
_LATEST = re.compile(r"(?P<name>step-\d{8,20}) (?P<crc>[0-9a-f]{8})\n(?:(?P=name) (?P<old>[0-9a-f]{8})\n)?")


@dataclass(frozen=True, slots=True)
class Latest:
    """The content of the file `latest`: the newest step's name and the CRC-32 that its manifest begins with.

    There are two of them while that step is being replaced, the new one's first.
    """

    name: str
    crcs: tuple[int, ...]

    def text(self) -> str:
        return "".join(f"{self.name} {crc:08x}\n" for crc in self.crcs)


def write_latest(run: Path, latest: Latest) -> None:
    """Replace the file, atomically and durably. Raises `CheckpointError`."""
    with explained(run / LATEST_NAME, "written"):
        files.write_aside(run / LATEST_NAME, latest.text().encode())


def read_latest(run: Path) -> Latest | None:
    """The content of `latest`; None if the file is missing. Raises `CheckpointError` if it is damaged."""
    path = run / LATEST_NAME
    if not is_there(path):
        return None
    match = _LATEST.fullmatch(read_whole(path).decode("latin-1"))
    if match is None:
        raise CheckpointError(f"{path}: damaged: expected 'step-######## ' and eight hexadecimal digits")
    return Latest(match["name"], tuple(int(crc, 16) for crc in (match["crc"], match["old"]) if crc))


def readable_latest(run: Path) -> Latest | None:
    """The content of `latest`; None if the file is missing or damaged. Raises `StorageError`."""
    with despite_damage():
        return read_latest(run)
    return None
