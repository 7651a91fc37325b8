"""Results computed from the ranks' measurements, and model FLOPs utilisation.

Peaks are dense (no sparsity) and of the type that products are computed in, in FLOP/s: those that a plan uses. A device
or a precision that is not listed has no utilisation: a guess would look like a measurement.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from zerokit.bench.record.measured import Model, Rank, Results, Twin, Utilisation
from zerokit.bench.record.record import Record
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.statistics import Summary, skew, slowest
from zerokit.planning.hardware import known_device


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
        communication_ms=None if twin is None else median(twin.costs_ms or [step.p50 - twin.step.p50]),
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


def count_distinct(used: Iterable[tuple[int, str | None]]) -> int | None:
    """The number of devices in use, from each rank's node and device identity; None if one is unknown.

    A UUID is one device's wherever it is seen (simulated nodes share their machine's), an index one on its node.
    """
    found = set()
    for node, identity in used:
        if identity is None:
            return None
        found.add((node if identity.isdecimal() else None, identity))
    return len(found)


def peak_flops(device: str, precision: str | None) -> float | None:
    """The dense peak of a device by its name in torch, in FLOP/s; None if unknown.

    It is not known of a slice (MIG), whose name begins with that of the whole device.
    """
    known = known_device(device)
    return None if known is None else known.flops.get(precision or "")


def utilisation(
    units_per_second: float, flops_per_unit: float | None, device: str, precision: str | None
) -> Utilisation | None:
    """The utilisation of a device that trains `units_per_second` at `flops_per_unit`; None if a part is unknown."""
    peak = peak_flops(device, precision)
    if peak is None or flops_per_unit is None or precision is None:
        return None
    achieved = units_per_second * flops_per_unit
    return Utilisation(achieved / peak, achieved, peak, device, precision)
