"""The cells of a sweep: the product of its options, in the order in which they run, with their names."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from zerokit.bench.catalogue.check import require_known, unsupported
from zerokit.bench.catalogue.engines import ENGINES
from zerokit.bench.catalogue.sizes import TextConfig
from zerokit.bench.catalogue.workloads import WORKLOADS
from zerokit.bench.record.schema import SchemaError, from_plain
from zerokit.bench.record.settings import DIMENSIONS, Settings
from zerokit.errors import UsageError

_DEFAULTS = Settings()


def product(
    options: Mapping[str, Sequence[Any]],
    fixed: Mapping[str, Any],
    repeats: int = 1,
    *,
    devices: int = 0,
    shared: bool = True,
) -> list[Settings]:
    """Every combination of `options`, `repeats` times.

    Args:
        options: values by dimension, of which a value counts once; one that is left out, or empty, has its default.
            Without a stage an engine takes its own; a model of fewer positions than the default has sequences of them.
        fixed: the other fields of `Settings`, equal in all cells.
        repeats: rounds through all cells. Every second one goes backwards, so that a steady drift of the machine
            weighs equally on the first and the last.
        devices: of this machine. Where `nproc_per_node` is left out, a node has as many ranks as devices, and at least
            one.
        shared: whether nodes have equal shares of these devices; else each has as many.

    Raises `UsageError` for settings that do not fit together, or that no record could hold.
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
            chosen["nproc_per_node"] = max(1, devices // (chosen.get("nodes", 1) if shared else 1))
        given = {**fixed, **chosen}
        if "seq_len" not in given and (text := _text_of(given.get("model", _DEFAULTS.model))) is not None:
            given["seq_len"] = min(_DEFAULTS.seq_len, text.positions)
        once.append(_checked(Settings(**given)))
    once = list(dict.fromkeys(once))
    rounds = []
    for number in range(repeats):
        cells = once if number % 2 == 0 else once[::-1]
        # What cannot run has one record.
        rounds += [replace(cell, repeat=number) for cell in cells if number == 0 or unsupported(cell) is None]
    return rounds


def _checked(settings: Settings) -> Settings:
    try:
        from_plain(Settings, asdict(settings))
    except SchemaError as error:
        raise UsageError(str(error)) from error
    return require_known(settings)


def _text_of(model: str) -> TextConfig | None:
    workload = WORKLOADS.get(model)
    return None if workload is None else workload.text
