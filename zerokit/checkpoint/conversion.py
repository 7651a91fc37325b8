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
    """A conversion in the directory `path`: its finished files, and the journal for those to come.

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
        size_taken = self.taken.get(path.relative_to(self.path).as_posix())
        if size_taken is not None and size_taken != size:
            raise CheckpointError(
                f"{path}: {size_taken} bytes, expected {size}: begin anew, without --resume (resume=False)"
            )
        return size_taken is not None


@contextmanager
def converting(
    target: Path, request: Request, *, resume: bool, force: bool, foreign: Foreign
) -> Iterator[Work]:
    """A directory beside `target`, renamed to it durably when the body succeeds.

    `resume`: take over what an interrupted conversion of the same request has finished. One that is not taken over
    causes a `ZerokitWarning`, and is removed when this conversion succeeds. If the body fails, its work is removed,
    unless it was resumed and only interrupted again. Raises as `Staging` does.
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
                with suppress(OSError):  # with what was added to it since
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
    """The former path of the work directory that `staging` took over; None where there is none to resume."""
    for left in _usable(staging.target, request, resume=resume):
        # Over the empty directory that is there. One of several processes that try succeeds.
        with suppress(OSError):
            files.system().rename(left.path, staging.work)
            return left.path
    return None


def _begun(work: Path, request: Request, *, taken: bool) -> Work:
    done = journal.finished(work) if taken else None
    if taken:
        _keep_only(work, work, done)
    if done is None:
        return Work(work, Journal.begun(work, request))
    return Work(work, Journal(work, done.end, done.crc), done.files, done.pieces)


def _of_contents(error: BaseException) -> bool:
    """Whether the source was damaged, rather than a disk or a signal to blame: a resumed run would fail again."""
    return isinstance(error, CheckpointError) and not isinstance(error.__cause__, OSError)


def _usable(target: Path, request: Request, *, resume: bool) -> list[Leftover]:
    """Interrupted conversions that can be resumed, the largest first; warns of all others."""
    usable = []
    for left, other in _interrupted(target):
        described = f"{left.path}: an interrupted conversion to {target.name}, {left.size:,} bytes"
        remedy = f"zerokit prune {target.parent} removes it"
        if not left.gone:
            if resume:
                _warn(f"{left.path}: {left.describe()}: it is not taken over, this conversion begins anew")
        elif different := request.differences(other):
            _warn(f"{described}, {different}{', so that it is not taken over' if resume else ''}: {remedy}")
        elif resume:
            usable.append(left)
        else:
            _warn(f"{described}: --resume (resume=True) goes on with it, {remedy}")
    return sorted(usable, key=lambda left: -left.size)


def _interrupted(target: Path) -> list[tuple[Leftover, Request]]:
    """Conversions to `target` that have finished something, and what they were to write."""
    conversions = []
    for left in leftovers(target.parent):
        request = journal.interrupted(left.path)
        if request is not None and request.target == target.name:
            conversions.append((left, request))
    return conversions


def _keep_only(folder: Path, work: Path, done: Finished | None) -> None:
    """Remove what is not whole, and was not noted as such: it is written again."""
    kept = set() if done is None else {work / name for name in (*done.files, journal.NAME)}
    with explained(folder, "listed"):
        entries = sorted(folder.iterdir())
    for entry in entries:
        if entry in kept:
            continue
        if any(path.is_relative_to(entry) for path in kept):
            _keep_only(entry, work, done)
        elif entry.is_dir() and not entry.is_symlink():
            files.remove_tree(entry)
        else:
            with explained(entry, "removed"):
                files.system().unlink(entry)


def _warn(text: str) -> None:
    warnings.warn(text, ZerokitWarning, stacklevel=2)
