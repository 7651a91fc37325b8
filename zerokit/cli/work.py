"""Commands in common: options and their types, lines and results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from zerokit.files import path_of
from zerokit.text import printable


def say(text: str, *, err: bool = False) -> None:
    """Print a line, whatever hostile names are in it."""
    click.echo(printable(text), err=err)


def note(lines: Iterable[str]) -> None:
    """Print lines on stderr that are not errors."""
    for line in lines:
        say(f"zerokit: {line}", err=True)


_F = TypeVar("_F", bound=Callable[..., Any])


def options(*added: Callable[[_F], _F]) -> Callable[[_F], _F]:
    """A decorator that adds these options to a command; its help lists them in this order."""

    def decorate(function: _F) -> _F:
        for option in reversed(added):
            function = option(function)
        return function

    return decorate


class _Path(click.Path):
    """A path; an empty one, from a variable of a script that is not set, would be the working directory.

    Shells leave `~` as it is in `--option=~/file`.
    """

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse the empty path, and follow `~`."""
        if value == "":
            self.fail("the path is empty.", param, ctx)
        return super().convert(path_of(value), param, ctx)


PATH = _Path(path_type=Path)
EXISTING = _Path(exists=True, path_type=Path)
"""A path that is only read; a checkpoint is not one, for a killed writer's replacement is finished before it is looked
for."""
checkpoint_argument = click.argument("checkpoint", metavar="CKPT...", type=PATH, nargs=-1, required=True)
"""One checkpoint, or several nodes' directories that have one together, some of them as `host:path`."""


def json_option(help: str) -> Callable[[_F], _F]:
    """`--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help=help)


tracking_uri_option = click.option(
    "--tracking-uri",
    help="MLflow store of the runs.  [default: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db]",
)
experiment_option = click.option(
    "--experiment", default="zerokit-bench", show_default=True, help="MLflow experiment of the runs."
)


def json_of(value: Any) -> Any:
    """A result as JSON data: dataclasses by their fields, or as their `plain()` says, and paths as text."""
    if hasattr(value, "plain"):
        return value.plain()
    if is_dataclass(value):
        return {field.name: json_of(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (list, tuple)):
        return [json_of(part) for part in value]
    return str(value) if isinstance(value, Path) else value


def print_json(value: Any) -> None:
    """Print a result as one JSON document on stdout."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


class Finite(click.FloatRange):
    """A number in a range: no bound refuses nan."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Parse the number; neither nan nor infinity is one."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


class CommaList(click.ParamType[Any]):
    """Several values of another click type, as a tuple in their order, each once.

    Args:
        item: the type of each value.
    """

    def __init__(self, item: click.ParamType[Any]) -> None:
        self._item = item
        self.name = f"{item.name} list"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Parse the values; a default may already be a tuple. An empty value is refused."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(parts):
            self.fail(f"{value!r} has an empty value between its commas.", param, ctx)
        return tuple(dict.fromkeys(self._item.convert(part, param, ctx) for part in parts))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the value after the last comma."""
        before, comma, last = incomplete.rpartition(",")
        taken = set(before.split(","))
        return [
            CompletionItem(f"{before}{comma}{item.value}", item.type, item.help)
            for item in self._item.shell_complete(ctx, param, last)
            if item.value not in taken
        ]


class Name(click.ParamType[Any]):
    """Any string; `names` are offered for completion, and the value is checked elsewhere."""

    def __init__(self, names: Callable[[], list[str]], name: str = "name") -> None:
        self._names, self.name = names, name

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the names."""
        return [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]
