"""Long work in a command: a progress bar, and signals that end it cleanly."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from zerokit.cli.bar import byte_bar
from zerokit.cli.text import counted, decimal_size
from zerokit.errors import UsageError
from zerokit.launch.interrupts import Interrupts
from zerokit.text import printable


@contextmanager
def working(task: str) -> Iterator[Callable[[int, int], None]]:
    """What to call often, with the bytes done and the bytes in all; it raises `Interrupted` after a signal.

    A `UsageError` of the work is shown as one of the options that led to it, with exit code 2.
    """
    with Interrupts() as interrupts, byte_bar(task) as show:

        def progress(done: int, total: int) -> None:
            interrupts.check()
            if show is not None:
                show(done, total)

        try:
            yield progress
        except UsageError as error:
            raise click.UsageError(printable(str(error))) from error


def print_output(output: Path, as_json: bool, *, summary: bool = True, **more: object) -> None:
    """Print what a command has written, on stdout: its path, or JSON with its files; a `summary` on stderr."""
    sizes = [path.stat().st_size for path in output.rglob("*") if path.is_file()]
    if not as_json:
        if summary:
            click.echo(f"{counted(len(sizes), 'file')}, {decimal_size(sum(sizes))}", err=True)
        # Unchanged for a program, escaped for a terminal.
        click.echo(printable(str(output)) if sys.stdout.isatty() else output)
        return
    files = {
        str(path.relative_to(output)): path.stat().st_size
        for path in sorted(output.rglob("*"))
        if path.is_file()
    }
    click.echo(json.dumps({"output": str(output), **more, "files": files}, indent=2))
