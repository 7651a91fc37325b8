"""What a conversion has finished: a journal in its work directory, for the one that resumes it after a kill.

    <crc> {"journal": 1, "target": "run-3", "source": 439041101, "wanted": {"world": 3, …}}
    <crc> {"pieces": [[0, 3, 1, 2048, 305419896, 8192], …]}     as many such lines as needed
    <crc> {"file": "rank-00000-of-00003.safetensors", "size": 123456}

A file's lines are added when the file and its name are on the disk. They have the checksums of what was read for it, so
that nothing is read twice to verify the source and to state the checksums of what is written. Every line begins with
the CRC-32 of all text up to its end, so that nothing counts that follows damage or a torn line.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerokit import files
from zerokit.checkpoint.checksum import Piece, crc32
from zerokit.checkpoint.disk import explained, opened, sync_directory, write_exactly
from zerokit.checkpoint.plan import Key, PieceKey
from zerokit.errors import CheckpointError

NAME = ".journal"

_VERSION = 1
_LINE_BYTES = 1 << 16
"""About how many bytes of pieces one line holds: memory does not grow with a file's pieces, even when it is read."""

_MOST_LINE_BYTES = 1 << 20
_CRC_BYTES = 9


@dataclass(frozen=True, slots=True)
class Request:
    """What a conversion is to write: equal requests write equal bytes.

    `target` is the name of the output directory, `source` the CRC-32 of the source's manifest; `wanted` is all
    else that makes a difference.
    """

    target: str
    source: int
    wanted: dict[str, str | int | None]

    def differences(self, other: Request) -> str:
        """In what `other` differs, as text; "" if in nothing."""
        if self.source != other.source:
            return f"of another source (its manifest is {other.source:08x}, not {self.source:08x})"
        both = self.wanted | other.wanted
        names = [name for name in both if self.wanted.get(name) != other.wanted.get(name)]
        names = ["command"] if "command" in names else names  # another command's options cannot be compared
        reasons = (f"{name} {other.wanted.get(name)}, not {self.wanted.get(name)}" for name in names)
        return f"of another request ({'; '.join(reasons)})" if names else ""


@dataclass(frozen=True, slots=True)
class _Line:
    """A whole line: its members, and offset and running CRC-32 at its end."""

    plain: dict[str, Any]
    end: int
    crc: int


class Journal:
    """The journal of the conversion that works in the directory `work`; close it. All methods raise `CheckpointError`.

    `note` may be called in another thread, not in two at once.
    """

    def __init__(self, work: Path, end: int = 0, crc: int = 0) -> None:
        """Go on after byte `end`; what follows it is cut off."""
        self._work, self._path, self._end, self._crc = work, work / NAME, end, crc
        calls = files.system()
        with explained(self._path, "opened"):
            self._fd = calls.extend(self._path)
        try:
            with explained(self._path, "cut"):
                if os.fstat(self._fd).st_size != end:
                    calls.truncate(self._fd, end)
                    calls.sync(self._fd)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def begun(work: Path, request: Request) -> Journal:
        """A new one, with the names that lead to it on the disk."""
        journal = Journal(work)
        try:
            journal._add(
                {
                    "journal": _VERSION,
                    "target": request.target,
                    "source": request.source,
                    "wanted": request.wanted,
                }
            )
            journal._sync()
            sync_directory(work)
            sync_directory(work.parent)
        except BaseException:
            journal.close()
            raise
        return journal

    def note(self, path: Path, size: int, pieces: Mapping[Key, Piece]) -> None:
        """Record that the file is whole and synced, and what was copied into it."""
        sync_directory(path.parent)  # the file's name
        line: list[list[str | int]] = []
        room = _LINE_BYTES
        for key, piece in pieces.items():
            name = [key] if isinstance(key, str) else [key.stream, key.position, key.source, key.start]
            line.append([*name, piece.crc, piece.size])
            room -= 64 + (len(key) if isinstance(key, str) else 0)
            if room <= 0:
                self._add({"pieces": line})
                line, room = [], _LINE_BYTES
        if line:
            self._add({"pieces": line})
        self._add({"file": path.relative_to(self._work).as_posix(), "size": size})
        self._sync()

    def close(self) -> None:
        os.close(self._fd)

    def _add(self, plain: Mapping[str, object]) -> None:
        text = json.dumps(plain, separators=(",", ":")).encode() + b"\n"
        self._crc = crc32(text, self._crc)
        whole = b"%08x " % self._crc + text
        write_exactly(self._fd, [whole], self._end, self._path)
        self._end += len(whole)

    def _sync(self) -> None:
        with explained(self._path, "synced", fd=self._fd):
            files.system().sync(self._fd)


@dataclass
class Finished:
    """What an interrupted conversion has done: files by their sizes, paths relative to its work directory.

    `end` and `crc` are those of the journal's last line that counts.
    """

    request: Request
    files: dict[str, int]
    pieces: dict[Key, Piece]
    end: int
    crc: int

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(self.files.values())


def interrupted(work: Path) -> Request | None:
    """The request of the conversion that used a directory; None without one, or if it has finished nothing."""
    first = next(_entries(work), None)
    return None if first is None else first.request


def finished(work: Path) -> Finished | None:
    """All that `work` holds of an interrupted conversion; None as for `interrupted`."""
    whole: Finished | None = None
    for entry in _entries(work):
        if whole is None:
            whole = entry
        else:
            whole.files |= entry.files
            whole.pieces |= entry.pieces
            whole.end, whole.crc = entry.end, entry.crc
    return whole


def _entries(work: Path) -> Iterator[Finished]:
    """One file of the journal after the other, up to the first that is missing or of another size."""
    request: Request | None = None
    pieces: dict[Key, Piece] = {}
    # What cannot be read, or is none of ours, counts as the journal's end.
    with suppress(CheckpointError, OSError, ValueError, TypeError, KeyError, RecursionError):
        for line in _lines(work / NAME):
            if request is None:
                request = _request(line.plain)
            elif "pieces" in line.plain:
                pieces |= dict(_piece(one) for one in line.plain["pieces"])
            else:
                name, size = str(line.plain["file"]), int(line.plain["size"])
                status = (work / name).lstat()
                if not stat.S_ISREG(status.st_mode) or status.st_size != size:
                    return
                yield Finished(request, {name: size}, pieces, line.end, line.crc)
                pieces = {}


def _lines(path: Path) -> Iterator[_Line]:
    end = crc = 0
    with opened(path) as fd, open(fd, "rb", closefd=False) as file:
        while (line := file.readline(_MOST_LINE_BYTES)).endswith(b"\n"):
            text = line[_CRC_BYTES:]
            crc = crc32(text, crc)
            if line[:_CRC_BYTES] != b"%08x " % crc:
                return
            end += len(line)
            yield _Line(json.loads(text), end, crc)


def _request(plain: dict[str, Any]) -> Request:
    if plain["journal"] != _VERSION:
        raise ValueError("of another version")
    target, source, wanted = plain["target"], plain["source"], plain["wanted"]
    if not (isinstance(target, str) and isinstance(source, int) and isinstance(wanted, dict)):
        raise ValueError("not as it is written")
    return Request(target, source, wanted)


def _piece(one: list[Any]) -> tuple[Key, Piece]:
    *key, crc, size = one
    return key[0] if len(key) == 1 else PieceKey(*key), Piece(crc, size)
