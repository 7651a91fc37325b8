"""The runs that are compared, and what they are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from zerokit.bench.comparison.cells import make_cells
from zerokit.bench.record.record import Run
from zerokit.errors import UsageError


class Compared(NamedTuple):
    """Runs with each record once; `label` is that of the baseline cell, None where it is the first run.

    `ignored` are the names of runs whose records are all in an earlier one.
    """

    runs: list[Run]
    label: str | None
    ignored: list[str]


def compared(names: Sequence[str], baseline: str | None, load: Callable[[str], Run]) -> Compared:
    """Load the runs of these names; `baseline` is another run, or one of them, or the label of a cell.

    Raises `UsageError` for a baseline that is none of these, and what `load` raises.
    """
    runs = [load(name) for name in dict.fromkeys(names)]
    labels = [cell.label for cell in make_cells(runs)]
    by_label = baseline not in names and baseline in labels
    if baseline is not None and not by_label:
        first = next((run for run in runs if run.name == baseline), None)
        try:
            first = first or load(baseline)
        except UsageError as error:
            raise UsageError(f"--baseline: {error}; or name a cell: {', '.join(map(repr, labels))}") from None
        runs = [first, *(run for run in runs if run is not first)]
    seen: set[str] = set()
    kept, ignored = [], []
    for run in runs:
        fresh = tuple(record for record in run.records if record.id not in seen)
        seen |= {record.id for record in fresh}
        if fresh:
            kept.append(Run(run.name, fresh))
        else:
            ignored.append(run.name)
    return Compared(kept, baseline if by_label else None, ignored)
