"""A device's speed, from a bench record on it."""

from __future__ import annotations

from zerokit.bench.plans.subjects import subject_in
from zerokit.bench.record import Record
from zerokit.bench.record.schema import to_plain
from zerokit.errors import UsageError
from zerokit.placement import Mesh, Placement
from zerokit.planning.efficiency import Efficiency, of_device
from zerokit.planning.hardware import Cluster
from zerokit.planning.measured import beside, measured_efficiency, measured_step
from zerokit.planning.memory import element_sizes
from zerokit.planning.subject import Traces
from zerokit.planning.timeline import Plan
from zerokit.runtime.precision import Precision


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
    measured_plan = Plan(
        trace.work,
        trace.layout.for_world(mesh.world),
        Placement.of(settings.stage, mesh),
        element_sizes(Precision.of(precision)),
        micro_batches=settings.accumulate,
    )
    nominal = of_device(device, precision) if device.flops else None
    efficiency = measured_efficiency(measured, measured_plan, precision, nominal, sharing)
    together = sharing is not None and world > 1 and measured.ranks == 1
    return beside(efficiency, sharing) if sharing is not None and together else efficiency
