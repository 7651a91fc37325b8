"""Plans beside measurements: the plan of a measured cell, and a device's speed from a record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from time import perf_counter

from zerokit.bench.machine.host import write_first
from zerokit.bench.plans.subjects import subject_in, subject_of
from zerokit.bench.record.measured import Bandwidth, Planned
from zerokit.bench.record.record import Record
from zerokit.bench.record.schema import to_plain
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import Loaded
from zerokit.errors import UsageError
from zerokit.placement import Mesh, Placement
from zerokit.planning.efficiency import SHARES, Efficiency, of_device
from zerokit.planning.hardware import Cluster, Device, Link, Reading, device_named
from zerokit.planning.measured import MeasuredStep, beside, measured_efficiency, measured_step
from zerokit.planning.memory import StepMemory, element_sizes
from zerokit.planning.replay import Step
from zerokit.planning.subject import Traces
from zerokit.planning.timeline import Plan as Timed
from zerokit.planning.timeline import step_time
from zerokit.runtime.precision import Precision

_PAGES = 1 << 12


class PlanBeside:
    """The plan of a cell that the bench measures.

    Args:
        settings: of the bench, with what a rank has chosen.
        loaded: its workload.
        placement: that of its optimizer.
        precision: that of its optimizer, with its wire.
        device: torch's name of a CUDA device; None for hosts.
        traces: of the workload, where there are some already.
    """

    def __init__(
        self,
        settings: Settings,
        loaded: Loaded,
        placement: Placement,
        precision: Precision,
        device: str | None,
        traces: Traces | None = None,
    ) -> None:
        self._settings = settings
        self._timed: Timed | None = None
        name, on_cuda = settings.precision or "fp32", device is not None
        if traces is None:
            traces = Traces(subject_of(loaded), on_cuda=on_cuda, bucket_mb=settings.bucket_mb, exactly=True)
        try:
            trace = traces.get(settings.batch_size, name, recompute=settings.recompute)
        except UsageError as error:
            self.planned = Planned({}, {}, reason=str(error))
            return
        mesh = placement.mesh
        sockets = 0 if on_cuda or settings.nodes == 1 else mesh.outer if mesh.outer > 1 else mesh.inner
        sizes = element_sizes(precision)
        step = Step(trace.layout.for_world(mesh.world), placement, sizes, on_cuda, sockets)
        memory = StepMemory(trace, step, accumulate=settings.accumulate).of(trace)
        self._timed = Timed(trace.work, step.layout, placement, sizes, micro_batches=settings.accumulate)
        step_ms: float | None = None
        reason: str | None = "a host's step is planned from its compute-only twin, and there is none"
        if device is not None:
            try:
                found = device_named(device)
                cluster = Cluster(found, settings.nproc_per_node, found.inner)
                step_ms = step_time(self._timed, cluster, of_device(found, name)).total_s * 1e3
                reason = None
            except UsageError as error:
                reason = str(error)
        self.planned = Planned(memory.peak, memory.highest, step_ms, reason)

    def with_time(self, record: Record) -> Planned:
        """On hosts also the step's time: from the twin's pace, and from single collectives of the same ranks."""
        twin, timed, environment = record.twin, self._timed, record.environment
        if twin is None or timed is None or environment is None or environment.accelerator is not None:
            return self.planned
        reading = _reading(record.bandwidth or (), record.settings.world)
        if timed.placement.mesh.outer > 1 or record.traffic is None or record.traffic.route != "memory":
            why = "hosts have planned steps where all ranks of a node read each other's memory"
        elif self._settings.precision != "fp32" or not twin.pace_ms or reading is None:
            why = "a host's step is planned in fp32, from a twin that computes the same"
        else:
            passes_s, step_s = median(twin.pace_ms) / 1e3, median(twin.step_ms) / 1e3
            measured = MeasuredStep(
                passes_s,
                step_s - passes_s,
                environment.threads,
                record.settings.world,
                fills_buckets=False,
            )
            stepped = replace(timed, placement=Placement.of(twin.stage, timed.placement.mesh))
            efficiency = replace(measured_efficiency(measured, stepped, "fp32"), page_s=_page_seconds())
            link = Link(0.0, reading.gather, relays=False, reading=reading)
            cluster = Cluster(Device("cpu"), record.settings.world, link)
            time = step_time(timed, cluster, efficiency)
            return replace(self.planned, step_ms=time.total_s * 1e3, reason=None)
        return replace(self.planned, reason=why)


def speed_of(record: Record, cluster: Cluster, world: int) -> Efficiency:
    """The speed at which the record's own bench, once planned, takes as long as it took.

    On hosts it is that of a rank beside the others of its machine, if there are any.

    Raises `UsageError` for a record whose steps hold communication, that has no phases, or whose rank had other threads
    than the doctor's.
    """
    measured, device, sharing = measured_step(to_plain(record)), cluster.device, cluster.sharing
    if sharing is not None and sharing.threads != measured.threads:
        raise UsageError(
            f"the record's rank had {measured.threads} threads, the doctor's ranks had {sharing.threads}: repeat one "
            f"of them, such as OMP_NUM_THREADS={sharing.threads} zerokit bench --nproc-per-node 1"
        )
    settings = record.settings
    precision = settings.precision or "fp32"
    traces = Traces(
        subject_in(settings), on_cuda=bool(device.flops), bucket_mb=settings.bucket_mb, exactly=True
    )
    trace = traces.get(settings.batch_size, precision, recompute=settings.recompute)
    mesh = Mesh(1, measured.ranks)
    measured_plan = Timed(
        trace.work,
        trace.layout.for_world(mesh.world),
        Placement.of(settings.stage, mesh),
        element_sizes(Precision.of(precision)),
        micro_batches=settings.accumulate,
    )
    nominal = of_device(device, precision, SHARES["h100-80"]) if device.flops else None
    efficiency = measured_efficiency(measured, measured_plan, precision, nominal, sharing)
    together = sharing is not None and world > 1 and measured.ranks == 1
    return beside(efficiency, sharing) if sharing is not None and together else efficiency


def _reading(bandwidths: Iterable[Bandwidth], world: int) -> Reading | None:
    """What zerokit's own collectives reached by themselves."""
    found = {
        one.operation: one.size_bytes * (world - 1) / world / one.ms * 1e3
        for one in bandwidths
        if one.by == "zerokit" and one.ms
    }
    gather, reduce = found.get("all_gather"), found.get("reduce_scatter")
    return None if gather is None or reduce is None else Reading(gather, gather, reduce)


def _page_seconds() -> float:
    """What the first write to a page of memory costs on this host."""
    times = []
    for _ in range(9):
        start = perf_counter()
        write_first(_PAGES)
        times.append(perf_counter() - start)
    return median(times) / _PAGES
