"""The record of a bench, `zerokit.bench/1`: what was asked, where it ran, and every number that was measured.

It is written before anything else is told about the run, and everything told later (tables, MLflow) is
computed from it. Units are in the names: `_ms`, `_bytes`. A number that was not finite (a diverged loss) is
null.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zerokit import files
from zerokit.bench.checkpoints import Checkpoints
from zerokit.bench.checks import check_record
from zerokit.bench.journal import Part
from zerokit.bench.measure.devices import count_distinct
from zerokit.bench.measure.memory import DeviceMemory
from zerokit.bench.measure.statistics import Summary, skew, slowest
from zerokit.bench.measure.utilisation import Utilisation, utilisation
from zerokit.bench.schema import from_plain, json_schema, to_plain
from zerokit.bench.settings import Settings
from zerokit.errors import ZerokitError
from zerokit.nesting import require_shallow

FORMAT = "zerokit.bench/1"


_DEEPEST = 64
"""Lists and objects in each other. A record of zerokit's has seven; the sizes of a model may be anything."""


class RecordError(ZerokitError):
    """A file is not a bench record, or one of a format that this version does not read."""


@dataclass(frozen=True, slots=True)
class Model:
    """What was trained; `parameters` are trainable elements (Ψ), tied ones once, `config` its sizes.

    Attributes:
        unit: what throughput counts: "tokens", "images" or "samples".
        units_per_sample: how many of these one sample of a batch has (tokens of a sequence, else 1).
        flops_per_unit: of a forward and a backward pass, without recomputation; null where unknown.
        flops_convention: in words, how they were counted.
    """

    name: str
    parameters: int
    config: dict[str, Any]
    unit: str
    units_per_sample: int
    flops_per_unit: float | None
    flops_convention: str | None


@dataclass(frozen=True, slots=True)
class Data:
    """The training data: where from, bytes read, files read from, BLAKE2b of the bytes (of the seed, if made up)."""

    source: str
    size_bytes: int
    files: int
    truncated: bool
    digest: str


@dataclass(frozen=True, slots=True)
class Environment:
    """The machine and the software, as rank 0 sees them; `threads` are intra-op threads of a rank.

    `packages` are the versions of what takes part in the step (engine, transformers), `git_commit` that of the working
    directory, with "-dirty" for uncommitted changes; null outside a repository.
    """

    zerokit: str
    torch: str
    python: str
    platform: str
    processor: str
    cores: int
    memory_bytes: int
    threads: int
    backend: str
    world: int
    accelerator: str | None
    accelerators: int
    cuda: str | None
    nccl: str | None
    packages: dict[str, str]
    variables: dict[str, str]
    git_commit: str | None

    @property
    def digest(self) -> str:
        """Equal where everything but the commit is equal: such runs can be compared without a second thought."""
        content = to_plain(self) | {"git_commit": None}
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Phases:
    """The parts of a step, medians over `steps` extra steps after the measured ones, of the slowest rank; milliseconds.

    The parts are waited for one by one, so that their sum may exceed a measured step. `exposed_communication_ms` is how
    long a step waits for communication with nothing else to do; null where the engine cannot be asked.
    `source` says how it was measured: "clock", or "trace" for CUDA traces.
    """

    steps: int
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    exposed_communication_ms: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's numbers.

    Attributes:
        step_ms: of each measured step: forward, backward, clipping, optimizer step, zeroing; the batch is
            prepared before. On CUDA by events between the steps, which the host does not wait for.
        warmup_ms: the same of the steps before.
        build_ms: model and optimizer, from meta to the first broadcast.
        peak_host_bytes: resident memory of the process at its highest, construction included.
        peak_allocated_bytes: by torch's CUDA allocator during the measured steps (construction included where there
            is no `device_memory`, in records from before it was noted); null on a CPU.
        peak_reserved_bytes: taken by that allocator from the device; null on a CPU.
        memory_bytes: `ZeroOptimizer.memory()` at the end of backward, by kind, with `total`; null for other engines.
        predicted_memory_bytes: the same from the layout alone.
        device_id: of the device, by which ranks that share one are told from those that do not: its UUID, or on the
            rank's node the driver's index of it; null on a CPU, and in records from before it was noted.
        device_memory: what the peaks leave out; null on a CPU.
        window_ms: on CUDA, the measured steps together by the host's clock, from an idle device to an idle one, saving
            apart: beside the sum of `step_ms`. Null on a CPU, whose steps are timed by that clock one by one.
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
    memory_bytes: dict[str, int] | None
    predicted_memory_bytes: dict[str, int] | None
    device_id: str | None = None
    device_memory: DeviceMemory | None = None
    window_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """What all ranks together received in the last step: payload, without padding; control messages apart.

    `formula` says in words what `predicted_elements` is, with N ranks and Ψ parameters. `route` is how it travelled:
    "nccl", "sockets"; between ranks of one node "memory" (they read each other's) or "shared memory"; with several such
    nodes "memory and sockets" or "shared memory and sockets". Null for one rank, and in records from before it was
    noted.
    """

    elements: int
    bytes: int
    control_bytes: int
    predicted_elements: int
    predicted_bytes: int
    formula: str
    by_operation: dict[str, Any]
    route: str | None = None


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """One collective by itself, after the training: nccl-tests' definitions.

    Attributes:
        operation: "all_reduce", "reduce_scatter", "all_gather" or "broadcast".
        by: whose: "zerokit" (its own on this backend) or "torch".
        size_bytes: of the whole buffer (all_gather and reduce_scatter: all ranks' parts together).
        ms: median time, of the slowest rank.
        algorithm_gb_per_s: size / time, 10^9 bytes.
        bus_gb_per_s: that × 2(N−1)/N for all_reduce, (N−1)/N for reduce_scatter and all_gather, 1 for broadcast: what
            the wire of the busiest rank carries in one direction.
    """

    operation: str
    by: str
    size_bytes: int
    ms: float
    algorithm_gb_per_s: float
    bus_gb_per_s: float


@dataclass(frozen=True, slots=True)
class Twin:
    """The compute-only twin: the same processes, model and batches, nothing communicated in a step.

    `stage` 0 stepped the whole optimizer on every rank, 1 a 1/N share. `step_ms` is of each step's slowest rank.
    """

    stage: int
    step_ms: list[float]
    step: Summary


@dataclass(frozen=True, slots=True)
class Samples:
    """One node's system metrics while the measured steps ran.

    `seconds` are since the first measured step; `series` has one list of the same length a metric, named as MLflow
    names system metrics ("cpu_utilization_percentage", "system_memory_usage_megabytes", …); null where one could not be
    read.
    `cost_ms` is the processor time that all this sampling took.
    """

    node: int
    host: str
    interval_s: float
    seconds: list[float]
    series: dict[str, list[float | None]]
    cost_ms: float


@dataclass(frozen=True, slots=True)
class Results:
    """What is computed from the ranks' numbers; a step's time is that of its slowest rank.

    `step` and `skew` (slowest minus fastest rank) are in milliseconds. `throughput` counts the model's unit a second at
    the median step. `communication_ms` is the median step minus the twin's: what communication costs, and null without
    a twin; it may be negative within the noise. `devices` counts the CUDA devices in use, which several ranks may
    share; `throughput_per_device` and `utilisation` are of one of them. They are null on a CPU; devices of several
    kinds have no utilisation; in records from before devices were noted it is of one rank. `loss_first` is the first
    warm-up step's loss, before any update. Memory is the largest and the smallest over ranks.
    """

    step: Summary
    skew: Summary
    throughput: float
    throughput_per_rank: float
    communication_ms: float | None
    utilisation: Utilisation | None
    loss_first: float | None
    loss_last: float | None
    peak_host_bytes: int
    peak_host_bytes_minimum: int
    peak_allocated_bytes: int | None
    peak_allocated_bytes_minimum: int | None
    peak_reserved_bytes: int | None
    devices: int | None = None
    throughput_per_device: float | None = None


STATUSES = ("ok", "out of memory", "unsupported", "failed", "killed")


@dataclass(frozen=True, slots=True)
class Record:
    """One bench. What an unsuccessful one did not come to is null or empty.

    Attributes:
        id: of this run, 32 hexadecimal digits; a repetition gets another.
        sweep: the id that all cells of a sweep share; null for a single bench.
        cell: `Settings.key` of what was asked, before a rank filled in what was left open.
        status: "ok", "out of memory", "unsupported", "failed" or "killed"; `reason` says more unless it is ok.
        created: when the measured steps ended, UTC, ISO 8601.
        loss: of every step, warm-up first, the mean over ranks and micro-batches. Of an elastic bench each step of the
            job once, as it was trained last.
        gradient_norm: of every step as for the loss, before clipping; empty when nothing was clipped.
        skipped_steps: by fp16 overflow, warm-up included.
        parts: of an elastic bench, what was trained between restarts, from the job's first step on; each repeats the
            steps of the one before after the checkpoint that it began from. Everything else here that is measured or
            counted, settings' nodes and ranks too, is of the last part alone, whose processes wrote it: no figure
            mixes world sizes or contains a restart. Empty for a bench that is not elastic.
        ranks: in rank order.
        traffic: of zerokit; null for other engines.
        bandwidth: of single collectives, after the training.
        system: one a node.
        checkpoints: what was saved and resumed, between the steps.
        batches_repeat_after: steps after which batches came again, since not all lay ready on a CUDA device; null where
            every step had its own.
    """

    id: str
    cell: str
    status: str = field(metadata={"schema": {"enum": list(STATUSES)}})
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
    system: list[Samples] = field(default_factory=list)
    loss: list[float | None] = field(default_factory=list)
    gradient_norm: list[float | None] = field(default_factory=list)
    skipped_steps: int = 0
    results: Results | None = None
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    batches_repeat_after: int | None = None
    parts: list[Part] = field(default_factory=list)
    format: str = field(default=FORMAT, metadata={"schema": {"const": FORMAT}})

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"status {self.status!r} is unknown: one of {STATUSES}")

    @property
    def restarts(self) -> int:
        """How often an elastic bench began anew after ranks were lost or came."""
        return max(0, len(self.parts) - 1)

    @property
    def untimed_steps(self) -> int:
        """How many entries of `loss` are of steps before the first that `ranks` have times of."""
        if not self.parts or not self.ranks:
            return 0
        return max(0, len(self.loss) - len(self.ranks[0].warmup_ms) - len(self.ranks[0].step_ms))

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
            require_shallow(value, _DEEPEST)
            if "\\u" in text:  # an escape may be half of a surrogate pair, which cannot be written again
                json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise RecordError(f"not a bench record: {error}") from error
        found = value.get("format") if isinstance(value, dict) else None
        if found != FORMAT:
            raise RecordError(
                f"not a bench record that this version reads: format {found!r}, expected {FORMAT!r}"
            )
        try:
            record = from_plain(cls, value)
            check_record(record)
        except (ValueError, ZerokitError) as error:
            raise RecordError(f"malformed bench record: {error}") from error
        return record


def record_schema() -> str:
    """The JSON Schema of a record, as `record.schema.json` beside this module has it."""
    return json.dumps(json_schema(Record, FORMAT), indent=2, ensure_ascii=False) + "\n"


def summarise(
    settings: Settings, model: Model, ranks: list[Rank], loss: list[float | None], twin: Twin | None = None
) -> Results:
    """The `Results` of these numbers."""
    step = Summary.of(slowest([rank.step_ms for rank in ranks]))
    throughput = settings.samples_per_step * model.units_per_sample / step.p50 * 1000.0
    host = [rank.peak_host_bytes for rank in ranks]
    allocated = [rank.peak_allocated_bytes for rank in ranks if rank.peak_allocated_bytes is not None]
    reserved = [rank.peak_reserved_bytes for rank in ranks if rank.peak_reserved_bytes is not None]
    per_rank = throughput / len(ranks)
    devices = count_distinct((rank.node, rank.device_id) for rank in ranks)
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
        communication_ms=None if twin is None else step.p50 - twin.step.p50,
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
    """The record of a successful bench with its twin, and the results that follow from it."""
    if record.model is None or record.results is None:
        return record
    results = summarise(record.settings, record.model, record.ranks, record.loss, twin)
    return replace(record, twin=twin, results=results)


def write_record(record: Record, path: Path) -> None:
    """Write it whole or not at all."""
    write_text(record.to_json(), path)


def write_text(text: str, path: Path) -> None:
    """Write a file whole or not at all, and its folder if that is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_aside(path, text.encode())


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
