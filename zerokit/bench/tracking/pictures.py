"""Plots for MLflow's pages. A plot that cannot be drawn is no reason to lose a run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from zerokit.bench.record import Record


def pictures(records: Sequence[Record]) -> Mapping[str, bytes]:
    """PNG files by name, of one bench or of several beside each other; none where no bench came to numbers."""
    from zerokit.bench.report.render import plots

    if not any(record.status == "ok" for record in records):
        return {}
    try:
        return plots(records)
    except Exception as error:
        logging.getLogger(__name__).warning("no plots: %s: %s", type(error).__name__, error)
        return {}
