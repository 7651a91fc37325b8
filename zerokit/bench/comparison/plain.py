"""A comparison as plain data for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from zerokit.bench.comparison.cells import Cell, conditions, drift_notes
from zerokit.bench.comparison.differences import Regression, difference
from zerokit.bench.record.metrics import METRICS
from zerokit.bench.record.schema import to_plain


def comparison_json(
    cells: Sequence[Cell],
    partners: Mapping[int, Cell | None],
    broken: Sequence[Regression],
    differing: Sequence[str] = (),
) -> str:
    """Every figure of every cell, its error, and its difference from the baseline; shares, not percent."""

    def rules(known: bool) -> list[dict[str, object]]:
        return [
            {"cell": one.cell, "metric": one.rule.metric, "percent": one.rule.percent, "message": one.message}
            for one in broken
            if one.known is known
        ]

    content = {
        "cells": [_plain(cell, partners[id(cell)]) for cell in cells],
        "differing": dict(conditions(cells)[0]),
        "drift": drift_notes(cells),
        "regressions": rules(True),
        "not_known": rules(False),
        "losses_differ": list(differing),
    }
    return json.dumps(to_plain(content), indent=2, allow_nan=False)


def _plain(cell: Cell, partner: Cell | None) -> dict[str, object]:
    metrics = {}
    for name, metric in METRICS.items():
        if (measured := cell.measure(name)) is None:
            continue
        metrics[name] = {"value": measured.value, "error": measured.error, "unit": metric.unit}
        if (change := difference(cell, partner, name)) is not None:
            metrics[name] |= {"relative": change.relative, "noise": change.noise, "verdict": change.verdict}
    return {
        "label": cell.label,
        "run": cell.run,
        "status": cell.status,
        "reason": cell.first.reason,
        "records": [record.id for record in cell.records],
        "baseline": None if partner is None else partner.label,
        "settings": cell.settings,
        "metrics": metrics,
    }
