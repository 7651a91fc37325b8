"""The record of a bench, `zerokit.bench/1`: what was asked, where it ran, and every number that was measured.

It is written before anything else is told about the run, and everything told later (tables, MLflow) is
computed from it. Units are in the names: `_ms`, `_bytes`. A number that was not finite (a diverged loss) is
null.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerokit.bench.checkpoints import Checkpoints
from zerokit.bench.schema import SchemaError, from_plain, to_plain
from zerokit.bench.settings import Settings
from zerokit.bench.statistics import Summary, skew, slowest
from zerokit.errors import ZerokitError

FORMAT = "zerokit.bench/1"


class RecordError(ZerokitError):
    """A file is not a bench record, or one of a format that this version does not read."""


@dataclass(frozen=True, slots=True)
class Model:
    """What was trained; `parameters` are trainable elements (Ψ), tied ones once, `config` its sizes."""

    name: str
    parameters: int
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Data:
    """The text: where from, bytes read, files read from, BLAKE2b of the bytes."""

    source: str
    size_bytes: int
    files: int
    truncated: bool
    digest: str


@dataclass(frozen=True, slots=True)
class Environment:
    """The machine and the software, as rank 0 sees them; `threads` are intra-op threads of a rank."""

    zerokit: str
    torch: str
    python: str
    platform: str
    processor: str
    cores: int
    threads: int
    backend: str
    world: int


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's numbers.

    Attributes:
        step_ms: of each measured step: forward, backward, clipping, optimizer step, zeroing; the batch is
            prepared before the clock starts, and on CUDA the device is waited for before it stops.
        warmup_ms: the same of the steps before.
        build_ms: model and optimizer, from meta to the first broadcast.
        peak_host_bytes: resident memory of the process at its highest, construction included.
        peak_allocated_bytes: by torch's CUDA allocator, construction included; null on a CPU.
        peak_reserved_bytes: taken by that allocator from the device; null on a CPU.
        memory_bytes: `ZeroOptimizer.memory()` at the end of backward, by kind, with `total`.
        predicted_memory_bytes: the same from the layout alone.
    """

    rank: int
    node: int
    host: str
    pid: int
    device: str
    step_ms: list[float]
    warmup_ms: list[float]
    build_ms: float
    peak_host_bytes: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    memory_bytes: dict[str, int]
    predicted_memory_bytes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Traffic:
    """What all ranks together received in the last step: payload, without padding; control messages apart.

    `formula` says in words what `predicted_elements` is, with N ranks and Ψ parameters.
    """

    elements: int
    bytes: int
    control_bytes: int
    predicted_elements: int
    predicted_bytes: int
    formula: str
    by_operation: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Results:
    """What is computed from the ranks' numbers; a step's time is that of its slowest rank.

    `step` and `skew` (slowest minus fastest rank) are in milliseconds. `loss_first` is the first warm-up
    step's loss, before any update.
    """

    step: Summary
    skew: Summary
    tokens_per_second: float
    tokens_per_second_per_rank: float
    loss_first: float | None
    loss_last: float | None
    peak_host_bytes: int
    peak_allocated_bytes: int | None


@dataclass(frozen=True, slots=True)
class Record:
    """One bench.

    Attributes:
        created: when the measured steps ended, UTC, ISO 8601.
        loss: of every step, warm-up first, the mean over ranks and micro-batches.
        gradient_norm: of every step, before clipping; empty when nothing was clipped.
        skipped_steps: by fp16 overflow, warm-up included.
        ranks: in rank order.
        checkpoints: what was saved and resumed, between the steps.
    """

    created: str
    settings: Settings
    model: Model
    data: Data
    environment: Environment
    ranks: list[Rank]
    traffic: Traffic
    loss: list[float | None]
    gradient_norm: list[float | None]
    skipped_steps: int
    results: Results
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    format: str = field(default=FORMAT)

    def to_json(self) -> str:
        """Two-space JSON that ends with a newline; long lists of numbers stay on one line each."""
        return (
            _compact_lists(json.dumps(to_plain(self), indent=2, allow_nan=False, ensure_ascii=False)) + "\n"
        )

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Parse and check a record; raises `RecordError` naming the first field that is wrong."""
        try:
            value = json.loads(text)
        except ValueError as error:
            raise RecordError(f"not a bench record: {error}") from error
        found = value.get("format") if isinstance(value, dict) else None
        if found != FORMAT:
            raise RecordError(
                f"not a bench record that this version reads: format {found!r}, expected {FORMAT!r}"
            )
        try:
            return from_plain(cls, value)
        except (SchemaError, ZerokitError) as error:
            raise RecordError(f"malformed bench record: {error}") from error


def summarise(settings: Settings, ranks: list[Rank], loss: list[float | None]) -> Results:
    """The `Results` of these numbers."""
    step = Summary.of(slowest([rank.step_ms for rank in ranks]))
    tokens_per_second = settings.tokens_per_step / step.p50 * 1000.0
    allocated = [rank.peak_allocated_bytes for rank in ranks if rank.peak_allocated_bytes is not None]
    return Results(
        step=step,
        skew=Summary.of(skew([rank.step_ms for rank in ranks])),
        tokens_per_second=tokens_per_second,
        tokens_per_second_per_rank=tokens_per_second / len(ranks),
        loss_first=loss[0],
        loss_last=loss[-1],
        peak_host_bytes=max(rank.peak_host_bytes for rank in ranks),
        peak_allocated_bytes=max(allocated, default=None),
    )


def write_record(record: Record, path: Path) -> None:
    """Write it whole or not at all: a temporary file beside `path`, fsync, rename, fsync of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(record.to_json())
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp keeps others from reading
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_record(path: Path) -> Record:
    """The record in a file; raises `RecordError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
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
