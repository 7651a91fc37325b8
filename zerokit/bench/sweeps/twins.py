"""The compute-only twin of a cell: the same model and batches in processes of its own, with nothing communicated.

What a step costs more than its twin's is what communication costs. Cells that compute the same share one twin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from zerokit.bench.record import Record, RecordError, Twin, read_record
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.statistics import Summary, slowest

ENGINE = "compute-only"


def twin_settings(settings: Settings) -> Settings | None:
    """The twin of this cell; None for one that has none: a single rank, a cell that communicates nothing itself, or an
    elastic one, whose world may change.

    The engines of stages 1 to 3 step a share of the optimizer on each rank, and so does their twin. What only changes
    the communication (the wire, the bucket size) and what is done between steps (checkpoints) is not the twin's.
    """
    if not settings.twin or settings.elastic or settings.world == 1 or settings.engine == ENGINE:
        return None
    return replace(
        settings,
        engine=ENGINE,
        stage=min(settings.stage, 1),
        wire="own",
        bucket_mb=None,
        twin=False,
        repeat=0,
        save=None,
        save_every=None,
        background=False,
        resume=False,
    )


class Twins:
    """The twins of some cells, each run once.

    Args:
        folder: their records are kept here, so that a sweep that is continued finds them.
        run: runs one and writes its record.
        warn: told why a twin did not come to numbers, once each.
    """

    def __init__(
        self, folder: Path, run: Callable[[Settings, Path], Record], warn: Callable[[str], None]
    ) -> None:
        self._folder = folder
        self._run = run
        self._warn = warn
        self._done: dict[str, Record] = {}

    def of(self, settings: Settings) -> Twin | None:
        """The twin of a cell, run now if it was not before; None without one, or if it failed."""
        asked = twin_settings(settings)
        if asked is None:
            return None
        if asked.key not in self._done:
            self._done[asked.key] = self._obtain(asked)
        return as_twin(self._done[asked.key])

    def _obtain(self, asked: Settings) -> Record:
        path = self._folder / f"{asked.key}.json"
        try:
            found = read_record(path)
            if found.status == "ok" and found.cell == asked.key:
                return found
        except RecordError:
            pass  # none yet, or none that can be read: it is run again
        record = self._run(asked, path)
        if record.status != "ok":
            reason = (record.reason or "").partition("\n")[0]
            told = f"{record.status}: {reason}"
            self._warn(f"without its compute-only twin, a cell's communication is not known: {told}")
        return record


def as_twin(record: Record) -> Twin | None:
    """What a cell's record keeps of its twin's; None for one without numbers."""
    if record.status != "ok" or not record.ranks:
        return None
    step_ms = slowest([rank.step_ms for rank in record.ranks])
    return Twin(record.settings.stage, step_ms, Summary.of(step_ms))
