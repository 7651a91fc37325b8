"""Directories that appear whole or not at all, and what killed writers have left of them.

A directory is written under a temporary name beside its target, which names the writing process; it is synced, renamed,
and its parent synced. Where one is replaced, the two are exchanged atomically; where the file system cannot do that, a
journal beside them records how the next command is to finish.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from zerokit import files
from zerokit.checkpoint.disk import explained, read_whole
from zerokit.checkpoint.journal import interrupted
from zerokit.checkpoint.strict import member, parse_json, typed
from zerokit.errors import CheckpointError
from zerokit.process import Process

Foreign = Callable[[Path], str]
"""What a directory holds that is no output of zerokit's, as text such as "the directory 'src'"; "" if nothing."""

IDLE_SECONDS = 3600.0
"""A writer that cannot be checked (on another host) counts as gone when nothing was written for so long."""

_JOURNAL = ".{}.replacing"
_JOURNAL_BYTES = 4096
_PATIENCE_SECONDS = 2.0

_replacing: set[Path] = set()
"""Journals of what this process is replacing now."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """What a writer has not finished: `target` is the name it would have had (its first 60 bytes), `size` in bytes.

    `writer` is None where the name does not show it; `alive` is None where it cannot be checked. `gone`: it will
    never be finished.
    """

    path: Path
    target: str
    writer: Process | None
    alive: bool | None
    gone: bool
    size: int

    def describe(self) -> str:
        """Whose it is, as text."""
        who = f"process {self.writer.pid} on {self.writer.host}" if self.writer else "an unknown process"
        if self.gone:
            return f"left by {who}, which is gone"
        return f"{who} is writing it" if self.alive else f"of {who}, which cannot be checked from here"

    def plain(self) -> dict[str, object]:
        """As JSON data."""
        return {
            "path": str(self.path),
            "target": self.target,
            "host": self.writer.host if self.writer else None,
            "process": self.writer.pid if self.writer else None,
            "state": "gone" if self.gone else "alive" if self.alive else "unknown",
            "bytes": self.size,
        }


class Staging:
    """A directory `work` beside `target` that `commit` renames to it.

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

    def commit(self) -> None:
        """Rename the directory to `target`, durably."""
        calls = files.system()
        with explained(self.target, "put in place"):
            calls.sync_directory(self.work)
            self._put()
            calls.sync_directory(self.target.parent)

    def discard(self) -> None:
        """Remove what is at the temporary name: after a commit, what was replaced."""
        files.remove_tree(self.work)

    def _put(self) -> None:
        calls = files.system()
        if not os.path.lexists(self.target):
            # A plain rename would also replace an empty directory that another process has just made.
            calls.rename_new(self.work, self.target)
            return
        require_vacant(self.target, force=self._force, foreign=self._foreign)
        if calls.exchange(self.work, self.target):
            return
        journal = self.target.with_name(_JOURNAL.format(self.target.name))
        aside = self.work.with_name(self.work.name + ".old")
        _replacing.add(journal)
        try:
            files.write_aside(journal, json.dumps({"new": self.work.name, "old": aside.name}).encode())
            calls.rename(self.target, aside)
            # A reader may have waited long enough, and finished it.
            with suppress(FileNotFoundError):
                calls.rename(self.work, self.target)
            calls.sync_directory(self.target.parent)
            with suppress(FileNotFoundError):
                calls.unlink(journal)
        finally:
            _replacing.discard(journal)
        files.remove_tree(aside)


@contextmanager
def staged(target: Path, *, force: bool = False, foreign: Foreign | None = None) -> Iterator[Path]:
    """A new, empty directory beside `target`, renamed to it durably when the body succeeds.

    If the body fails, for whatever reason, the directory is removed with all it holds and `target` is as before.
    Errors as of `Staging`.
    """
    staging = Staging(target, force=force, foreign=foreign)
    try:
        yield staging.work
        staging.commit()
    finally:
        staging.discard()


def finish_replacement(target: Path, *, patience: float = _PATIENCE_SECONDS) -> None:
    """Finish what a writer began that was killed between the two renames of a replacement.

    A living one is given `patience` seconds while there is nothing, and all the time it needs while `target` is there.
    Raises `OSError`.
    """
    journal = target.parent.resolve() / _JOURNAL.format(target.name)
    if not target.name or not os.path.lexists(journal):
        return
    calls = files.system()
    try:
        content = read_whole(journal, limit=_JOURNAL_BYTES)
        plain = typed(parse_json(content), dict, "the journal")
        names = [member(plain, key, str) for key in ("new", "old")]
    except CheckpointError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{journal}: damaged ({error}): look at what lies beside it, and remove it"
        ) from error
    matches = [files.TEMPORARY.fullmatch(name) for name in names]
    if any("/" in name for name in names) or not all(
        m and m["target"] == files.stem(target.name) for m in matches
    ):
        raise CheckpointError(
            f"{journal}: names {' and '.join(map(repr, names))}, which zerokit does not write there: remove it"
        )
    new, old = (journal.with_name(name) for name in names)
    deadline = time.monotonic() + patience
    while _at_work(journal, new):
        if os.path.lexists(target):
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    if not os.path.lexists(target):
        try:
            calls.rename(new if new.is_dir() else old, target)
        except OSError:
            # Its writer was quicker; or there is none of the three any more, and nothing to finish.
            if not os.path.lexists(target) and (new.is_dir() or old.is_dir()):
                raise
        calls.sync_directory(target.parent)
    with suppress(FileNotFoundError):
        calls.unlink(journal)
    files.remove_tree(old)


def finish_replacements(folder: Path) -> None:
    """`finish_replacement` of everything in a directory."""
    head, tail = _JOURNAL.split("{}")
    for journal in folder.glob(f"{head}*{tail}"):
        finish_replacement(folder / journal.name.removeprefix(head).removesuffix(tail))


def _at_work(journal: Path, new: Path) -> bool:
    """Whether the journal's writer still works on the replacement by `new`, and will finish it."""
    if not os.path.lexists(journal):
        return False
    match = files.TEMPORARY.fullmatch(new.name)
    writer = Process.parse(match["writer"] or "") if match else None
    if writer == Process.current():
        return journal in _replacing
    return not _leftover(journal, "", writer).gone


def require_apart(source: Path, target: Path) -> None:
    """Raises `CheckpointError` where one of the two directories is, or lies in, the other."""
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
    """Raises `CheckpointError` unless the directory `target` can be made, or replaced if `force`.

    Only an empty directory, or one in which there is nothing `foreign`, is ever replaced.
    """
    with explained(target, "looked at"):
        if not target.parent.is_dir():
            raise CheckpointError(
                f"{target}: its parent directory {target.parent} does not exist: create it first"
            )
        if not os.path.lexists(target):
            return
        if not force:
            raise CheckpointError(
                f"{target}: exists: choose another output, or --force (force=True) to replace it"
            )
        if target.is_symlink() or not target.is_dir():
            raise CheckpointError(f"{target}: exists and is no directory: it is not replaced")
        if any(target.iterdir()) and (strange := foreign(target) if foreign else "files"):
            raise CheckpointError(
                f"{target}: holds {strange}, which zerokit has not written there: it is not replaced; choose another "
                "output, or remove it yourself"
            )


def leftovers(folder: Path) -> list[Leftover]:
    """What writers have begun in a directory and not finished, living ones' too."""
    unfinished = []
    with suppress(FileNotFoundError):
        for path in sorted(folder.iterdir()):
            match = files.TEMPORARY.fullmatch(path.name)
            if match and not path.is_symlink():
                writer = Process.parse(match["writer"] or "")
                unfinished.append(_leftover(path, match["target"], writer))
    return unfinished


def remove_gone(folder: Path, *names: str) -> None:
    """Remove what killed writers have left, but not interrupted conversions, which may be resumed.

    Leftovers of `names` are removed even where their writer cannot be checked: the targets are there now.
    """
    targets = {files.stem(name) for name in names}
    for left in leftovers(folder):
        if left.alive:
            continue  # two optimizers, say, that are saved into one run
        if left.target in targets or (left.gone and interrupted(left.path) is None):
            remove(left)


def remove(left: Leftover) -> None:
    """Remove a leftover, as far as that is possible."""
    if left.path.is_dir():
        files.remove_tree(left.path)
    else:
        with suppress(OSError):
            files.system().unlink(left.path)


def _leftover(path: Path, target: str, writer: Process | None) -> Leftover:
    lives = writer.lives() if writer else None
    size, newest = files.measured(path)
    idle = time.time() - newest > IDLE_SECONDS
    return Leftover(path, target, writer, lives, idle if lives is None else not lives, size)
