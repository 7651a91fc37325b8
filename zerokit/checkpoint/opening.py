"""Opens what a tool was given: one checkpoint of any format, or several directories that have one together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from zerokit.checkpoint.copying import Progress
from zerokit.checkpoint.formats import open_source
from zerokit.checkpoint.nodes.given import Paths, alone, given_directories
from zerokit.checkpoint.nodes.joined import join
from zerokit.checkpoint.source import Source


@contextmanager
def opened_source(
    paths: Paths, *, beside: Path | None = None, progress: Progress | None = None
) -> Iterator[Source]:
    """The checkpoint at one path, or the newest step that nodes' directories have together, while the context lasts.

    `beside`: where an output goes; what other machines send lies beside it. Raises `CheckpointError` unless there is a
    checkpoint all of whose files are there.
    """
    if (one := alone(paths)) is not None:
        yield open_source(one)
        return
    with given_directories(paths, beside=beside, report=progress) as directories:
        joined = join(directories)
        with joined.reading():
            joined.settle((name for name, _ in joined.held_files()), progress)
            yield joined
