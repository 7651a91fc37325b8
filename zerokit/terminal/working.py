"""Long work on checkpoints: a bar of bytes on a terminal, and a clean end after signals. Only a bar imports rich."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from zerokit.interrupts import Interrupts


@contextmanager
def byte_bar(task: str) -> Iterator[Callable[[int, int], None] | None]:
    """A callback for the bytes done and the total; None if stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True, highlight=False)
    with Progress(*columns, console=console, transient=True, refresh_per_second=4) as progress:
        number = progress.add_task(task, total=None)

        def show(done: int, total: int) -> None:
            progress.update(number, completed=done, total=total)

        yield show


@contextmanager
def working(task: str) -> Iterator[Callable[[int, int], None]]:
    """A callback for frequent calls with the bytes done and the total; raises `Interrupted` after a signal."""
    with Interrupts() as interrupts, byte_bar(task) as show:

        def progress(done: int, total: int) -> None:
            interrupts.check()
            if show is not None:
                show(done, total)

        yield progress
