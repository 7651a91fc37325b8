"""Checks that a record's types cannot express: lists of unequal lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from zerokit.formulas import MEMORY_KINDS

if TYPE_CHECKING:
    from zerokit.bench.record import Record


def check_record(record: Record) -> None:
    """Raise `ValueError`, naming the field, for values of the right type that contradict each other."""
    if len({(len(rank.warmup_ms), len(rank.step_ms)) for rank in record.ranks}) > 1:
        raise ValueError("ranks: ranks have different numbers of steps")
    if any(rank.window_ms is not None and not rank.step_ms for rank in record.ranks):
        raise ValueError("ranks: window_ms is set, but there are no steps")
    if record.twin is not None:
        for name in ("own_ms", "pace_ms"):
            if len(getattr(record.twin, name)) not in (0, len(record.twin.step_ms)):
                raise ValueError(f"twin.{name}: the number of steps differs from step_ms")
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
