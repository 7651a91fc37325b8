"""What a record's types cannot say: counts below zero, lists that do not fit together. Figures are computed from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

from zerokit.bench.record.measured import MEMORY_KINDS

if TYPE_CHECKING:
    from zerokit.bench.record import Record

_ANYTHING = ("settings", "config")
"""Fields that are checked by themselves, or may hold what a model calls its sizes."""


def check_record(record: Record) -> None:
    """Raises `ValueError`, naming the field, for what is of the right type and cannot be."""
    _check_counts(record, "")
    if len({(len(rank.warmup_ms), len(rank.step_ms)) for rank in record.ranks}) > 1:
        raise ValueError("ranks: they measured different numbers of steps")
    if any(rank.window_ms is not None and not rank.step_ms for rank in record.ranks):
        raise ValueError("ranks: there is a window_ms and no step")
    if record.twin is not None:
        for name in ("own_ms", "pace_ms"):
            if len(getattr(record.twin, name)) not in (0, len(record.twin.step_ms)):
                raise ValueError(f"twin.{name}: has another number of steps than step_ms")
    for node, samples in enumerate(record.system):
        _check_series(f"system[{node}].series", samples.series, samples.seconds)
    if record.timeline is not None:
        if sorted(record.timeline.bytes) != sorted(MEMORY_KINDS):
            raise ValueError(f"timeline.bytes: expected {', '.join(MEMORY_KINDS)}")
        _check_series("timeline.bytes", record.timeline.bytes, record.timeline.seconds)


def _check_series(path: str, series: Mapping[str, Sequence[object]], seconds: Sequence[float]) -> None:
    for name, values in series.items():
        if len(values) != len(seconds):
            raise ValueError(f"{path}.{name}: has {len(values)} values at {len(seconds)} moments")


def _check_counts(value: Any, path: str) -> None:
    """What a bench counts is never less than none."""
    if type(value) is int and value < 0:
        raise ValueError(f"{path}: expected an integer of at least 0, found {value}")
    if is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in fields(value) if one.name not in _ANYTHING}
    if isinstance(value, Mapping):
        for name, item in value.items():
            _check_counts(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and value and not isinstance(value[0], float):
        for position, item in enumerate(value):
            _check_counts(item, f"{path}[{position}]")
