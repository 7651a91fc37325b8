"""The measurements in a record, as plain data. Units are in the names: `_ms`, `_bytes`."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from zerokit.bench.record.journal import Where
from zerokit.bench.record.schema import Count, Number, to_plain
from zerokit.bench.record.statistics import Summary


@dataclass(frozen=True, slots=True)
class Model:
    """The trained model; `parameters` counts trainable elements (Ψ), tied ones once, and `config` has its sizes.

    `unit` is what throughput counts ("tokens", "images", "samples"), of which a sample of a batch has
    `units_per_sample`. `flops_per_unit` are of a forward and a backward pass, without recomputation; null where
    unknown.
    """

    name: str
    parameters: Count
    config: dict[str, Any]
    unit: str
    units_per_sample: Count
    flops_per_unit: Number | None
    flops_convention: str | None


@dataclass(frozen=True, slots=True)
class Data:
    """The training data: source, bytes and files read, BLAKE2b of the bytes (of the seed for synthetic data)."""

    source: str
    size_bytes: Count
    files: Count
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
    cores: Count
    memory_bytes: Count
    threads: Count
    backend: str
    world: Count
    accelerator: str | None
    accelerators: Count
    cuda: str | None
    nccl: str | None
    packages: dict[str, str]
    variables: dict[str, str]
    git_commit: str | None

    @property
    def digest(self) -> str:
        """A key that is equal if everything but the commit is equal: such runs are directly comparable."""
        content = to_plain(self) | {"git_commit": None}
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Phases:
    """The phases of a step on the slowest rank, in ms: medians over `steps` extra steps after the measured ones.

    The parts are waited for one by one, so that their sum may exceed a measured step. `optimizer_ms` is clipping, the
    optimizer's step and zeroing, `optimizer_share` the median of its part of those steps; null in older records.
    `exposed_communication_ms` is how long a step waits for communication with nothing else to do; null where the engine
    cannot be asked. `source` says how it was measured: "clock", or "trace" for CUDA traces.
    """

    steps: Count
    forward_ms: Number
    backward_ms: Number
    optimizer_ms: Number
    exposed_communication_ms: Number | None
    source: str
    optimizer_share: Number | None = None


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one rank's CUDA device outside torch's peaks of the measured steps.

    Setup is construction and warm-up, and the batches that then lie ready (`batch_bytes`, in the measured steps' peak
    too). `used_bytes` are used after the measured steps, by whomever: all its ranks, CUDA itself, and NCCL's buffers.
    """

    setup_allocated_bytes: Count
    setup_reserved_bytes: Count
    batch_bytes: Count
    used_bytes: Count
    total_bytes: Count


@dataclass(frozen=True, slots=True)
class Save:
    """One checkpoint: the steps trained by then, how long training waited for it, and its size on disk."""

    step: Count
    ms: Number
    size_bytes: Count


@dataclass(frozen=True, slots=True)
class NodeCopies:
    """Copies of the training state in the nodes' own memory, in the last part of an elastic bench.

    `count` were complete on all nodes, the newest of them that of `step`. Medians: training waited `held_ms` for one,
    which was complete after `ms`. `node_bytes`: what each node held of the newest, of up to two that it keeps.
    """

    count: Count
    step: Count
    held_ms: Number
    ms: Number
    node_bytes: list[Count]


@dataclass(slots=True)
class Checkpoints:
    """A bench's checkpoints; `resumed_from` is the step from which it resumed, null for a fresh start.

    `resumed_where`: "copies" in the nodes' memory, or the "run". `notes`: what loading it has told, such as why it is
    not the step which the run's `latest` names, and copies that could not be made.
    """

    resumed_from: Count | None = None
    load_ms: Number | None = None
    saves: list[Save] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    resumed_where: Where = ""
    copies: NodeCopies | None = None

    @property
    def median_save_ms(self) -> float | None:
        """How long training waited for the median save."""
        return median([save.ms for save in self.saves]) if self.saves else None


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Model FLOPs utilisation of one device: `model_flops_per_s` ÷ `peak_flops_per_s` (dense, at `precision`)."""

    mfu: Number
    model_flops_per_s: Number
    peak_flops_per_s: Number
    device: str
    precision: str


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's measurements; what is of CUDA is null on a CPU.

    Attributes:
        step_ms: of each measured step: forward, backward, clipping, optimizer step, zeroing; the batch is
            prepared before. On CUDA by events between the steps, which the host does not wait for.
        warmup_ms: the same of the steps before.
        build_ms: model and optimizer, from meta to the first broadcast.
        peak_host_bytes: resident memory of the process at its highest, construction included.
        peak_allocated_bytes: by torch's CUDA allocator during the measured steps.
        peak_reserved_bytes: taken by that allocator from the device.
        memory_bytes: `ZeroOptimizer.memory()` at the end of backward, by kind, with `total`; null for other engines.
        predicted_memory_bytes: the same from the layout alone.
        device_id: UUID of the device, by which ranks that share one are known.
        window_ms: on CUDA, the measured steps together by the host's clock, from an idle device to an idle one, saving
            apart: beside the sum of `step_ms`.
        computed_ms, waited_ms: how long the rank computed in a step, and waited in collectives for others and their
            data: means over the measured steps, on CUDA over the last of warm-up. Null for engines that cannot tell.
        share: its share of what is sharded; null where all ranks have equal ones.
        samples: how many of a step's samples it had in the last step, by pace; null where all ranks have as many.
        speed: on which ranks have agreed, relative to their mean; null without pace.
    """

    rank: Count
    node: Count
    host: str
    pid: Count
    device: str
    step_ms: list[Number]
    warmup_ms: list[Number]
    build_ms: Number
    peak_host_bytes: Count
    peak_allocated_bytes: Count | None = None
    peak_reserved_bytes: Count | None = None
    memory_bytes: dict[str, Count] | None = None
    predicted_memory_bytes: dict[str, Count] | None = None
    device_id: str | None = None
    device_memory: DeviceMemory | None = None
    window_ms: Number | None = None
    computed_ms: Number | None = None
    waited_ms: Number | None = None
    share: Count | None = None
    samples: Count | None = None
    speed: Number | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """Traffic that all ranks received in the last step: payload without padding, and control messages separately.

    `formula` says in words what `predicted_elements` is, with N ranks and Ψ parameters. `route` is how it travelled:
    "nccl", "sockets", "memory" (ranks of one node read each other's), "memory and sockets"; null for one rank.
    """

    elements: Count
    bytes: Count
    control_bytes: Count
    predicted_elements: Count
    predicted_bytes: Count
    formula: str
    by_operation: dict[str, Any]
    route: str | None = None


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """One collective, timed after the training with nccl-tests' definitions.

    It is that of `by`, "zerokit" or "torch", over a buffer of `size_bytes` (all ranks' parts together), in the median
    time of the slowest rank. Bandwidth is size / time, in 10^9 bytes; that of the bus × 2(N−1)/N for all_reduce,
    (N−1)/N for reduce_scatter and all_gather: what the wire of the busiest rank carries in one direction.
    """

    operation: str
    by: str
    size_bytes: Count
    ms: Number
    algorithm_gb_per_s: Number
    bus_gb_per_s: Number


@dataclass(frozen=True, slots=True)
class Twin:
    """The compute-only twin: the same model and batches, nothing communicated in a step.

    `stage` 0 stepped the whole optimizer on every rank, 1 a 1/N share. `step_ms` is of each step's slowest rank.
    The cell made its own steps in turn with them, in the same processes: `own_ms`, in the same order. `pace_ms` is the
    forward and backward part of `step_ms`, the same work for every engine and stage.
    """

    stage: Count
    step_ms: list[Number]
    step: Summary
    own_ms: list[Number]
    pace_ms: list[Number]

    @property
    def costs_ms(self) -> list[float]:
        """The extra time of each of the cell's steps over the twin's step next to it."""
        return [own - alone for own, alone in zip(self.own_ms, self.step_ms, strict=True)]


@dataclass(frozen=True, slots=True)
class Samples:
    """One node's system metrics while the measured steps ran.

    `seconds` are since the first measured step; `series` has one list of the same length a metric, named as MLflow
    names system metrics ("cpu_utilization_percentage", "system_memory_usage_megabytes", …); null where one could not be
    read.
    `cost_ms` is the processor time that all this sampling took.
    """

    node: Count
    host: str
    interval_s: Number
    seconds: list[Number]
    series: dict[str, list[Number | None]]
    cost_ms: Number


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan for the same cell, computed from the model and settings (`zerokit plan`).

    `peak_bytes` are of the rank that holds most, when it holds most, by kind (empty for a model that cannot be
    planned), `highest_bytes` the most of each kind at whatever time. `reason` says why something is missing.
    """

    peak_bytes: dict[str, Count]
    highest_bytes: dict[str, Count]
    step_ms: Number | None = None
    reason: str | None = None

    @property
    def total_bytes(self) -> int | None:
        """All kinds of `peak_bytes`; None for a model that cannot be planned."""
        return sum(self.peak_bytes.values()) or None


@dataclass(frozen=True, slots=True)
class MemoryTimeline:
    """Rank 0's memory over one extra step, which is slower because memory is read in it.

    `parts` has the seconds when parts of the step began: "forward" and "backward" of each micro-batch, "optimizer".
    `seconds` are those of the readings since the step began, and `bytes` has one list of the same length for each of
    `MEMORY_KINDS`.
    """

    parts: dict[str, list[Number]]
    seconds: list[Number]
    bytes: dict[str, list[Count]]


@dataclass(frozen=True, slots=True)
class Trace:
    """The timeline of one extra step on all ranks (--timeline), in a `file` on the machine that launched the bench.

    `step_ms` is that step's time on its slowest rank, `uncertainty_ms` the most by which a rank's clock may be off.
    """

    file: str
    step_ms: Number
    spans: Count
    uncertainty_ms: Number


@dataclass(frozen=True, slots=True)
class Results:
    """Results computed from the ranks' measurements; a step takes as long as its slowest rank.

    `step` and `skew` (slowest minus fastest rank) are in milliseconds. `throughput` counts the model's unit a second at
    the median step. `communication_ms` is what communication costs: the median of what the cell's steps took longer
    than the twin's beside them; null without a twin, and negative at times where the noise is larger. `devices` counts
    the CUDA devices in use, which several ranks may share; `utilisation` is of one of them, unless they are of several
    kinds. `loss_first` is the first warm-up step's, before any update. Memory is the largest and the smallest over
    ranks.
    """

    step: Summary
    skew: Summary
    throughput: Number
    throughput_per_rank: Number
    communication_ms: Number | None
    utilisation: Utilisation | None
    loss_first: Number | None
    loss_last: Number | None
    peak_host_bytes: Count
    peak_host_bytes_minimum: Count
    peak_allocated_bytes: Count | None
    peak_allocated_bytes_minimum: Count | None
    peak_reserved_bytes: Count | None
    devices: Count | None = None
    throughput_per_device: Number | None = None
