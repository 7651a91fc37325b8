"""Tables that fit the terminal: what matters least goes first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table

# Between two columns.
_GAP = 2
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
        table.add_row(*row, style="dim" if dim and dim[place] else None)
    return table


def _total(columns: Sequence[Column]) -> int:
    return sum(column.width + _GAP for column in columns) - _GAP


def _break(name: str) -> str:
    head, dash, tail = name.rpartition("-")
    return f"{head}-\n{tail}" if len(name) > _LONG_NAME and dash else name
