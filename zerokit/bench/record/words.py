"""How the values of settings are said in labels and names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
