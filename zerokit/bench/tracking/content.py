"""The content of an MLflow run: parameters, metrics, tags and files, all computed from the record alone.

The same for a bench that is tracked while it runs and for one that is pushed a week later.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Literal, NamedTuple

from zerokit.bench.catalogue.engines import label_of
from zerokit.bench.record.metrics import metrics_of
from zerokit.bench.record.record import Record, Run
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.words import unusual
from zerokit.bench.run.sweep import Sweep

Status = Literal["FINISHED", "FAILED", "KILLED"]
# Metrics of a run. MLflow's pages draw every key, and more of them hide the ones that matter.
MOST_KEYS = 60
# MLflow cuts longer values silently.
PARAM_LENGTH = 6000
TAG_LENGTH = 8000
# MLflow refuses other characters in the name of a metric; a slash would begin another section of its charts.
_NOT_IN_NAMES = re.compile(r"[^\w.\- :]+")
MAIN = "step/p50_ms"
"""The metric in whose order a sweep's cells are listed."""


class Tag:
    """The names of tags; runs are found by the first two."""

    RECORD = "zerokit.record_id"
    SWEEP = "zerokit.sweep_id"
    CELL = "zerokit.cell"
    STATUS = "zerokit.status"
    REASON = "zerokit.reason"
    KIND = "zerokit.kind"
    """ "sweep" on the parent of a sweep's cells."""
    COMPLETE = "zerokit.complete"
    """Set last of all, to the digest of what was written: a run that has it is whole."""
    PARENT = "mlflow.parentRunId"


NOTE = "mlflow.note.content"
"""The tag that MLflow's page of a run shows as its description, in Markdown."""

# What MLflow shows as a run's source.
SOURCE_TAGS = {"mlflow.source.name": "zerokit bench", "mlflow.source.type": "LOCAL"}


class Point(NamedTuple):
    """One value of a metric; `moment_ms` is milliseconds since the epoch."""

    name: str
    value: float
    moment_ms: int
    step: int


_Series = tuple[str, Sequence[float | None], Sequence[int]]
"""A metric's name, its values, and their moments."""


def run_name(settings: Settings, varying: Sequence[str] = ()) -> str:
    """The run's name. MLflow's tables cut names after 16 letters, so what differs within its sweep comes first."""
    usual = ("model", "batch_size", "precision")
    said = label_of(settings, dict.fromkeys((*varying, *usual)), rounds=True)
    said += unusual(settings, without=(*usual, *varying, "nodes", "nproc_per_node"))
    return ", ".join([*said, f"world {settings.world}"])


def run_params(record: Record) -> dict[str, str]:
    """The resolved settings and the trained model, without the round, so that repetitions compare as equal.

    MLflow's parameters cannot be changed: an elastic bench that may go on at another world size has none yet.
    """
    if record.settings.elastic and record.status != "ok":
        return {}
    found = {
        name: "" if value is None else str(value)[:PARAM_LENGTH]
        for name, value in asdict(record.settings).items()
        # What a cell left open stands as empty, for every engine; one that is run again may yet choose it.
        if name != "repeat" and (value is not None or record.status == "ok")
    }
    found["world"] = str(record.settings.world)
    if record.model is not None:
        found["parameters"] = str(record.model.parameters)
    if record.environment is not None:
        found["backend"] = record.environment.backend
    return found


def run_tags(record: Record) -> dict[str, str]:
    """The tags by which the run is found, and its environment."""
    done = record.checkpoints
    tags: dict[str, str | None] = {
        Tag.RECORD: record.id,
        Tag.SWEEP: record.sweep,
        Tag.CELL: record.cell,
        Tag.STATUS: record.status,
        # Empty, too: a cell that is run again keeps its run, and with it the tags of its earlier end.
        Tag.REASON: (record.reason or "")[:TAG_LENGTH],
        "zerokit.restarts": str(record.restarts) if record.parts else None,
        "zerokit.resumed": None
        if done.resumed_from is None
        else f"step {done.resumed_from} from {done.resumed_where}",
        "zerokit.record": record.format,
        **SOURCE_TAGS,
        "device": record.ranks[0].device if record.ranks else None,
        "data.digest": record.data.digest if record.data is not None else None,
    }
    if (environment := record.environment) is not None:
        commit = environment.git_commit
        tags |= {
            "zerokit.version": environment.zerokit,
            "zerokit.environment": environment.digest,
            "torch.version": environment.torch,
            "processor": environment.processor,
            "zerokit.git_commit": commit,
            "mlflow.source.git.commit": commit and commit.removesuffix("-dirty"),
        }
    return {name: value for name, value in tags.items() if value is not None}


def run_points(record: Record) -> list[Point]:
    """Every metric: single values, curves over the steps, and system metrics over time."""
    moment = moment_ms(record)
    series: list[_Series] = [(name, [value], [moment]) for name, value in metrics_of(record).items()]
    series += [(name, values, [moment] * len(values)) for name, values in curves(record).items()]
    series += _system(record, moment, MOST_KEYS - len({name for name, values, _ in series if values}))
    return [
        Point(name, value, at, step)
        for name, values, moments in series
        for step, (value, at) in enumerate(zip(values, moments, strict=True))
        if value is not None and math.isfinite(value)
    ]


def curves(record: Record) -> dict[str, Sequence[float | None]]:
    """One value per step; step 0 is the first warm-up step, null if a step was not timed."""
    found: dict[str, Sequence[float | None]] = {"loss": record.loss, "gradient_norm": record.gradient_norm}
    if record.ranks:
        by_step = zip(*(rank.warmup_ms + rank.step_ms for rank in record.ranks), strict=True)
        found["step_ms"] = [None] * record.untimed_steps + [max(times) for times in by_step]
    return found


def _system(record: Record, moment: int, room: int) -> list[_Series]:
    """System metrics by the names that MLflow's page for them knows; whole nodes, as many as `room` keys allow."""
    found: list[_Series] = []
    for samples in record.system:
        node = f"node{samples.node}/" if len(record.system) > 1 else ""
        known = {name: values for name, values in samples.series.items() if {*values} - {None}}
        if len(found) + len(known) > room:
            break  # the record has them all
        started = moment - round(max(samples.seconds, default=0.0) * 1000.0)
        moments = [started + round(second * 1000.0) for second in samples.seconds]
        found += [(f"system/{node}{name}", values, moments) for name, values in known.items()]
    return found


def moment_ms(record: Record | Sweep) -> int:
    """When it was created, as `moment_of`."""
    return moment_of(record.created)


def moment_of(text: str) -> int:
    """A time in milliseconds since the epoch; 0 for text that is no ISO 8601 time."""
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        return 0


def sweep_note(records: Sequence[Record], baseline: str | None = None) -> str:
    """The sweep's table, for the page of its run: the runs of its cells have everything else."""
    from zerokit.bench.comparison.cells import make_cells
    from zerokit.bench.comparison.tables import markdown, within

    return within(markdown(make_cells([Run("", tuple(records))], baseline)), TAG_LENGTH)


def sweep_points(records: Sequence[Record]) -> list[Point]:
    """The sweep's table as metrics of its run, one for each figure of each cell: `step/p50_ms/zerokit 2`.

    Whole columns, as many as `MOST_KEYS` allows; a cost within its noise is no figure.
    """
    from zerokit.bench.comparison.cells import make_cells
    from zerokit.bench.comparison.tables import usual_metrics, within_noise

    cells = make_cells([Run("", tuple(records))])
    moment, points = max(map(moment_ms, records), default=0), list[Point]()
    for name in usual_metrics(cells, ()):
        measured = {cell.label: cell.measure(name) for cell in cells}
        column = [
            Point(f"{name}/{_NOT_IN_NAMES.sub('-', label)}", one.value, moment, 0)
            for label, one in measured.items()
            if one is not None and math.isfinite(one.value) and not within_noise(name, one)
        ]
        if len(points) + len(column) <= MOST_KEYS:
            points += column
    return points


def sweep_status(sweep: Sweep, records: Sequence[Record]) -> Status:
    """The status of the sweep's MLflow run: KILLED while cells are missing, FAILED if one failed."""
    statuses = [record.status for record in records]
    if len(records) < len(sweep.cells) or "killed" in statuses:
        return "KILLED"
    return "FAILED" if "failed" in statuses else "FINISHED"
