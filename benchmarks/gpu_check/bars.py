"""What the figures of a check have to reach: each bar met, not met or not measured.

A ratio to the bf16 floor is to the floor of the same part, whose engines took turns on the same device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MODEL = "gpt3-1.3b"
"""The model of the bars that the device's speed decides."""
FLOOR, FSDP2 = "bf16 floor", "FSDP2 3"
SHARDED = ("zerokit 1", "zerokit 2", "zerokit 3")
MOST_OF_FLOOR = 1.02
MOST_OF_FSDP2 = 1.0
MOST_OF_FSDP2_HOST = 0.5
MOST_OFF_PLAN = 0.01

Parts = Mapping[str, Mapping[str, Any]]
"""The data of parts by their names."""


@dataclass(frozen=True)
class Bar:
    """A figure and the most that it may be; None where it was not measured."""

    what: str
    figure: float | None
    most: float

    @property
    def verdict(self) -> str:
        """In words."""
        if self.figure is None:
            return "not measured"
        return "met" if self.figure <= self.most else "not met"


def rows_of(parts: Parts, part: str, model: str | None = None) -> Sequence[Mapping[str, Any]]:
    """The rows of a part, on one model or on all."""
    rows = parts.get(part, {}).get("rows", ())
    return [row for row in rows if model is None or row["model"] == model]


def to_floor(row: Mapping[str, Any], beside: Sequence[Mapping[str, Any]]) -> float | None:
    """A row's step over that of the floor among the rows of its part, on the same model."""
    return _over(row, FLOOR, beside, "median_ms")


def _over(
    row: Mapping[str, Any], base: str, beside: Sequence[Mapping[str, Any]], figure: str
) -> float | None:
    bases = [one[figure] for one in beside if one["row"] == base and one["model"] == row["model"]]
    return row[figure] / bases[0] if bases else None


def bars(parts: Parts) -> list[Bar]:
    """All bars, in the order of the page."""
    return [*_speed(parts), *_eighth(parts), *_host(parts), *_waits(parts), *_memory(parts)]


def _ratios(parts: Parts) -> dict[str, float]:
    """Each engine's step over the floor of its part, on `MODEL`; the first part that has it counts."""
    found: dict[str, float] = {}
    for part in ("cells-a", "cells-b"):
        beside = rows_of(parts, part, MODEL)
        for row in beside:
            if (ratio := to_floor(row, beside)) is not None:
                found.setdefault(row["row"], ratio)
    return found


def _speed(parts: Parts) -> Iterator[Bar]:
    ratios = _ratios(parts)
    for name in SHARDED:
        yield Bar(f"{name}: step over the bf16 floor's", ratios.get(name), MOST_OF_FLOOR)
    fsdp2 = ratios.get(FSDP2)
    for name in SHARDED:
        own = ratios.get(name)
        figure = None if own is None or fsdp2 is None else own / fsdp2
        yield Bar(f"{name}: step over {FSDP2}'s", figure, MOST_OF_FSDP2)


def _against(
    parts: Parts, part: str, names: Sequence[str], figure: str
) -> Iterator[tuple[str, float | None]]:
    """Each engine's figure over FSDP2's of the same part."""
    beside = rows_of(parts, part)
    by_name = {row["row"]: row for row in beside}
    for name in names:
        yield name, _over(by_name[name], FSDP2, beside, figure) if name in by_name else None


def _eighth(parts: Parts) -> Iterator[Bar]:
    for name, ratio in _against(parts, "eighth", SHARDED[1:], "median_ms"):
        yield Bar(f"{name}, one rank of eight: step over {FSDP2}'s", ratio, MOST_OF_FSDP2)


def _host(parts: Parts) -> Iterator[Bar]:
    for name, ratio in _against(parts, "host", ("zerokit 0", *SHARDED), "host_process_ms"):
        yield Bar(f"{name}: the host's time over {FSDP2}'s", ratio, MOST_OF_FSDP2_HOST)


def _own(parts: Parts) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """zerokit's rows with states on the device, each with its part."""
    for part in ("cells-a", "cells-b", "eighth"):
        for row in rows_of(parts, part):
            if row["row"] in ("zerokit 0", *SHARDED):
                yield part, row


def _waits(parts: Parts) -> Iterator[Bar]:
    """The host's waits in a step: what torch warns of, or what the trace shows, whichever is more."""
    most: float | None = None
    for _, row in _own(parts):
        known = [len(row["waits"])] if row.get("waits") is not None else []
        known += [row["trace"]["syncs"]] if "syncs" in row.get("trace", {}) else []
        if known:
            most = max(most or 0, *known)
    yield Bar("zerokit: the most waits of the host for the device in a step", most, 0)


def _memory(parts: Parts) -> Iterator[Bar]:
    found: dict[str, float | None] = {}
    for part, row in _own(parts):
        peak, plan = row.get("peak_allocated_bytes"), row.get("planned_peak_bytes")
        figure = None if not peak or not plan else abs(peak / plan - 1)
        found[f"{row['row']}, {row['model']}, {part}: peak beside the plan's"] = figure
    if not found:
        found["zerokit: peak beside the plan's"] = None
    for what, figure in found.items():
        yield Bar(what, figure, MOST_OFF_PLAN)
