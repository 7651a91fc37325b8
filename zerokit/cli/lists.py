"""Options that take several values, separated by commas: `--stage 0,1,2`. Completion works for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem


class CommaList(click.ParamType[Any]):
    """Some values of another type of click's; a tuple of them, in their order, each once.

    Args:
        item: the type of each value.
    """

    def __init__(self, item: click.ParamType[Any]) -> None:
        self._item = item
        self.name = f"{item.name} list"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """The values; a default may be a tuple already. An empty one is refused by name."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(parts):
            self.fail(f"{value!r} has an empty value between its commas.", param, ctx)
        return tuple(dict.fromkeys(self._item.convert(part, param, ctx) for part in parts))

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """What may follow the last comma, apart from what precedes it."""
        before, comma, last = incomplete.rpartition(",")
        taken = set(before.split(","))
        return [
            CompletionItem(f"{before}{comma}{item.value}", item.type, item.help)
            for item in self._item.shell_complete(ctx, param, last)
            if item.value not in taken
        ]


class Name(click.ParamType[Any]):
    """Any string; `names` are offered for completion. Whether it means anything is checked elsewhere."""

    name = "name"

    def __init__(self, names: Callable[[], list[str]]) -> None:
        self._names = names

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The names that begin so."""
        return [CompletionItem(name) for name in self._names() if name.startswith(incomplete)]


class Range(click.IntRange):
    """A small range of whole numbers, both ends given, that completion offers."""

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """The numbers that begin so."""
        numbers = range(int(self.min or 0), int(self.max or 0) + 1)
        return [CompletionItem(str(number)) for number in numbers if str(number).startswith(incomplete)]
