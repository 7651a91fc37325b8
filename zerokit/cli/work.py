"""Commands in common: options, long work with a progress bar and a clean end after signals, and results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from zerokit.cli.text import counted, decimal_size
from zerokit.launch.interrupts import Interrupts
from zerokit.text import printable

_F = TypeVar("_F", bound=Callable[..., Any])


def options(*added: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """A decorator that adds these options to a command; its help lists them in this order."""

    def decorate(function: _F) -> _F:
        for option in reversed(added):
            function = option(function)
        return function

    return decorate


conversion_options = options(
    click.option("--jobs", type=click.IntRange(min=1), help="Number of copying threads.  [default: up to 4]"),
    click.option("--force", is_flag=True, help="Replace an existing output."),
    click.option("--resume", is_flag=True, help="Continue an interrupted run to the same output."),
    click.option("--json", "as_json", is_flag=True, help="Print the result on stdout as JSON."),
)
"""The options of every command that writes a new checkpoint."""

tracking_uri_option = click.option(
    "--tracking-uri",
    help="MLflow store of the runs.  [default: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db]",
)
experiment_option = click.option(
    "--experiment", default="zerokit-bench", show_default=True, help="MLflow experiment of the runs."
)


def weights_options(prefix: str) -> Callable[[_F], _F]:
    """The options of weights for Hugging Face: dtype, max_shard_size and like; `prefix` begins their help."""
    return options(
        click.option(
            "--dtype",
            type=click.Choice(["bf16", "fp16", "fp32"]),
            help=f"{prefix}Dtype of all floating-point tensors.  [default: each tensor's own in the model]",
        ),
        click.option(
            "--max-shard-size",
            default="5GB",
            show_default=True,
            help=f"{prefix}Maximum size of a file, such as 300MB, 5GB (10^9) or 5GiB (2^30).",
        ),
        click.option(
            "--like",
            type=click.Path(path_type=Path),
            metavar="MODEL_DIR",
            help=f"{prefix}Copy configuration and tokenizer from this folder. Its weights, if any, must have the "
            "same shapes.",
        ),
    )


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


def json_of(value: Any) -> Any:
    """A result as JSON data: dataclasses by their fields, or as their `plain()` says, and paths as text."""
    if hasattr(value, "plain"):
        return value.plain()
    if is_dataclass(value):
        return {field.name: json_of(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (list, tuple)):
        return [json_of(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def print_output(output: Path, as_json: bool, *, summary: bool = True, **more: object) -> None:
    """Print a command's result: the path, or JSON with its files, on stdout, and a `summary` on stderr."""
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
