"""Which cells a bench has: the product of its options, in the order in which they run, and what each is called."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zerokit.bench.catalogue.check import require_known, unsupported
from zerokit.bench.catalogue.engines import ENGINES
from zerokit.bench.catalogue.sizes import TextConfig
from zerokit.bench.catalogue.workloads import WORKLOADS
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.words import value_in_words

_DEFAULTS = Settings()
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


def product(
    options: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any], repeats: int = 1, *, devices: int = 0
) -> list[Settings]:
    """Every combination of `options`, `repeats` times.

    Args:
        options: values by dimension, of which a value counts once; one that is left out, or empty, has its default.
            Without a stage an engine takes its own; a model of fewer positions than the default has sequences of them.
        fixed: the other fields of `Settings`, equal in all cells.
        repeats: rounds through all cells. Every second one goes backwards, so that a steady drift of the machine
            weighs equally on the first and the last.
        devices: of this machine, which its nodes share equally. Where `nproc_per_node` is left out, a node has as
            many ranks as devices, and at least one.

    Raises `UsageError` for settings that do not fit together.
    """
    values = [tuple(dict.fromkeys(options.get(name) or (None,))) for name in DIMENSIONS]
    once = []
    for combination in itertools.product(*values):
        chosen = {
            name: value for name, value in zip(DIMENSIONS, combination, strict=True) if value is not None
        }
        engine = chosen.setdefault("engine", _DEFAULTS.engine)
        if "stage" not in chosen and engine in ENGINES:
            chosen["stage"] = ENGINES[engine].default_stage
        if "nproc_per_node" not in chosen:
            chosen["nproc_per_node"] = max(1, devices // chosen.get("nodes", 1))
        given = {**fixed, **chosen}
        if "seq_len" not in given and (text := _text_of(given.get("model", _DEFAULTS.model))) is not None:
            given["seq_len"] = min(_DEFAULTS.seq_len, text.positions)
        once.append(require_known(Settings(**given)))
    once = list(dict.fromkeys(once))
    rounds = []
    for number in range(repeats):
        cells = once if number % 2 == 0 else once[::-1]
        # What cannot run is told once.
        rounds += [replace(cell, repeat=number) for cell in cells if number == 0 or unsupported(cell) is None]
    return rounds


def _text_of(model: str) -> TextConfig | None:
    workload = WORKLOADS.get(model)
    return None if workload is None else workload.text


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
