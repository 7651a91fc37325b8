"""Sizes and counts as text for people."""

from __future__ import annotations

from collections.abc import Iterable

import click

from zerokit.text import printable


def decimal_size(size_bytes: int) -> str:
    """A size in the largest fitting power of 1000: "2.2 GB"."""
    if size_bytes < 1000:
        return f"{size_bytes} bytes"
    size, units = size_bytes / 1000, iter(("kB", "MB", "GB", "TB", "PB"))
    unit = next(units)
    while size >= 1000 and unit != "PB":
        size, unit = size / 1000, next(units)
    return f"{size:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """A number with its noun: 1 rank, 2 ranks."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def note(lines: Iterable[str]) -> None:
    """Print lines on stderr that are not errors."""
    for line in lines:
        click.echo(printable(f"zerokit: {line}"), err=True)
