"""`node.json`: which files of a step a node's directory has, and where the others are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerokit.checkpoint.checksum import crc32
from zerokit.checkpoint.disk import is_there, read_whole
from zerokit.checkpoint.manifest import MAX_STEP, MAX_WORLD, File, Manifest
from zerokit.checkpoint.strict import bounded, compact, member, members, parse_json, typed
from zerokit.errors import CheckpointError

NODE_NAME = "node.json"

_FORMAT = "zerokit.node"
_PREFIX = '{"crc32":"%08x",'
_OWN = re.compile(rb'\{"crc32":"([0-9a-f]{8})",')
_RUN = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What the nodes of a save hold, and which one's directory this is. Equal on all nodes but for `node`.

    `run`: a random name, the same for all steps of a training. `saved`: when, in whole seconds since the epoch, by the
    clock of rank 0. `manifest_crc`: the CRC-32 that the step's manifest begins with.
    """

    run: str
    saved: int
    step: int
    manifest_crc: int
    node: int
    wrote: tuple[tuple[int, ...], ...]
    """By node, the ranks that were on it."""
    holds: tuple[tuple[int, ...], ...]
    """By node, the ranks whose files it has: its own, and copies."""
    uncut: tuple[tuple[str, ...], ...]
    """By rank, the names of its files of states that are not cut."""

    def to_bytes(self) -> bytes:
        body = compact(
            {
                "format": _FORMAT,
                "version": [1, 0],
                "run": self.run,
                "saved": self.saved,
                "step": self.step,
                "manifest_crc32": f"{self.manifest_crc:08x}",
                "node": self.node,
                "wrote": self.wrote,
                "holds": self.holds,
                "uncut": self.uncut,
            }
        )[1:]
        body += b"\n"
        return (_PREFIX % crc32(body)).encode() + body

    def files(self, manifest: Manifest, node: int | None = None) -> list[File]:
        """The files of a step that a node has, this one by default, without the manifest and this record."""
        ranks = self.holds[self.node if node is None else node]
        names = {name for rank in ranks for name in self.uncut[rank]}
        uncut = {one.name for one in manifest.uncut}
        whole = [file for file in manifest.whole_files if file.name not in uncut or file.name in names]
        return [*(manifest.files[rank] for rank in ranks), *whole]


def parse_record(content: bytes, where: str) -> NodeRecord:
    """Parse `node.json`. Raises `CheckpointError`, naming `where`, if it is damaged or of an unknown version."""
    match = _OWN.match(content)
    if match is None or crc32(content[match.end() :]) != int(match[1], 16):
        raise CheckpointError(f"{where}: damaged, or none of zerokit's")
    try:
        return _record(typed(parse_json(content), dict, NODE_NAME))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid: {error}") from None


def _record(plain: dict[str, Any]) -> NodeRecord:
    if plain.get("format") != _FORMAT:
        raise ValueError(f"format is {str(plain.get('format'))[:60]!r}, expected {_FORMAT!r}")
    version = members(plain, "version", int)
    if len(version) != 2 or version[0] != 1:
        raise ValueError(
            f"version is {'.'.join(map(str, version[:3]))}, this zerokit reads 1.x: use a newer one"
        )
    run, crc = member(plain, "run", str), member(plain, "manifest_crc32", str)
    if not _RUN.fullmatch(run) or not re.fullmatch(r"[0-9a-f]{8}", crc):
        raise ValueError("'run' or 'manifest_crc32' is no hexadecimal number of the expected length")
    uncut = tuple(tuple(members({"uncut": names}, "uncut", str)) for names in members(plain, "uncut", list))
    wrote, holds = _ranks(plain, "wrote", len(uncut)), _ranks(plain, "holds", len(uncut))
    if sorted(rank for ranks in wrote for rank in ranks) != list(range(len(uncut))):
        raise ValueError("'wrote' does not have every rank once")
    if len(holds) != len(wrote):
        raise ValueError(f"'holds' has {len(holds)} nodes, 'wrote' {len(wrote)}")
    return NodeRecord(
        run,
        bounded(plain, "saved", 0),
        bounded(plain, "step", 0, MAX_STEP),
        int(crc, 16),
        bounded(plain, "node", 0, len(wrote) - 1),
        wrote,
        holds,
        uncut,
    )


def _ranks(plain: dict[str, Any], key: str, world: int) -> tuple[tuple[int, ...], ...]:
    found = tuple(tuple(members({key: ranks}, key, int)) for ranks in members(plain, key, list))
    if not 1 <= len(found) <= MAX_WORLD or not all(0 <= rank < world for ranks in found for rank in ranks):
        raise ValueError(f"{key!r} does not list ranks from 0 to {world - 1} by node")
    return found


def read_record(step: Path) -> NodeRecord | None:
    """The record of a step in a node's own directory; None of an ordinary step.

    Raises `CheckpointError` where it is damaged, `StorageError` where it cannot be read.
    """
    path = step / NODE_NAME
    return parse_record(read_whole(path), str(path)) if is_there(path) else None
