"""Tables that fit the terminal: what matters least goes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from zerokit.text import printable_lines

# Between two columns.
_GAP = 2
# Text beside other columns wants at least so many characters.
_NARROW_TEXT = 36
# Names longer than this may be broken at a dash.
_LONG_NAME = 16


@dataclass(frozen=True, slots=True)
class Column:
    """One of a table; where the terminal is too narrow, columns with the highest `rank` go first, 0 never."""

    heading: str
    values: list[str]
    rank: int = 0
    left: bool = False

    @property
    def width(self) -> int:
        """In characters."""
        return max(len(line) for text in [self.heading, *self.values] for line in text.split("\n"))

    def broken(self) -> Column:
        """With long names on two lines each."""
        return replace(self, values=[_break(value) for value in self.values]) if self.left else self


def fitting(columns: Sequence[Column], width: int) -> list[Column] | None:
    """As many columns as fit, the important ones first; None where not even those fit that never go."""
    kept = list(columns)
    if _total(kept) > width:
        kept = [column.broken() for column in kept]
    while _total(kept) > width:
        worst = max(kept, key=lambda column: column.rank)
        if worst.rank == 0:
            return None
        kept.remove(worst)
    return kept


def make_table(columns: Sequence[Column], dim: Sequence[bool] = ()) -> Table:
    """The table; `dim` says of each row whether it is less important."""
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column.heading, justify="left" if column.left else "right", no_wrap=True)
    for place, row in enumerate(zip(*(column.values for column in columns), strict=True)):
        table.add_row(
            *(Text(printable_lines(text)) for text in row), style="dim" if dim and dim[place] else None
        )
    return table


def annotate(rows: Sequence[tuple[Sequence[Text], Text]], width: int, right: int = -1) -> RenderableType:
    """Rows of short cells, each with a text that wraps beside them, or below them where `width` leaves it too little.

    Args:
        rows: cells and text of each; all rows have as many cells.
        width: of the terminal, in characters.
        right: the column that is aligned to the right, if any.
    """
    if not rows:
        return Group()
    widths = [
        max(cell.cell_len for cell in column) for column in zip(*(cells for cells, _ in rows), strict=True)
    ]
    taken = sum(widths) + _GAP * len(widths)
    if width - taken < min(_NARROW_TEXT, max(text.cell_len for _, text in rows)):
        return Group(*(part for cells, text in rows for part in _stacked(cells, text, widths)))
    table = Table(box=None, padding=(0, _GAP, 0, 0), show_header=False, pad_edge=False)
    for place in range(len(widths)):
        table.add_column(justify="right" if place == right else "left", no_wrap=True)
    table.add_column(overflow="fold")
    for cells, text in rows:
        table.add_row(*cells, text)
    return table


def _stacked(cells: Sequence[Text], text: Text, widths: Sequence[int]) -> list[RenderableType]:
    line = Text(overflow="fold")
    for cell, width in zip(cells, widths, strict=True):
        line.append_text(cell)
        line.append(" " * (width - cell.cell_len + _GAP))
    line.rstrip()
    return [line, *([Padding(text, (0, 0, 0, _GAP))] if text else [])]


def _total(columns: Sequence[Column]) -> int:
    return sum(column.width + _GAP for column in columns) - _GAP


def _break(name: str) -> str:
    head, dash, tail = name.rpartition("-")
    return f"{head}-\n{tail}" if len(name) > _LONG_NAME and dash else name
