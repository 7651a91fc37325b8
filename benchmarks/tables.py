"""A table on standard output: rich where it is installed, plain columns elsewhere (a bare GPU machine)."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print `rows` under `columns`; the first column is a name, the others are figures."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain_table(title, columns, rows))
        return
    console = Console()
    if not console.is_terminal:  # rich would wrap cells at 80 columns in a log file
        print(plain_table(title, columns, rows))
        return
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same without rich."""
    lines = [columns, *rows]
    widths = [max(len(line[number]) for line in lines) for number in range(len(columns))]
    text = ["  ".join(_aligned(line, widths)).rstrip() for line in lines]
    return "\n".join([title, "", text[0], "-" * max(map(len, text)), *text[1:]])


def _aligned(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [
        cell.rjust(width) if number else cell.ljust(width)
        for number, (cell, width) in enumerate(zip(line, widths, strict=True))
    ]
