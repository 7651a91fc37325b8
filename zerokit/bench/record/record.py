"""The record of a bench, `zerokit.bench/1`: its settings, its environment and every measurement.

It is written first, and everything else that is shown of the run (tables, MLflow) is computed from it. Units are in the
names: `_ms`, `_bytes`. A number that was not finite (a diverged loss) is null.

`summarise` computes the results from the ranks' measurements. Peaks of devices are dense (no sparsity) and of the type
that products are computed in: those that a plan uses. A device or a precision that is not listed has no utilisation: a
guess would look like a measurement.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Literal

from zerokit import files
from zerokit.bench.record.journal import Part
from zerokit.bench.record.measured import (
    Bandwidth,
    Checkpoints,
    Data,
    Environment,
    MemoryTimeline,
    Model,
    Phases,
    Planned,
    Rank,
    Results,
    Samples,
    Trace,
    Traffic,
    Twin,
    Utilisation,
)
from zerokit.bench.record.schema import Count, Number, parse, to_plain
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.statistics import Summary, skew, slowest
from zerokit.bench.record.status import Status
from zerokit.documents import parse_json, read_text
from zerokit.errors import ZerokitError
from zerokit.formulas import MEMORY_KINDS
from zerokit.planning.hardware import known_device

FORMAT: Literal["zerokit.bench/1"] = "zerokit.bench/1"


class RecordError(ZerokitError):
    """A file is not a bench record, or has a format that this version does not read."""


@dataclass(frozen=True, slots=True)
class Record:
    """The record of one bench. What an unsuccessful bench did not reach is null or empty, as is what an engine lacks.

    Attributes:
        id: of this run, 32 hexadecimal digits.
        sweep: the id that all cells of a sweep share; null for a single bench.
        cell: `Settings.key` of what was asked, before a rank filled in what was left open.
        created: when the measured steps ended, UTC, ISO 8601.
        loss: of every step, warm-up first, the mean over ranks and micro-batches. For an elastic bench each step of the
            job once, as it was trained last.
        gradient_norm: of every step as for the loss, before clipping; empty when nothing was clipped.
        skipped_steps: for inf or nan in gradients, warm-up included.
        parts: of an elastic bench, what was trained between restarts, from the job's first step on; each repeats the
            steps of the one before after the checkpoint that it began from. Everything else here that is measured or
            counted, settings' nodes and ranks too, is of the last part alone: no figure mixes world sizes or contains
            a restart.
        ranks: in rank order.
        system: one a node.
        batches_repeat_after: steps after which batches came again, since not all lay ready on a CUDA device.
    """

    id: str
    cell: str
    status: Status
    created: str
    settings: Settings
    reason: str | None = None
    sweep: str | None = None
    model: Model | None = None
    data: Data | None = None
    environment: Environment | None = None
    ranks: list[Rank] = field(default_factory=list)
    traffic: Traffic | None = None
    bandwidth: list[Bandwidth] = field(default_factory=list)
    phases: Phases | None = None
    twin: Twin | None = None
    timeline: MemoryTimeline | None = None
    trace: Trace | None = None
    planned: Planned | None = None
    system: list[Samples] = field(default_factory=list)
    loss: list[Number | None] = field(default_factory=list)
    gradient_norm: list[Number | None] = field(default_factory=list)
    skipped_steps: Count = 0
    results: Results | None = None
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    batches_repeat_after: Count | None = None
    parts: list[Part] = field(default_factory=list)
    format: Literal["zerokit.bench/1"] = FORMAT

    @property
    def restarts(self) -> int:
        """The number of restarts of an elastic bench after ranks were lost or joined."""
        return max(0, len(self.parts) - 1)

    @property
    def untimed_steps(self) -> int:
        """The number of entries of `loss` that precede the first timed step."""
        if not self.parts or not self.ranks:
            return 0
        return max(0, len(self.loss) - len(self.ranks[0].warmup_ms) - len(self.ranks[0].step_ms))

    def to_json(self) -> str:
        """The record as JSON with two spaces of indent and a final newline; lists of numbers stay on one line."""
        return (
            _compact_lists(json.dumps(to_plain(self), indent=2, allow_nan=False, ensure_ascii=False)) + "\n"
        )

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Parse and check a record; raises `RecordError` naming the first invalid field."""
        return parse(cls, text, "bench record", RecordError, _require_consistent)


def _require_consistent(record: Record) -> None:
    """Raise `ValueError`, naming the field, for values of the right type that contradict each other."""
    if len({(len(rank.warmup_ms), len(rank.step_ms)) for rank in record.ranks}) > 1:
        raise ValueError("ranks: ranks have different numbers of steps")
    if any(rank.window_ms is not None and not rank.step_ms for rank in record.ranks):
        raise ValueError("ranks: window_ms is set, but there are no steps")
    if (twin := record.twin) is not None and not 0 < len(twin.step_ms) == len(twin.own_ms) == len(
        twin.pace_ms
    ):
        raise ValueError("twin: step_ms, own_ms and pace_ms have different numbers of steps, or none")
    for node, samples in enumerate(record.system):
        _check_series(f"system[{node}].series", samples.series, samples.seconds)
    if record.timeline is not None:
        if sorted(record.timeline.bytes) != sorted(MEMORY_KINDS):
            raise ValueError(f"timeline.bytes: expected {', '.join(MEMORY_KINDS)}")
        _check_series("timeline.bytes", record.timeline.bytes, record.timeline.seconds)


def _check_series(path: str, series: Mapping[str, Sequence[object]], seconds: Sequence[float]) -> None:
    for name, values in series.items():
        if len(values) != len(seconds):
            raise ValueError(f"{path}.{name}: has {len(values)} values at {len(seconds)} moments")


def require_writable(folder: Path) -> None:
    """Create the folder if it is missing; raises `RecordError` if it or a file in it cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecordError(
            f"the record cannot be written to {folder}: {error.strerror}; choose another --output"
        ) from error


def write_record(record: Record, path: Path) -> None:
    """Write the record whole or not at all."""
    write_text(record.to_json(), path)


def write_text(text: str, path: Path) -> None:
    """`write_bytes` of text."""
    write_bytes(text.encode(), path)


def write_bytes(content: bytes, path: Path) -> None:
    """Write a file whole or not at all, and create its folder if it is missing; links and devices stay such."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_bytes(content)
    else:
        files.write_aside(path.resolve(), content)


def read_record(path: Path) -> Record:
    """Read the record from a file; raises `RecordError`."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise RecordError(f"cannot read the bench record {path}: {error}") from error
    try:
        return Record.from_json(text)
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from error


# A JSON string holds no raw line break, so this matches lists only.
_NUMBERS = re.compile(r"\[\n\s+((?:(?:-?\d[\d.eE+-]*|null),?\s+)+)\]")


def _compact_lists(text: str) -> str:
    """Join the lines of lists that hold only numbers and nulls."""
    return _NUMBERS.sub(lambda match: "[" + " ".join(match[1].split()) + "]", text)


_FAMILY = FORMAT.partition("/")[0] + "/"


@dataclass(frozen=True, slots=True)
class Run:
    """Records named together, in the order of their cells; `name` is the user's name for them."""

    name: str
    records: tuple[Record, ...]


def json_below(folder: Path) -> list[Path]:
    """The .json files below a folder, without hidden ones, by path."""
    found = (path for path in sorted(folder.rglob("*.json")) if path.is_file())
    return [path for path in found if not any(part[0] == "." for part in path.relative_to(folder).parts)]


def in_folder(folder: Path) -> Iterator[Record]:
    """Every record below the folder, by path."""
    return (read_record(path) for path in json_below(folder) if is_record(path))


def is_record(path: Path) -> bool:
    """Whether a file claims to be a record, of any version; raises `RecordError` if it cannot be read."""
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: not a bench record: {error}") from error
    return isinstance(content, dict) and str(content.get("format", "")).startswith(_FAMILY)


def summarise(
    settings: Settings, model: Model, ranks: list[Rank], loss: list[float | None], twin: Twin | None = None
) -> Results:
    """The `Results` of these measurements."""
    step = Summary.of(slowest([rank.step_ms for rank in ranks]))
    throughput = settings.samples_per_step * model.units_per_sample / step.p50 * 1000.0
    host = [rank.peak_host_bytes for rank in ranks]
    allocated = [rank.peak_allocated_bytes for rank in ranks if rank.peak_allocated_bytes is not None]
    reserved = [rank.peak_reserved_bytes for rank in ranks if rank.peak_reserved_bytes is not None]
    per_rank = throughput / len(ranks)
    identities = {rank.device_id for rank in ranks}
    devices = None if None in identities else len(identities)
    per_device = None if devices is None else throughput / devices
    use = utilisation(
        per_rank if per_device is None else per_device,
        model.flops_per_unit,
        ranks[0].device,
        settings.precision,
    )
    one_kind = len({rank.device for rank in ranks}) == 1
    return Results(
        step=step,
        skew=Summary.of(skew([rank.step_ms for rank in ranks])),
        throughput=throughput,
        throughput_per_rank=per_rank,
        communication_ms=None if twin is None else median(twin.costs_ms),
        utilisation=use if one_kind else None,
        loss_first=loss[0],
        loss_last=loss[-1],
        peak_host_bytes=max(host),
        peak_host_bytes_minimum=min(host),
        peak_allocated_bytes=max(allocated, default=None),
        peak_allocated_bytes_minimum=min(allocated, default=None),
        peak_reserved_bytes=max(reserved, default=None),
        devices=devices,
        throughput_per_device=per_device,
    )


def with_twin(record: Record, twin: Twin) -> Record:
    """The record of a successful bench with its twin and the results computed from it."""
    if record.model is None or record.results is None:
        return record
    results = summarise(record.settings, record.model, record.ranks, record.loss, twin)
    return replace(record, twin=twin, results=results)


def utilisation(
    units_per_second: float, flops_per_unit: float | None, device: str, precision: str | None
) -> Utilisation | None:
    """The utilisation of a device that trains `units_per_second` at `flops_per_unit`; None if a part is unknown.

    The peak is not known of a slice (MIG), whose name begins with that of the whole device.
    """
    known = known_device(device)
    peak = None if known is None else known.flops.get(precision or "")
    if peak is None or flops_per_unit is None or precision is None:
        return None
    achieved = units_per_second * flops_per_unit
    return Utilisation(achieved / peak, achieved, peak, device, precision)
