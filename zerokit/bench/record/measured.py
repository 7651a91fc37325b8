"""What a bench measures: plain data, of which a record is made. Units are in the names: `_ms`, `_bytes`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from zerokit.bench.record.schema import to_plain
from zerokit.bench.record.statistics import Summary


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
class DeviceMemory:
    """One rank's CUDA device, beside torch's peaks of the measured steps.

    Attributes:
        setup_allocated_bytes: the peak of torch's allocator before the measured steps: construction and warm-up, and
            the batches that then lie ready.
        setup_reserved_bytes: what that allocator had then taken from the device, at its peak.
        batch_bytes: of these batches; they are part of the measured steps' peak too.
        used_bytes: of the device after the measured steps, by whomever: torch's allocators of all its ranks, CUDA
            itself, and NCCL's buffers, which torch's numbers leave out.
        total_bytes: of the device.
    """

    setup_allocated_bytes: int
    setup_reserved_bytes: int
    batch_bytes: int
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Save:
    """One checkpoint: the steps trained by then, how long training was held for it, and its size on the disk."""

    step: int
    ms: float
    size_bytes: int


@dataclass(slots=True)
class Checkpoints:
    """What a bench did with checkpoints; `resumed_from` is the step it went on from, null for a fresh start.

    `notes`: why that is not the step which the run's `latest` names.
    """

    resumed_from: int | None = None
    load_ms: float | None = None
    saves: list[Save] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Model FLOPs utilisation of one device: `model_flops_per_s` ÷ `peak_flops_per_s` (dense, at `precision`)."""

    mfu: float
    model_flops_per_s: float
    peak_flops_per_s: float
    device: str
    precision: str


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
        device_id: of the device, by which ranks that share one are known: its UUID, or on the
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
    "nccl", "sockets"; between ranks of one node "memory" (they read each other's); with several such nodes "memory and
    sockets". Older records also know "shared memory". Null for one rank, and in records from before it was
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
    """The compute-only twin: the same model and batches, nothing communicated in a step.

    `stage` 0 stepped the whole optimizer on every rank, 1 a 1/N share. `step_ms` is of each step's slowest rank.
    The cell made its own steps in turn with them, in the same processes: `own_ms`, in the same order. `pace_ms` is the
    forward and backward part of `step_ms`, the same work for every engine and stage. In older records the twin ran by
    itself, and both are empty.
    """

    stage: int
    step_ms: list[float]
    step: Summary
    own_ms: list[float] = field(default_factory=list)
    pace_ms: list[float] = field(default_factory=list)

    @property
    def costs_ms(self) -> list[float]:
        """What each step of the cell took longer than the twin's beside it; empty in older records."""
        return [own - alone for own, alone in zip(self.own_ms, self.step_ms, strict=False)]


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


MEMORY_KINDS = ("parameters", "gradients", "optimizer", "buffers and buckets", "activations")
"""The last is all that torch allocates in a step and no engine holds beyond it."""


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """What rank 0 held in the course of one extra step, in which looking at memory took time of its own.

    `parts` has the seconds when parts of the step began: "forward" and "backward" of each micro-batch, "optimizer".
    `seconds` are those of the readings since the step began, and `bytes` has one list of the same length for each of
    `MEMORY_KINDS`.
    """

    parts: dict[str, list[float]]
    seconds: list[float]
    bytes: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class Results:
    """What is computed from the ranks' numbers; a step's time is that of its slowest rank.

    `step` and `skew` (slowest minus fastest rank) are in milliseconds. `throughput` counts the model's unit a second at
    the median step. `communication_ms` is what communication costs: the median of what the cell's steps took longer
    than the twin's beside them (in older records the median step minus the twin's). Null without a twin, and negative
    at times where the noise is larger. `devices` counts the CUDA devices in use, which several ranks may share;
    `throughput_per_device` and `utilisation` are of one of them. They are null on a CPU; devices of several kinds have
    no utilisation; in records from before devices were noted it is of one rank. `loss_first` is the first warm-up
    step's loss, before any update. Memory is the largest and the smallest over ranks.
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
