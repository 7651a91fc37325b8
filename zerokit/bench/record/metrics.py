"""The figures of a bench by name: what tables, comparisons, reports and MLflow show, each with its unit and its noise.

One table, `METRICS`. A figure is computed from the record alone; where the record does not have it (no twin, no GPU, a
cell that failed) it has no value, never a zero. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import MappingProxyType
from typing import Literal

from zerokit.bench.record import Bandwidth, Record, Results
from zerokit.bench.record.statistics import mean_interval, median_interval

MIB = 2.0**20
UNITS = ("tokens", "images", "samples")
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")

Better = Literal["lower", "higher"]
Read = Callable[[Record], float | None]


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure.

    Attributes:
        name: as in MLflow, which takes letters, digits and `_ - . / :`.
        title: of a column, without its unit.
        unit: "ms", "MiB", "tokens/s"; empty for counts and ratios.
        better: which direction is an improvement.
        value: in that unit; None where the record does not have it.
        error: half of the 95 % interval of the value, in the same unit, where one run can tell: 0 for what is
            counted and comes out equal every time; None where only repetitions can tell.
    """

    name: str
    title: str
    unit: str
    better: Better
    value: Read
    error: Read


@dataclass(frozen=True, slots=True)
class Measured:
    """A metric's value, and half of its 95 % interval (None: not known) in the same unit; of how many repetitions."""

    value: float
    error: float | None
    rounds: int = 1

    @property
    def noise(self) -> float | None:
        """The error as a share of the value."""
        if self.error is None or self.error == 0.0:
            return self.error
        return self.error / abs(self.value) if self.value else math.inf


def metrics_of(record: Record) -> dict[str, float]:
    """Every figure that this record has, by name; all are finite and all names legal in MLflow. Fewer than 60."""
    found = {}
    for name, metric in METRICS.items():
        value = metric.value(record)
        if value is not None and math.isfinite(value):
            found[name] = float(value)
    return found


def measure(metric: Metric, records: Sequence[Record]) -> Measured | None:
    """One figure of a cell from its repetitions (at least one): their median. None where no record has it.

    With several, its error is that of their mean by Student's t, however exact each run by itself seems: the noise
    within a run is not the noise between runs. With one, it is the error that a run can tell, if any.
    """
    values = values_of(metric, records)
    if not values:
        return None
    if len(values) == 1:
        return Measured(
            values[0], next((metric.error(one) for one in records if metric.value(one) is not None), None)
        )
    return Measured(median(values), mean_interval(values)[1], len(values))


def values_of(metric: Metric, records: Sequence[Record]) -> list[float]:
    """The finite values of the records that have it."""
    found = (metric.value(record) for record in records)
    return [float(value) for value in found if value is not None and math.isfinite(value)]


def _nothing(record: Record) -> float | None:
    return None


def _counted(record: Record) -> float | None:
    return 0.0


def _of_results(read: Callable[[Results], float | None]) -> Read:
    return lambda record: None if record.results is None else read(record.results)


def _step(name: str) -> Read:
    """A number of the summary of the steps."""
    return _of_results(lambda results: float(getattr(results.step, name)))


def _skew(name: str) -> Read:
    return _of_results(lambda results: float(getattr(results.skew, name)))


def _peak(name: str) -> Read:
    return _of_results(lambda results: _mib(getattr(results, name)))


def _throughput(unit: str, name: str) -> Read:
    def value(record: Record) -> float | None:
        if record.results is None or record.model is None or record.model.unit != unit:
            return None
        found = getattr(record.results, name)
        return None if found is None else float(found)

    return value


def _mfu(record: Record) -> float | None:
    if record.results is None or record.results.utilisation is None:
        return None
    return record.results.utilisation.mfu


def _tera(record: Record) -> float | None:
    if record.results is None or record.results.utilisation is None:
        return None
    return record.results.utilisation.model_flops_per_s / 1e12


def _communication_error(record: Record) -> float | None:
    """Of the pairs of blocks in this run; a twin that ran by itself, as in older records, cannot tell."""
    if record.twin is None or not record.twin.costs_ms:
        return None
    low, high = median_interval(record.twin.costs_ms)
    return (high - low) / 2


def _twin(record: Record) -> float | None:
    return None if record.twin is None else record.twin.step.p50


def _phase(name: str) -> Read:
    return lambda record: None if record.phases is None else getattr(record.phases, name)


def _state(name: str) -> Read:
    """The total of the rank that holds most."""

    def value(record: Record) -> float | None:
        lines = [getattr(rank, name) or {} for rank in record.ranks]
        return _mib(max((line["total"] for line in lines if "total" in line), default=None))

    return value


def _traffic(name: str, divisor: float) -> Read:
    return lambda record: None if record.traffic is None else getattr(record.traffic, name) / divisor


def _bandwidth(operation: str) -> Read:
    """Of the engine's own collective where it has one, at the largest size."""

    def rank(one: Bandwidth) -> tuple[bool, int]:
        return one.by == "zerokit", one.size_bytes

    def value(record: Record) -> float | None:
        found = [one for one in record.bandwidth if one.operation == operation]
        return max(found, key=rank).bus_gb_per_s if found else None

    return value


def _wall(record: Record) -> float | None:
    """A step's share of the host's clock over all measured ones; None where each was timed by it."""
    windows = [rank.window_ms for rank in record.ranks if rank.window_ms is not None]
    return max(windows) / len(record.ranks[0].step_ms) if windows else None


def _device(name: str) -> Read:
    """A figure of a rank's device, where it is largest."""

    def value(record: Record) -> float | None:
        found = [rank.device_memory for rank in record.ranks if rank.device_memory is not None]
        return _mib(max((getattr(memory, name) for memory in found), default=None))

    return value


def _skipped(record: Record) -> float | None:
    return None if record.results is None else record.skipped_steps


def _build(record: Record) -> float | None:
    return max((rank.build_ms for rank in record.ranks), default=None)


def _save(record: Record) -> float | None:
    return median([one.ms for one in record.checkpoints.saves]) if record.checkpoints.saves else None


def _mib(size_bytes: float | None) -> float | None:
    return None if size_bytes is None else size_bytes / MIB


def _table() -> list[Metric]:
    rows: list[tuple[str, str, str, Read, Read]] = [
        *(
            (f"step/{name}_ms", f"step {name}", "ms", _step(name), _nothing)
            for name in ("p50", "p10", "p90", "p99", "mean")
        ),
        ("step/wall_mean_ms", "step mean, wall", "ms", _wall, _nothing),
        ("step/spread", "step spread", "", _step("spread"), _nothing),
        ("step/drift", "step drift", "", _step("drift"), _nothing),
        ("step/skew_p50_ms", "skew p50", "ms", _skew("p50"), _nothing),
        ("step/skew_p90_ms", "skew p90", "ms", _skew("p90"), _nothing),
    ]
    for unit in UNITS:
        of, per = f"throughput/{unit}_per_s", f"{unit}/s"
        rows += [
            (of, "throughput", per, _throughput(unit, "throughput"), _nothing),
            (f"{of}_per_rank", "throughput a rank", per, _throughput(unit, "throughput_per_rank"), _nothing),
            (
                f"{of}_per_device",
                "throughput a device",
                per,
                _throughput(unit, "throughput_per_device"),
                _nothing,
            ),
        ]
    rows += [
        ("mfu", "MFU", "", _mfu, _nothing),
        ("model_tflops_per_s_per_device", "model FLOPs a device", "TFLOP/s", _tera, _nothing),
        ("memory/peak_host_mib", "peak host", "MiB", _peak("peak_host_bytes"), _nothing),
        (
            "memory/peak_host_minimum_mib",
            "peak host, least",
            "MiB",
            _peak("peak_host_bytes_minimum"),
            _nothing,
        ),
        ("memory/peak_allocated_mib", "peak CUDA", "MiB", _peak("peak_allocated_bytes"), _nothing),
        (
            "memory/peak_allocated_minimum_mib",
            "peak CUDA, least",
            "MiB",
            _peak("peak_allocated_bytes_minimum"),
            _nothing,
        ),
        ("memory/peak_reserved_mib", "peak CUDA reserved", "MiB", _peak("peak_reserved_bytes"), _nothing),
        ("memory/setup_allocated_mib", "peak CUDA, setup", "MiB", _device("setup_allocated_bytes"), _nothing),
        ("memory/device_used_mib", "device used", "MiB", _device("used_bytes"), _nothing),
        ("memory/state_mib", "state", "MiB", _state("memory_bytes"), _counted),
        ("memory/state_predicted_mib", "state, formula", "MiB", _state("predicted_memory_bytes"), _counted),
        (
            "comm/cost_ms",
            "communication",
            "ms",
            _of_results(lambda results: results.communication_ms),
            _communication_error,
        ),
        ("comm/twin_p50_ms", "compute only", "ms", _twin, _nothing),
        ("comm/exposed_ms", "exposed", "ms", _phase("exposed_communication_ms"), _nothing),
        ("phase/forward_ms", "forward", "ms", _phase("forward_ms"), _nothing),
        ("phase/backward_ms", "backward", "ms", _phase("backward_ms"), _nothing),
        ("phase/optimizer_ms", "optimizer", "ms", _phase("optimizer_ms"), _nothing),
        ("traffic/mib_per_step", "moved a step", "MiB", _traffic("bytes", MIB), _counted),
        (
            "traffic/predicted_mib_per_step",
            "moved, formula",
            "MiB",
            _traffic("predicted_bytes", MIB),
            _counted,
        ),
        ("traffic/elements_per_step", "elements moved a step", "", _traffic("elements", 1.0), _counted),
    ]
    for operation in OPERATIONS:
        title = f"bus, {operation.replace('_', '-')}"
        rows.append((f"bus/{operation}_gb_per_s", title, "GB/s", _bandwidth(operation), _nothing))
    rows += [
        ("loss_first", "first loss", "", _of_results(lambda results: results.loss_first), _counted),
        ("loss_last", "last loss", "", _of_results(lambda results: results.loss_last), _counted),
        ("skipped_steps", "skipped steps", "", _skipped, _counted),
        ("build_ms", "build", "ms", _build, _nothing),
        ("checkpoint/save_ms", "save", "ms", _save, _nothing),
        ("checkpoint/load_ms", "load", "ms", lambda record: record.checkpoints.load_ms, _nothing),
    ]
    return [
        Metric(name, title, unit, "higher" if unit.endswith("/s") or name == "mfu" else "lower", value, error)
        for name, title, unit, value, error in rows
    ]


METRICS: Mapping[str, Metric] = MappingProxyType({metric.name: metric for metric in _table()})
