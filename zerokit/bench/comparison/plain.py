"""A comparison as plain data, for programs."""

from __future__ import annotations

from collections.abc import Sequence

from zerokit.bench.comparison.cells import Cell, conditions, warnings_of
from zerokit.bench.comparison.differences import Regression, difference
from zerokit.bench.record.metrics import METRICS
from zerokit.bench.record.schema import to_plain


def plain(cells: Sequence[Cell], broken: Sequence[Regression], differing: Sequence[str] = ()) -> object:
    """Every figure of every cell, its error, and its difference from the baseline; shares, not percent."""

    def rules(known: bool) -> list[dict[str, object]]:
        return [
            {"cell": one.cell, "metric": one.rule.metric, "percent": one.rule.percent, "message": one.message}
            for one in broken
            if one.known is known
        ]

    return to_plain(
        {
            "cells": [_cell(cell) for cell in cells],
            "differing": dict(conditions(cells)[0]),
            "warnings": warnings_of(cells),
            "regressions": rules(True),
            "not_known": rules(False),
            "losses_differ": list(differing),
        }
    )


def _cell(cell: Cell) -> dict[str, object]:
    metrics = {}
    for name, metric in METRICS.items():
        if (measured := cell.measure(name)) is None:
            continue
        metrics[name] = {"value": measured.value, "error": measured.error, "unit": metric.unit}
        if (change := difference(cell, cell.baseline, name)) is not None:
            metrics[name] |= {"relative": change.relative, "noise": change.noise, "verdict": change.verdict}
    return {
        "label": cell.label,
        "run": cell.run,
        "status": cell.status,
        "reason": cell.first.reason,
        "records": [record.id for record in cell.records],
        "baseline": None if cell.baseline is None else cell.baseline.label,
        "settings": cell.settings,
        "metrics": metrics,
    }
