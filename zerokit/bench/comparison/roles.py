"""Choices shared by tables and pictures: each cell's colour, and the metric used for memory."""

from __future__ import annotations

from collections.abc import Sequence

from zerokit.bench.comparison.cells import Cell
from zerokit.bench.record.words import ENGINE_TITLES

_RUNS = ("first", "second", "third", "fourth")


def roles_of(cells: Sequence[Cell]) -> dict[int, str]:
    """Each cell's colour by `id(cell)`: its engine's, or its run's if all engines are equal."""
    runs = list(dict.fromkeys(cell.run for cell in cells))
    engines = {cell.first.settings.engine for cell in cells}
    if len(engines) == 1 and len(runs) > 1:
        return {id(cell): _RUNS[runs.index(cell.run) % len(_RUNS)] for cell in cells}
    return {
        id(cell): engine if (engine := cell.first.settings.engine) in ENGINE_TITLES else "compute-only"
        for cell in cells
    }


def memory_metric(cells: Sequence[Cell]) -> tuple[str, str]:
    """The metric that limits the model's size here, and its display name."""
    if any(cell.value("memory/peak_allocated_mib") is not None for cell in cells):
        return "memory/peak_allocated_mib", "peak CUDA memory"
    return "memory/peak_host_mib", "peak host memory"
