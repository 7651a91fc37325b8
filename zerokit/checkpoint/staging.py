"""Directories that appear whole or not at all, and the leftovers of killed writers.

A directory is written under a temporary name beside its target, which names the writing process; it is synced, renamed,
and its parent synced. Where one is replaced, the two are exchanged atomically; where the file system cannot do that,
the old one has a name beside it for a moment, from which the next command puts it back after a kill.
"""

from __future__ import annotations

import math
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zerokit import files
from zerokit.checkpoint.disk import entries_of, explained, is_directory, is_there, status_of
from zerokit.errors import CheckpointError, MissingPath
from zerokit.process import Process

Foreign = Callable[[Path], str]
"""What a directory holds that is no output of zerokit's, as text such as "the directory 'src'"; "" if nothing."""

IDLE_SECONDS = 3600.0
"""A writer that cannot be checked (on another host) counts as gone when nothing was written for so long."""

_ASIDE = ".{}.replaced"
_PATIENCE_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Leftover:
    """A leftover of a writer: `target` is the intended name (its first 60 bytes), `size` is in bytes.

    `own`: it belongs to the user of this process. `alive` is None where that cannot be checked. `gone`: it is own and
    will never be finished.
    """

    path: Path
    target: str
    writer: Process
    own: bool
    alive: bool | None
    gone: bool
    size: int

    def describe(self) -> str:
        who = f"process {self.writer.pid} on {self.writer.host}"
        if self.gone:
            return f"left by {who}, which is gone"
        if self.alive:
            return f"{who} is writing it"
        return f"of {who}, {'which cannot be checked from here' if self.own else 'of another user'}"

    def plain(self) -> dict[str, object]:
        return {
            "path": str(self.path),
            "target": self.target,
            "host": self.writer.host,
            "process": self.writer.pid,
            "state": "gone" if self.gone else "alive" if self.alive else "unknown",
            "bytes": self.size,
        }


class Staging:
    """A directory `work` beside `target` that `commit` renames to it; a context manager that discards it otherwise.

    Files in it must be synced by their writers. Raises `CheckpointError` where `target` exists without `force`, or
    is one that `require_vacant` refuses.
    """

    def __init__(self, target: Path, *, force: bool = False, foreign: Foreign | None = None) -> None:
        self._force, self._foreign = force, foreign
        with explained(target, "looked at"):
            # All that were begun here: what is not renamed yet must not count as a leftover below.
            finish_replacements(target.parent)
        require_vacant(target, force=force, foreign=foreign)
        self.target = target.parent.resolve() / target.name
        remove_gone(self.target.parent)
        self.work = files.temporary(self.target)
        with explained(target, "created"):
            files.system().mkdir(self.work)

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def commit(self) -> None:
        """Rename the directory to `target`, durably."""
        calls = files.system()
        with explained(self.target, "put in place"):
            calls.sync_directory(self.work)
            self._put()
            calls.sync_directory(self.target.parent)

    def discard(self) -> None:
        """Remove the directory at the temporary name; after a commit, this is the replaced one."""
        files.remove_tree(self.work)

    def _put(self) -> None:
        calls = files.system()
        if not is_there(self.target):
            # A plain rename would also replace an empty directory that another process has just made.
            calls.rename_new(self.work, self.target)
            return
        require_vacant(self.target, force=self._force, foreign=self._foreign)
        if calls.exchange(self.work, self.target):
            return
        aside = self.target.with_name(_ASIDE.format(self.target.name))
        calls.rename(self.target, aside)
        try:
            calls.rename(self.work, self.target)
        except OSError:
            with suppress(OSError):
                calls.rename(aside, self.target)
            raise
        calls.sync_directory(self.target.parent)
        files.remove_tree(aside)


def finish_replacement(target: Path, *, patience: float = _PATIENCE_SECONDS) -> None:
    """Put back what a writer had set aside that was killed between the two renames of a replacement.

    A living one is given `patience` seconds for the second. Nothing is done with what another user has set aside.
    Raises `OSError` where nothing may be written: an older step would look like the newest.
    """
    aside = target.parent.resolve() / _ASIDE.format(target.name)
    deadline = time.monotonic() + patience
    while target.name and is_there(aside) and belongs_to_this_user(aside) and not is_there(target):
        if time.monotonic() > deadline:
            with suppress(FileNotFoundError):  # another reader was quicker
                files.system().rename(aside, target)
                files.system().sync_directory(target.parent)
            return
        time.sleep(0.02)


def finish_replacements(folder: Path) -> None:
    """`finish_replacement` of everything in a directory, whose replaced directories are removed."""
    head, tail = _ASIDE.split("{}")
    for entry in entries_of(folder):
        if not (entry.name.startswith(head) and entry.name.endswith(tail)):
            continue
        target = folder / entry.name.removeprefix(head).removesuffix(tail)
        finish_replacement(target)
        if is_there(target):
            files.remove_tree(Path(entry.path))


def require_apart(source: Path, target: Path) -> None:
    """Raise `CheckpointError` if one of the two directories is, or contains, the other."""
    inner, outer = target.resolve(), source.resolve()
    if inner == outer:
        raise CheckpointError(f"{target}: the output is the source itself: choose another directory")
    if inner.is_relative_to(outer):
        raise CheckpointError(
            f"{target}: the output lies in its source {source}: choose a directory outside it"
        )
    if outer.is_relative_to(inner):
        raise CheckpointError(f"{target}: the output contains its source {source}: choose another directory")


def require_vacant(target: Path, *, force: bool, foreign: Foreign | None = None) -> None:
    """Raise `CheckpointError` unless the directory `target` can be created, or replaced if `force`.

    It is a `MissingPath` if the parent directory does not exist. Only an empty directory, or one in which there is
    nothing `foreign`, is ever replaced.
    """
    with explained(target, "looked at"):
        if not is_directory(target.parent):
            raise MissingPath(
                f"{target}: its parent directory {target.parent} does not exist: create it first"
            )
        status = status_of(target, follow=False)
        if status is None:
            return
        if not force:
            raise CheckpointError(
                f"{target}: exists: choose another output, or --force (force=True) to replace it"
            )
        if not stat.S_ISDIR(status.st_mode):
            raise CheckpointError(f"{target}: exists and is not a directory: it is not replaced")
        if not belongs_to_this_user(target):
            raise CheckpointError(
                f"{target}: exists and is another user's: it is not replaced: choose another output"
            )
        if entries_of(target) and (strange := foreign(target) if foreign else "files"):
            raise CheckpointError(
                f"{target}: holds {strange}: only an earlier output of this kind is replaced: choose another output, "
                "or remove it yourself"
            )


def leftovers(folder: Path) -> list[Leftover]:
    """The unfinished work of writers in a directory, including living ones."""
    unfinished = []
    for entry in entries_of(folder):
        match = files.TEMPORARY.fullmatch(entry.name)
        writer = Process.parse(match["writer"]) if match else None
        if match and writer and not entry.is_symlink():
            path, lives = Path(entry.path), writer.lives()
            own = belongs_to_this_user(path)
            try:
                size, newest = files.measured(path)
            except OSError:  # it is not seen to be idle
                size, newest = 0, math.inf
            gone = own and (time.time() - newest > IDLE_SECONDS if lives is None else not lives)
            unfinished.append(Leftover(path, match["target"], writer, own, lives, gone, size))
    return unfinished


def remove_gone(folder: Path, *names: str, elsewhere: bool = False) -> None:
    """Remove leftovers of killed writers; of `names`, or if `elsewhere` of all, also where they cannot be checked.

    The targets of `names` are there now.
    """
    targets = {files.stem(name) for name in names}
    for left in leftovers(folder):
        # Two optimizers, say, may be saved into one run: what a living one writes stays.
        if not left.alive and (left.gone or (left.own and (elsewhere or left.target in targets))):
            files.remove_tree(left.path)


def belongs_to_this_user(path: Path) -> bool:
    """Whether the user of this process has made what is there, a link itself; False where nothing is."""
    with suppress(OSError):
        return files.is_own(path.lstat().st_uid, path.parent)
    return False
