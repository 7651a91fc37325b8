"""Text for people: sizes, and names that may come from a hostile file."""

from __future__ import annotations


def decimal_size(size_bytes: int) -> str:
    """In the largest fitting power of 1000: "2.2 GB"."""
    if size_bytes < 1000:
        return f"{size_bytes} bytes"
    size, units = size_bytes / 1000, iter(("kB", "MB", "GB", "TB", "PB"))
    unit = next(units)
    while size >= 1000 and unit != "PB":
        size, unit = size / 1000, next(units)
    return f"{size:.1f} {unit}"


def counted(number: int, noun: str) -> str:
    """The number with its noun: 1 rank, 2 ranks."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable(text: str) -> str:
    """Without control characters: a name could move the cursor or change the terminal's title."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
