"""How settings are said in labels and names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from zerokit.bench.record.settings import Settings

# What may take several values, the slowest to change first: the engines and stages of one workload run after each
# other, so that a machine that changes its pace in the course of an hour spoils no comparison between them.
DIMENSIONS = (
    "model",
    "precision",
    "seq_len",
    "nodes",
    "nproc_per_node",
    "accumulate",
    "batch_size",
    "engine",
    "stage",
    "wire",
    "bucket_mb",
)

# How a label says a value of a dimension.
_WORDS: Mapping[str, str] = {
    "model": "{}",
    "precision": "{}",
    "seq_len": "seq {}",
    "nodes": "nodes {}",
    "nproc_per_node": "ranks {} a node",
    "accumulate": "accumulate {}",
    "batch_size": "batch {}",
    "engine": "{}",
    "stage": "stage {}",
    "wire": "{} wire",
    "bucket_mb": "bucket {:g} MiB",
}


def value_in_words(dimension: str, value: Any) -> str:
    """A value as it stands in a label: "batch 4"; one that was left open says so."""
    return f"default {dimension}" if value is None else _WORDS[dimension].format(value)


def varying(cells: Iterable[Settings]) -> tuple[str, ...]:
    """The dimensions in which these cells differ."""
    found = list(cells)
    return tuple(name for name in DIMENSIONS if len({getattr(cell, name) for cell in found}) > 1)


def label(cell: Settings, dimensions: Iterable[str] = ()) -> str:
    """Engine and stage, then what else tells this cell from its neighbours: "fsdp2 stage 3, batch 4, round 2"."""
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
