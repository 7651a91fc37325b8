"""Results computed from the ranks' measurements."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from statistics import median

from zerokit.bench.record.measured import Model, Rank, Results, Twin
from zerokit.bench.record.record import Record
from zerokit.bench.record.settings import Settings
from zerokit.bench.record.statistics import Summary, skew, slowest
from zerokit.bench.record.utilisation import utilisation


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
