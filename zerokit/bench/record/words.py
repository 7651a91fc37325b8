"""How settings and engines are named in labels, tables and pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
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
    "mesh",
    "outer_stage",
    "wire",
    "bucket_mb",
)

ENGINE_TITLES: Mapping[str, str] = MappingProxyType(
    {
        "zerokit": "zerokit",
        "ddp": "DDP",
        "zero-redundancy-optimizer": "ZeroRedundancy",
        "fsdp2": "FSDP2",
        "deepspeed": "DeepSpeed",
        "parameter-server": "parameter server",
        "compute-only": "compute only",
    }
)

# Of a setting, or of a property of the machine: its title in a list, and a value within a sentence.
_WORDS: Mapping[str, tuple[str, str]] = {
    "model": ("model", "{}"),
    "precision": ("precision", "{}"),
    "device": ("device", "{}"),
    "engine": ("engine", "{}"),
    "batch_size": ("batch, samples a rank and micro-batch", "batch {}"),
    "seq_len": ("tokens a sequence", "{} positions"),
    "image_size": ("image size, pixels", "{} pixels"),
    "accumulate": ("micro-batches a step", "{} micro-batches"),
    "bucket_mb": ("bucket, MiB", "bucket {:g} MiB"),
    "mesh": ("mesh", "mesh {}"),
    "outer_stage": ("outer stage", "outer stage {}"),
    "wire": ("wire", "{} wire"),
    "nodes": ("nodes", "{} nodes"),
    "nproc_per_node": ("ranks a node", "{} ranks a node"),
    "lr": ("learning rate", "lr {:g}"),
    "clip": ("largest gradient norm", "clip {:g}"),
    "cores": ("processor cores", "{} cores"),
    "memory_bytes": ("memory", "{}"),
    "threads": ("threads a rank", "{} threads a rank"),
    "git_commit": ("git commit", "{}"),
}


def title_of(name: str) -> str:
    """The name of a setting or a property of the machine: "tokens a sequence", "package transformers"."""
    kind, dot, rest = name.partition(".")
    if dot:
        return rest if kind == "variables" else f"{kind.removesuffix('s')} {rest}"
    return _WORDS[name][0] if name in _WORDS else name.replace("_", " ")


def value_in_words(name: str, value: Any) -> str:
    """A value as it stands in a label: "batch 4", "1 node"; "default precision" for None."""
    if value is None:
        return f"default {name}"
    text = _WORDS[name][1].format(value) if name in _WORDS else f"{title_of(name)} {value}"
    return re.sub(r"^1 (\S+?)(?:(?<=ch)e)?s\b", r"1 \1", text)


def varying(cells: Iterable[Settings]) -> tuple[str, ...]:
    """The dimensions in which these cells differ."""
    rows = list(cells)
    return tuple(name for name in DIMENSIONS if len({getattr(row, name) for row in rows}) > 1)


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
