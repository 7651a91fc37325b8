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
    """The same without rich: words to the left, figures to the right."""
    lines = [columns, *rows]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    figures = [
        all(cell[:1].isdigit() or not cell for cell in cells) for cells in zip(*rows, strict=True)
    ] or [False] * len(columns)
    text = []
    for line in lines:
        cells = zip(line, widths, figures, strict=True)
        text.append(
            "  ".join(cell.rjust(w) if figure else cell.ljust(w) for cell, w, figure in cells).rstrip()
        )
    return "\n".join([title, "", text[0], "-" * max(map(len, text)), *text[1:]])
