"""Plots for MLflow, and the page of a sweep. A picture that cannot be drawn does not fail a run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zerokit.bench.record import Record


def pictures(records: Sequence[Record]) -> Mapping[str, bytes]:
    """PNG files by name, of one bench or several; empty if no bench succeeded."""
    if not any(record.status == "ok" for record in records):
        return {}
    try:
        from zerokit.bench.report.render import plots

        return plots(records)
    except Exception as error:
        logging.getLogger(__name__).warning("no plots: %s: %s", type(error).__name__, error)
        return {}


def write_report(records: Sequence[Record], path: Path, warn: Callable[[str], None]) -> bool:
    """Write the page of a sweep; False, with a warning, if it cannot be made."""
    from zerokit.bench.record.runs import Run

    try:
        from zerokit.bench.report.render import write_comparison  # a bare GPU machine has no altair

        write_comparison([Run("", tuple(records))], path)
    except Exception as error:  # a page is no reason to end a sweep whose records are whole
        warn(f"the report was not written: {type(error).__name__}: {error}")
        return False
    return True
