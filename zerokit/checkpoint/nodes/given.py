"""What a command was given: one checkpoint, or several directories, some of them on other machines."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from zerokit import files
from zerokit.checkpoint.disk import explained, make_directory
from zerokit.checkpoint.nodes.directories import Directory, Report
from zerokit.checkpoint.nodes.remote import RemoteDirectory, host_and_path
from zerokit.errors import CheckpointError, UsageError
from zerokit.files import path_of

Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def several(paths: Paths) -> list[str | os.PathLike[str]]:
    """What was given, as a list. Raises `UsageError` if it is empty."""
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise UsageError("no directory was given: name at least one")
    return given


def alone(paths: Paths) -> Path | None:
    """The one path on this machine that was given; None for several ones, or one on another machine."""
    first, *more = several(paths)
    return None if more or host_and_path(first) is not None else path_of(first)


@contextmanager
def given_directories(
    paths: Paths, *, beside: Path | None = None, report: Report | None = None
) -> Iterator[list[Directory]]:
    """The directories that were given. What other machines send lies in a private one while the context lasts.

    That is made beside the path `beside`, where an output goes, or where temporary files do. `report` is called while
    files come, and what it raises ends that. Errors name files as the user does.
    """
    where = [host_and_path(path) for path in several(paths)]
    local = [Directory(os.fspath(path), path_of(path)) for path in several(paths)]
    if not any(where):
        yield local
        return
    work = files.temporary(Path(tempfile.gettempdir(), "zerokit") if beside is None else beside)
    directories: list[Directory] = []
    try:
        make_directory(work)
        with explained(work, "made private"):
            work.chmod(0o700)
        for number, place in enumerate(where):
            if place is None:
                directories.append(local[number])
            else:
                make_directory(work / str(number))
                directories.append(RemoteDirectory(local[number].shown, work / str(number), *place))
        for directory in directories:
            if isinstance(directory, RemoteDirectory):
                directory.list(report)
        yield directories
    except CheckpointError as error:
        text = str(error)
        for directory in directories:
            text = directory.named(text)
        raise type(error)(text) from error
    finally:
        files.remove_tree(work)
