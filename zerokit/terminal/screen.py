"""Consoles, and two kinds of tables. All text goes through `text`, which escapes what is hostile in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zerokit.text import printable

NARROWEST = 80
"""Characters of a line for which tables are made; a narrower terminal folds them itself."""
ANY_WIDTH = 1000
"""Characters of a line that no line of a pipe reaches."""


def unfolded(console: Console | None = None, at_least: int = 0) -> Console:
    """The console, by default stdout's: a terminal of `at_least` so many characters; no line of a pipe is folded."""
    console = console or Console(highlight=False)
    console.width = max(console.width, at_least) if console.is_terminal else ANY_WIDTH
    return console


def text(content: str, style: str = "") -> Text:
    """Text in one line, with escapes for control characters."""
    return Text(printable(content), style)


def line(console: Console, content: str = "", style: str = "") -> None:
    """Print a line, which a terminal folds itself."""
    console.print(text(content, style), soft_wrap=True)


def grid(rows: Sequence[Sequence[Text]], *, right: int = -1) -> Table:
    """Rows of short cells, which stay whole, and a last one that is folded; the column `right` is aligned there."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for column in range(max(map(len, rows), default=1) - 1):
        table.add_column(justify="right" if column == right else "left", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


class Head(NamedTuple):
    """The heading of a column; `wraps` lets the heading be folded, but never what is below it."""

    title: str = ""
    right: bool = False
    wraps: bool = False
    style: str = ""


def headed(
    heads: Sequence[Head], rows: Iterable[Sequence[Text]], *, bold: int | None = None, **look: Any
) -> Table:
    """A table with headings, whose row `bold` stands out; `look` is rich's.

    rich would cut figures where there is too little room, so that columns have the width of their contents at least.
    """
    rows = list(rows)
    table = Table(box=None, **look)
    for number, head in enumerate(heads):
        whole = [row[number].plain for row in rows if number < len(row)] + [head.title] * (not head.wraps)
        table.add_column(
            Text(head.title),
            justify="right" if head.right else "left",
            no_wrap=not head.wraps,
            min_width=max(map(cell_len, "\n".join(whole).split("\n"))),
            style=head.style,
        )
    for number, row in enumerate(rows):
        table.add_row(*row, style="bold" if number == bold else "")
    return table
