"""Names of settings in labels, tables and pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
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
    """A setting's value as shown in a label: "batch 4", "1 node"."""
    words = OPTIONS[name].words if name in OPTIONS else None
    if isinstance(value, bool):
        return (words or title_of(name)) if value else f"no {title_of(name)}"
    text = words.format(value) if words else f"{title_of(name)} {value}"
    return re.sub(r"^1 (\S+?)(?:(?<=ch)e)?s\b", r"1 \1", text)


# How long was measured, what for, and how often: not what was measured.
_ASIDE = {"repeat", *(name for name, how in OPTIONS.items() if how.same_cell)}
_OF_UNEQUAL = ("shares", "cores_per_rank", "memory_per_rank")
_DESCRIBING = [one.name for one in fields(Settings) if one.name not in _ASIDE]


def identity(settings: Settings) -> dict[str, Any]:
    """The settings that describe a cell, by name, without duration and repetition."""
    return {name: getattr(settings, name) for name in _DESCRIBING}


def varying(cells: Iterable[Settings]) -> list[str]:
    """The settings in which these cells differ; None does not count, except of what only unequal ranks have."""
    rows = list(cells)
    return [
        name
        for name in _DESCRIBING
        if len({getattr(row, name) for row in rows} - (set() if name in _OF_UNEQUAL else {None})) > 1
    ]


def unusual(settings: Settings, without: Iterable[str] = ()) -> list[str]:
    """The options that differ from their defaults, as text, `without` these: what is swept, or has words of its own."""
    usual, aside = Settings(), {"engine", "stage", *without}
    worded = (name for name, how in OPTIONS.items() if how.words and name not in DIMENSIONS)
    values = {name: getattr(settings, name) for name in (*DIMENSIONS, *worded) if name not in aside}
    return [
        value_in_words(name, value)
        for name, value in values.items()
        if value is not None and value != getattr(usual, name)
    ]


def slug(text: str) -> str:
    """A label as part of a file's name: letters, digits, dots and dashes."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:80].lower()


def count(number: float) -> str:
    """Rounded, with the usual letter: 34.9 K, 124.4 M, 8.0 B."""
    for letter, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:g}"
