"""The metrics of a bench by name, as shown by tables, reports and MLflow, each with its unit and noise.

One table, `METRICS`. A figure is computed from the record alone; where the record does not have it (no twin, no GPU, a
cell that failed) it has no value, never a zero. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import Any, Literal

from zerokit.bench.record.measured import Rank
from zerokit.bench.record.record import Record
from zerokit.bench.record.statistics import mean_interval, median_interval
from zerokit.sizes import ELSEWHERE

MIB = 2.0**20
UNITS = ("tokens", "images", "samples")
PACED = "step/paced"
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")

Better = Literal["lower", "higher"]
Read = Callable[[Record], float | None]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, and how the values of its rounds are combined.

    Attributes:
        name: as in MLflow, which takes letters, digits and `_ - . / :`.
        unit: "ms", "MiB", "tokens/s"; empty for counts and ratios.
        value: in that unit; None where the record does not have it.
        counted: whether it is known exactly, and comes out equal every time.
        additive: whether it is a difference, which may be around 0, and so has no ratios.
    """

    name: str
    title: str
    unit: str
    better: Better
    value: Read
    counted: bool = False
    additive: bool = False

    def has_ratios(self, values: Iterable[float]) -> bool:
        """Whether values are compared by ratio, and therefore averaged by logarithm."""
        return not self.additive and min(values) > 0

    def centre(self, values: Sequence[float]) -> float:
        """The cell's value from its rounds: the geometric mean if ratios exist, otherwise the mean.

        It is the one estimator of every table, tile and picture. A throughput is the work over the step beside it, and
        the ratio of two cells is the mean of their rounds' ratios, neither of which holds for medians.
        """
        if min(values) == max(values):
            return values[0]
        if self.has_ratios(values):
            return math.exp(fmean(map(math.log, values)))
        return fmean(values)


@dataclass(frozen=True, slots=True)
class Measured:
    """A metric's value, and half of its 95 % interval in the same unit (None if unknown)."""

    value: float
    error: float | None


def metrics_of(record: Record) -> dict[str, float]:
    """Every metric that this record has, by name; values are finite and names are legal in MLflow. Fewer than 60."""
    found = {}
    for name, metric in METRICS.items():
        value = metric.value(record)
        if value is not None and math.isfinite(value):
            found[name] = float(value)
    return found


def measure(metric: Metric, records: Sequence[Record]) -> Measured | None:
    """One metric of a cell from its repetitions (at least one): `Metric.centre`. None if no record has it.

    With several, its error is that of their mean by Student's t, however exact each run by itself seems: the noise
    within a run is not the noise between runs. One run can tell the error of what is counted, and of its cost of
    communication.
    """
    values = values_of(metric, records)
    if not values:
        return None
    if len(values) == 1:
        if metric.counted:
            return Measured(values[0], 0.0)
        twin = next((record.twin for record in records if record.twin is not None), None)
        if twin is None or metric.name != "comm/cost_ms":
            return Measured(values[0], None)
        low, high = median_interval(twin.costs_ms)
        return Measured(values[0], (high - low) / 2)
    centre = metric.centre(values)
    if metric.has_ratios(values):
        return Measured(centre, centre * mean_interval([math.log(value) for value in values])[1])
    return Measured(centre, mean_interval(values)[1])


def values_of(metric: Metric, records: Sequence[Record]) -> list[float]:
    """The finite values, from the records that have the metric."""
    found = (metric.value(record) for record in records)
    return [float(value) for value in found if value is not None and math.isfinite(value)]


def _read(path: str, factor: float = 1.0) -> Read:
    """A number by its path in the record, "results.step.p50", times `factor`."""

    def value(record: Record) -> float | None:
        part: Any = record
        for name in path.split("."):
            part = None if part is None else getattr(part, name)
        return None if part is None else float(part) * factor

    return value


def _throughput(unit: str, name: str) -> Read:
    value = _read(f"results.{name}")
    return lambda record: value(record) if record.model and record.model.unit == unit else None


def _state(name: str) -> Read:
    """The total of the rank that holds most."""
    return lambda record: _largest((getattr(rank, name) or {}).get("total") for rank in record.ranks)


def _beside(*lines: str) -> Read:
    """Lines of the memory report that are no part of the state; None where masters and states are on the device."""

    def value(record: Record) -> float | None:
        if record.settings.home not in ELSEWHERE:
            return None
        return _largest(
            None if rank.memory_bytes is None else sum(rank.memory_bytes.get(line, 0) for line in lines)
            for rank in record.ranks
        )

    return value


def _peak_in_a_step(record: Record) -> float | None:
    """MiB of all tensors on rank 0, in the extra step in which they were followed."""
    readings = [] if record.timeline is None else zip(*record.timeline.bytes.values(), strict=True)
    return _largest(map(sum, readings))


def _device(name: str) -> Read:
    """A figure of a rank's device, where it is largest."""
    return lambda record: _largest(
        getattr(rank.device_memory, name) for rank in record.ranks if rank.device_memory is not None
    )


def _largest(sizes: Iterable[int | None]) -> float | None:
    """In MiB; None where nothing is known."""
    return max((size / MIB for size in sizes if size is not None), default=None)


def _idle(choose: Callable[[list[float]], float]) -> Read:
    """The part of a step for which a rank waits; None where ranks are alone, or the engine cannot tell."""

    def value(record: Record) -> float | None:
        shares = [share for rank in record.ranks if (share := idle_share(rank)) is not None]
        return choose(shares) if len(shares) > 1 else None

    return value


def idle_share(rank: Rank) -> float | None:
    """The part of a step for which this rank waits; None where that is not known."""
    if rank.computed_ms is None or rank.waited_ms is None or rank.computed_ms + rank.waited_ms <= 0:
        return None
    return rank.waited_ms / (rank.computed_ms + rank.waited_ms)


def _bandwidth(operation: str) -> Read:
    return lambda record: {one.operation: one.bus_gb_per_s for one in record.bandwidth}.get(operation)


def _paced(record: Record) -> float | None:
    """How many times as long steps were as forward and backward of the compute-only twin beside them.

    The geometric mean of the middle half of the pairs. When the machine is slower for a while, both are. None where
    samples are dealt by pace: the twin's passes are then not those of other cells.
    """
    twin = record.twin
    if twin is None or record.settings.pace or min(*twin.own_ms, *twin.pace_ms) <= 0:
        return None
    pairs = zip(twin.own_ms, twin.pace_ms, strict=True)
    ratios = sorted(math.log(own / pace) for own, pace in pairs)
    aside = len(ratios) // 4
    return math.exp(fmean(ratios[aside : len(ratios) - aside]))


def _wall(record: Record) -> float | None:
    """A step's share of the host's clock over all measured ones; None where each was timed by it."""
    windows = [rank.window_ms for rank in record.ranks if rank.window_ms is not None]
    return max(windows) / len(record.ranks[0].step_ms) if windows else None


_LOSSES_OF_A_TARGET = 5
"""Steps whose mean loss must reach the target: one step's batch may be easy."""


def _to_target(unit: str) -> Read:
    """Tokens, or what else the model counts, until the loss has come down to the target; None where it has not."""

    def value(record: Record) -> float | None:
        target, model = record.settings.target_loss, record.model
        if target is None or model is None or model.unit != unit:
            return None
        for stop in range(_LOSSES_OF_A_TARGET, len(record.loss) + 1):
            last = [
                math.inf if one is None else one for one in record.loss[stop - _LOSSES_OF_A_TARGET : stop]
            ]
            if fmean(last) <= target:
                return float(stop * record.settings.samples_per_step * model.units_per_sample)
        return None

    return value


def _table() -> Iterator[tuple[str, str, str, Read | str]]:
    """Name, title, unit and value of each; a value may be a path in the record."""
    for name in ("p50", "p10", "p90", "p99", "mean"):
        yield f"step/{name}_ms", f"step {name}", "ms", f"results.step.{name}"
    yield "step/planned_ms", "step, planned", "ms", "planned.step_ms"
    yield PACED, "step, paced", "×", _paced
    for name, choose in (("least", min), ("most", max)):
        yield f"idle/{name}", f"idle, {name}", "", _idle(choose)
    yield "step/wall_mean_ms", "step mean, wall", "ms", _wall
    for name in ("spread", "drift"):
        yield f"step/{name}", f"step {name}", "", f"results.step.{name}"
    for name in ("p50", "p90"):
        yield f"step/skew_{name}_ms", f"skew {name}", "ms", f"results.skew.{name}"
    for unit in UNITS:
        for end, title in (("", ""), ("_per_rank", " a rank"), ("_per_device", " a device")):
            name = f"throughput/{unit}_per_s{end}"
            yield name, f"throughput{title}", f"{unit}/s", _throughput(unit, f"throughput{end}")
    yield "mfu", "MFU", "", "results.utilisation.mfu"
    flops = _read("results.utilisation.model_flops_per_s", 1e-12)
    yield "model_tflops_per_s_per_device", "model FLOPs a device", "TFLOP/s", flops
    for name, title, value in (
        ("peak_host", "peak host", "results.peak_host_bytes"),
        ("peak_host_minimum", "peak host, least", "results.peak_host_bytes_minimum"),
        ("peak_allocated", "peak CUDA", "results.peak_allocated_bytes"),
        ("peak_allocated_minimum", "peak CUDA, least", "results.peak_allocated_bytes_minimum"),
        ("peak_reserved", "peak CUDA reserved", "results.peak_reserved_bytes"),
        ("setup_allocated", "peak CUDA, setup", _device("setup_allocated_bytes")),
        ("device_used", "device used", _device("used_bytes")),
        ("step_peak", "peak in a step", _peak_in_a_step),
        ("planned_peak", "peak, planned", "planned.total_bytes"),
        ("state", "state", _state("memory_bytes")),
        ("state_predicted", "state, formula", _state("predicted_memory_bytes")),
        ("elsewhere", "states elsewhere", _beside(*ELSEWHERE)),
        ("visiting", "buffers of visits", _beside("visiting")),
    ):
        yield f"memory/{name}_mib", title, "MiB", value
    yield "comm/cost_ms", "communication", "ms", "results.communication_ms"
    yield "comm/twin_p50_ms", "compute only", "ms", "twin.step.p50"
    yield "comm/exposed_ms", "exposed", "ms", "phases.exposed_communication_ms"
    for name in ("forward", "backward", "optimizer"):
        yield f"phase/{name}_ms", name, "ms", f"phases.{name}_ms"
    yield "phase/optimizer_share", "optimizer's share", "", "phases.optimizer_share"
    yield "traffic/mib_per_step", "moved a step", "MiB", "traffic.bytes"
    yield "traffic/predicted_mib_per_step", "moved, formula", "MiB", "traffic.predicted_bytes"
    yield "traffic/elements_per_step", "elements moved a step", "", "traffic.elements"
    for name in OPERATIONS:
        yield f"bus/{name}_gb_per_s", f"bus, {name.replace('_', '-')}", "GB/s", _bandwidth(name)
    yield "loss_first", "first loss", "", "results.loss_first"
    yield "loss_last", "last loss", "", "results.loss_last"
    for unit in UNITS:
        yield f"to_target/{unit}", "to the target loss", unit, _to_target(unit)
    yield "skipped_steps", "skipped steps", "", lambda one: one.skipped_steps if one.results else None
    yield "build_ms", "build", "ms", lambda one: max((rank.build_ms for rank in one.ranks), default=None)
    yield "checkpoint/save_ms", "save", "ms", "checkpoints.median_save_ms"
    yield "checkpoint/load_ms", "load", "ms", "checkpoints.load_ms"


_COUNTED = (
    *("memory/elsewhere", "memory/visiting"),
    *("memory/state", "memory/planned_peak", "step/planned", "traffic/", "loss_", "skipped_steps"),
)
"""Known exactly."""


def instrumented(name: str) -> bool:
    """Whether a metric comes from extra steps or single collectives, outside the measured steps."""
    return name.startswith(("phase/", "bus/")) or name in ("comm/exposed_ms", "memory/step_peak_mib")


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        name: Metric(
            *(name, title, unit),
            better="higher" if unit.endswith("/s") or name == "mfu" else "lower",
            value=_read(value, 1 / MIB if unit == "MiB" else 1.0) if isinstance(value, str) else value,
            counted=name.startswith(_COUNTED),
            additive=name in ("comm/cost_ms", "step/drift"),
        )
        for name, title, unit, value in _table()
    }
)
