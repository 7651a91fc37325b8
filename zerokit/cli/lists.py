"""Options that take several values, separated by commas, with completion for each: `--stage 0,1,2`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem


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


class Range(click.IntRange):
    """A small range of integers, offered for completion."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Complete the numbers."""
        numbers = range(int(self.min or 0), int(self.max or 0) + 1)
        return [CompletionItem(str(number)) for number in numbers if str(number).startswith(incomplete)]
