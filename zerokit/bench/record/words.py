"""Names of settings in labels, tables and pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from zerokit.bench.record.settings import DIMENSIONS, OPTIONS, Settings

# Properties of the machine; settings bring their own words.
_MACHINE: Mapping[str, str] = {
    "cores": "processor cores",
    "memory_bytes": "memory",
    "threads": "threads a rank",
    "git_commit": "git commit",
}


def title_of(name: str) -> str:
    """The name of a setting or a property of the machine: "tokens a sequence", "package transformers"."""
    kind, dot, rest = name.partition(".")
    if dot:
        return rest if kind == "variables" else f"{kind.removesuffix('s')} {rest}"
    title = OPTIONS[name].title if name in OPTIONS else _MACHINE.get(name)
    return title or name.replace("_", " ")


def value_in_words(name: str, value: Any) -> str:
    """A setting's value as shown in a label: "batch 4", "1 node"; "default precision" for None."""
    if value is None:
        return f"default {name}"
    words = OPTIONS[name].words if name in OPTIONS else None
    text = words.format(value) if words else f"{title_of(name)} {value}"
    return re.sub(r"^1 (\S+?)(?:(?<=ch)e)?s\b", r"1 \1", text)


def unusual(settings: Settings, without: Iterable[str] = ()) -> list[str]:
    """The sweepable options that differ from their defaults, as text, `without` these."""
    usual, aside = Settings(), {"engine", "stage", *without}
    values = {name: getattr(settings, name) for name in DIMENSIONS if name not in aside}
    return [
        value_in_words(name, value)
        for name, value in values.items()
        if value is not None and value != getattr(usual, name)
    ]


def varying(cells: Iterable[Settings]) -> tuple[str, ...]:
    """The settings in which these cells differ."""
    rows = list(cells)
    return tuple(name for name in DIMENSIONS if len({getattr(row, name) for row in rows}) > 1)


def label(cell: Settings, dimensions: Iterable[str] = ()) -> str:
    """Engine and stage, then the other settings that distinguish this cell: "fsdp2 stage 3, batch 4, round 2"."""
    parts = [f"{cell.engine} stage {cell.stage}"]
    for name in dimensions:
        if name not in ("engine", "stage"):
            parts.append(value_in_words(name, getattr(cell, name)))
    if cell.repeat:
        parts.append(f"round {cell.repeat + 1}")
    return ", ".join(parts)


def slug(text: str) -> str:
    """A label as part of a file's name: letters, digits, dots and dashes."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:80].lower()


def count(number: float) -> str:
    """Rounded, with the usual letter: 34.9 K, 124.4 M, 8.0 B."""
    for letter, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:g}"
