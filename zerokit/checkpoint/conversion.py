"""A directory made out of a checkpoint, whole or not at all, which a later command can go on with after a kill.

The work directory holds a `journal`. Where its writer is gone, one with the same target and the same request takes the
directory over, by a rename to a name of its own, keeps the files that are whole, and writes the rest.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from zerokit import files
from zerokit.checkpoint import journal
from zerokit.checkpoint.checksum import Piece
from zerokit.checkpoint.disk import explained
from zerokit.checkpoint.journal import Finished, Journal, Request
from zerokit.checkpoint.plan import Key
from zerokit.checkpoint.staging import Foreign, Leftover, Staging, leftovers, remove
from zerokit.errors import CheckpointError, ZerokitWarning


@dataclass
class Work:
    """A conversion in the directory `path`: what is whole there already, and where to note what has become so.

    `taken` are files that an interrupted conversion has finished, by their paths in `path`, with their sizes in bytes;
    `pieces` the checksums of what it has read for them.
    """

    path: Path
    journal: Journal
    taken: dict[str, int] = field(default_factory=dict)
    pieces: dict[Key, Piece] = field(default_factory=dict)

    @property
    def taken_bytes(self) -> int:
        return sum(self.taken.values())

    def has(self, path: Path, size: int) -> bool:
        """Whether the file need not be written. Raises `CheckpointError` where it is there with another size."""
        found = self.taken.get(path.relative_to(self.path).as_posix())
        if found is not None and found != size:
            raise CheckpointError(
                f"{path}: {found} bytes, which is not what is to be written ({size}): begin anew, without --resume "
                "(resume=False)"
            )
        return found is not None


@contextmanager
def converting(
    target: Path, request: Request, *, resume: bool, force: bool, foreign: Foreign
) -> Iterator[Work]:
    """A directory beside `target` that takes its place, durably, when the body ends well.

    `resume`: what an interrupted conversion of the same request has finished is taken over. Without it, and where one
    is not taken over, a `ZerokitWarning` says so; it goes when this conversion has succeeded. If the body fails, its
    work is removed, unless it had taken something over and was only interrupted. Raises as `Staging` does.
    """
    staging = Staging(target, force=force, foreign=foreign)
    try:
        origin = _taken_over(staging, request, resume=resume)
        try:
            work = _begun(staging.work, request, taken=origin is not None)
            try:
                yield work
            finally:
                work.journal.close()
        except BaseException as error:
            if origin is not None and not _of_contents(error):
                with suppress(OSError):  # with what has come to it since
                    files.system().rename(staging.work, origin)
            raise
        with explained(work.path / journal.NAME, "removed"):
            files.system().unlink(work.path / journal.NAME)
        staging.commit()
    finally:
        staging.discard()
    for left, _ in _interrupted(staging.target):
        if left.gone:
            remove(left)


def _taken_over(staging: Staging, request: Request, *, resume: bool) -> Path | None:
    """Where the work was that is `staging`'s now; None where there is none to go on with."""
    for left in _usable(staging.target, request, resume=resume):
        # Over the empty directory that is there. Whoever else wanted to take it comes too late, or has it.
        with suppress(OSError):
            files.system().rename(left.path, staging.work)
            return left.path
    return None


def _begun(work: Path, request: Request, *, taken: bool) -> Work:
    found = journal.finished(work) if taken else None
    if taken:
        _keep_only(work, work, found)
    if found is None:
        return Work(work, Journal.begun(work, request))
    return Work(work, Journal(work, found.end, found.crc), found.files, found.pieces)


def _of_contents(error: BaseException) -> bool:
    """Whether what was read was wrong, and no disk or signal: noted once, it would be wrong again and again."""
    return isinstance(error, CheckpointError) and not isinstance(error.__cause__, OSError)


def _usable(target: Path, request: Request, *, resume: bool) -> list[Leftover]:
    """What can be gone on with, the most promising first; a warning of all else."""
    usable = []
    for left, other in _interrupted(target):
        told = f"{left.path}: an interrupted conversion to {target.name}, {left.size:,} bytes"
        remedy = f"zerokit prune {target.parent} removes it"
        if not left.gone:
            if resume:
                _warn(f"{left.path}: {left.told()}: it is not taken over, this conversion begins anew")
        elif different := request.differences(other):
            _warn(f"{told}, {different}{', so that it is not taken over' if resume else ''}: {remedy}")
        elif resume:
            usable.append(left)
        else:
            _warn(f"{told}: --resume (resume=True) goes on with it, {remedy}")
    return sorted(usable, key=lambda left: -left.size)


def _interrupted(target: Path) -> list[tuple[Leftover, Request]]:
    """Conversions to `target` that have finished something, and what they were to write."""
    found = []
    for left in leftovers(target.parent):
        request = journal.interrupted(left.path)
        if request is not None and request.target == target.name:
            found.append((left, request))
    return found


def _keep_only(folder: Path, work: Path, found: Finished | None) -> None:
    """Remove what is not whole, and was not noted as such: it is written again."""
    kept = set() if found is None else {work / name for name in (*found.files, journal.NAME)}
    with explained(folder, "listed"):
        entries = sorted(folder.iterdir())
    for entry in entries:
        if entry in kept:
            continue
        if any(path.is_relative_to(entry) for path in kept):
            _keep_only(entry, work, found)
        elif entry.is_dir() and not entry.is_symlink():
            files.remove_tree(entry)
        else:
            with explained(entry, "removed"):
                files.system().unlink(entry)


def _warn(text: str) -> None:
    warnings.warn(text, ZerokitWarning, stacklevel=2)
