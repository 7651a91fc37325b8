"""Sizes, counts and times as text for people."""

from __future__ import annotations

from collections.abc import Iterable

import click

from zerokit.text import printable

MIB = 2**20


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


def ms(value: float) -> str:
    """A time in milliseconds, or in seconds from ten seconds on."""
    return f"{value:,.1f} ms" if abs(value) < 10_000 else f"{value / 1000:,.2f} s"


def mib(size_bytes: float) -> str:
    """A size in MiB; in GiB from ten GiB on, and in KiB below a tenth of a MiB."""
    if 0 < size_bytes < MIB / 10:
        return f"{size_bytes / 1024:,.1f} KiB"
    if size_bytes >= 10 * 1024 * MIB:
        return f"{size_bytes / MIB / 1024:,.1f} GiB"
    return f"{size_bytes / MIB:,.1f} MiB"


def rate(value: float) -> str:
    """A number without decimals from a hundred on, otherwise with three digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def loss(value: float | None) -> str:
    """A loss with four digits; None, in a record, stands for a diverged one."""
    return "not finite" if value is None else f"{value:.4f}"


def note(lines: Iterable[str]) -> None:
    """Print lines on stderr that are not errors."""
    for line in lines:
        click.echo(printable(f"zerokit: {line}"), err=True)
