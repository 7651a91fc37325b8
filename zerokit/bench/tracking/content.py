"""The content of an MLflow run: parameters, metrics, tags and files, all computed from the record alone.

The same for a bench that is tracked while it runs and for one that is pushed a week later.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Literal

from zerokit.bench.catalogue.engines import ENGINES
from zerokit.bench.record.metrics import METRICS, UNITS, metrics_of
from zerokit.bench.record.record import Record
from zerokit.bench.record.schema import to_plain
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.words import unusual, value_in_words
from zerokit.bench.run.sweep import FILE, Sweep, SweepFolder, sweep_json

Status = Literal["FINISHED", "FAILED", "KILLED"]
# Metrics of a run. MLflow's pages draw every key, and more of them hide the ones that matter.
MOST_KEYS = 60
# MLflow cuts longer values silently.
_PARAM_LENGTH = 6000
TAG_LENGTH = 8000


class Tag:
    """The names of tags; runs are found by the first four."""

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
    """The description on a run's page."""


# What MLflow shows as a run's source.
SOURCE_TAGS = {"mlflow.source.name": "zerokit bench", "mlflow.source.type": "LOCAL"}


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a metric; `moment_ms` is milliseconds since the epoch."""

    name: str
    value: float
    moment_ms: int
    step: int


_Series = tuple[str, Sequence[float | None], Sequence[int]]
"""A metric's name, its values, and their moments."""


# The number first, so that it is still there where a table cuts the name.
_SHORT: Mapping[str, str] = {"batch_size": "{} a batch", "bucket_mb": "{:g} MiB a bucket"}


def run_name(settings: Settings, varying: Sequence[str] = ()) -> str:
    """The run's name. MLflow's tables cut names after 16 letters, so the differing settings come first.

    Args:
        settings: of the bench.
        varying: the settings that differ within its sweep.
    """
    usual = ("model", "batch_size", "precision")
    values = {name: getattr(settings, name) for name in usual if name not in varying}
    said = [value_in_words(name, value) for name, value in values.items() if value is not None]
    said += unusual(settings, without=(*usual, *varying, "nodes", "nproc_per_node"))
    return ", ".join([cell_name(settings, varying), *said, f"world {settings.world}"])


def cell_name(settings: Settings, varying: Sequence[str] = ()) -> str:
    """Engine and stage, the round if it is not the first ("#2"), and the other differences within the sweep."""
    engine = ENGINES.get(settings.engine)
    only = engine is not None and engine.stages == (settings.stage,)
    first = settings.engine if only else f"{settings.engine} {settings.stage}"
    parts = [f"{first} #{settings.repeat + 1}" if settings.repeat else first]
    for name in varying:
        value = getattr(settings, name, None)
        if value is not None and name not in ("engine", "stage"):
            parts.append(_SHORT[name].format(value) if name in _SHORT else value_in_words(name, value))
    return ", ".join(parts)


def note(record: Record) -> str:
    """The description of a run in Markdown: its results, which MLflow's page lists below system metrics."""
    if record.status != "ok":
        return f"**{record.status}**: {record.reason or ''}"[:TAG_LENGTH]
    figures = metrics_of(record)
    shown = (name for name in columns([record]) if name in figures)
    return _table(
        ["", ""], ([METRICS[name].title, f"{figures[name]:,.4g} {METRICS[name].unit}"] for name in shown)
    )


def sweep_note(title: str, records: Sequence[Record], varying: Sequence[str] = ()) -> str:
    """The description of a sweep's run in Markdown: one row per cell and round."""
    names = columns(records)
    rows = []
    for record in records:
        figures = metrics_of(record) if record.status == "ok" else {}
        first, *cells = (f"{figures[name]:,.4g}" if name in figures else "" for name in names)
        rows.append([cell_name(record.settings, varying), first if figures else record.status, *cells])
    heads = [f"{METRICS[name].title}, {METRICS[name].unit}".removesuffix(", ") for name in names]
    return f"{title}\n\n{_table(['cell (#round)', *heads], rows)}"[:TAG_LENGTH]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [heads, ["---", *["---:"] * (len(heads) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def columns(records: Sequence[Record]) -> list[str]:
    """The main metrics, most important first."""
    units = {record.model.unit for record in records if record.model is not None}
    return [
        "step/p50_ms",
        *(f"throughput/{unit}_per_s" for unit in UNITS if unit in units),
        "memory/state_mib",
        "memory/peak_host_mib",
        *(["memory/peak_allocated_mib"] if any(r.settings.device == "cuda" for r in records) else []),
        "comm/cost_ms",
        "mfu",
        "loss_last",
    ]


def run_params(record: Record) -> dict[str, str]:
    """The resolved settings and the trained model, without the round, so that repetitions compare as equal.

    MLflow's parameters cannot be changed: an elastic bench that may go on at another world size has none yet.
    """
    if record.settings.elastic and record.status != "ok":
        return {}
    found = {
        name: "" if value is None else str(value)[:_PARAM_LENGTH]
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
    tags: dict[str, str | None] = {
        Tag.RECORD: record.id,
        Tag.SWEEP: record.sweep,
        Tag.CELL: record.cell,
        Tag.STATUS: record.status,
        # A job that went on keeps its run, and the tags of its earlier ends with it.
        Tag.REASON: (record.reason or "")[:TAG_LENGTH] or ("" if record.parts else None),
        "zerokit.restarts": str(record.restarts) if record.parts else None,
        "zerokit.record": record.format,
        Tag.NOTE: note(record),
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


def run_files(record: Record) -> dict[str, str]:
    """Files by name, as text."""
    files = {"record.json": record.to_json(), "configuration.json": _json(to_plain(record.settings))}
    if record.environment is not None:
        files["environment.json"] = _json(to_plain(record.environment))
    if record.ranks:
        files["step_times.csv"] = step_times(record)
    return files


def step_times(record: Record) -> str:
    """CSV with one row per step, warm-up first: step, phase, loss, then each rank's milliseconds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["step", "phase", "loss", *(f"rank_{rank.rank}_ms" for rank in record.ranks)])
    warmup = len(record.ranks[0].warmup_ms)
    times = zip(*(rank.warmup_ms + rank.step_ms for rank in record.ranks), strict=True)
    for step, row in enumerate(times, record.untimed_steps):
        loss = record.loss[step] if step < len(record.loss) else None
        phase = "warm-up" if step - record.untimed_steps < warmup else "measured"
        writer.writerow([step, phase, "" if loss is None else loss, *row])
    return text.getvalue()


def moment_ms(record: Record) -> int:
    """The time of the record, in milliseconds since the epoch; 0 if it has none."""
    return milliseconds(record.created) or 0


def milliseconds(moment: str) -> int | None:
    """Milliseconds since the epoch for an ISO 8601 time; None for other text."""
    try:
        return int(datetime.fromisoformat(moment).timestamp() * 1000)
    except ValueError:
        return None


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def sweep_status(sweep: Sweep, records: Sequence[Record]) -> Status:
    """The status of the sweep's MLflow run: KILLED while cells are missing, FAILED if one failed."""
    statuses = [record.status for record in records]
    if len(records) < len(sweep.cells) or "killed" in statuses:
        return "KILLED"
    return "FAILED" if "failed" in statuses else "FINISHED"


def sweep_files(
    sweep: Sweep, folder: SweepFolder, pictures: Callable[[], Mapping[str, bytes]]
) -> dict[str, str | bytes]:
    """The files of a sweep's MLflow run: its options, the page if there is one, and plots of all cells."""
    files: dict[str, str | bytes] = {FILE: sweep_json(sweep)}
    if folder.report.exists():
        files[folder.report.name] = folder.report.read_bytes()
    return files | {f"plots/{name}": content for name, content in pictures().items()}
