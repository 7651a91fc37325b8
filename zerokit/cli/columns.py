"""Tables of short cells with a text next to them, or below them on a narrow terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

# Between two columns.
_GAP = 2
# Text beside other columns wants at least so many characters.
_NARROW_TEXT = 36


def annotate(rows: Sequence[tuple[Sequence[Text], Text]], width: int, right: int = -1) -> RenderableType:
    """Rows of short cells with a wrapped text next to them, or below them if `width` is too small.

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
    for column in range(len(widths)):
        table.add_column(justify="right" if column == right else "left", no_wrap=True)
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
