"""What synchronisations move: counted as it goes, and predicted from the layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zerokit.formulas import Operation, TrafficReport
from zerokit.training.exchange import AGREEMENT_BYTES, FP32, Exchange
from zerokit.training.fragments import Part
from zerokit.training.masters import Masters


def take_traffic(part: Part, masters: Masters, exchange: Exchange) -> TrafficReport:
    """What the synchronisation of `part`, which is over, has moved, summed over all ranks of all islands."""
    inner = masters.exchanged()
    form = None if part.differences is None else part.differences.form
    sent = part.piece_numel * FP32 if form is None else form.nbytes(part.piece_numel)
    return TrafficReport(
        _operations(part, inner.by_operation, masters, exchange),
        2 * (exchange.count - 1) * sent + inner.received_bytes,
        (exchange.count - 1) * AGREEMENT_BYTES + inner.control_bytes,
        1 + inner.control_calls,
    )


def predict_traffic(part: Part, masters: Masters, exchange: Exchange) -> TrafficReport:
    """What a synchronisation of `part` must move, from the layout alone."""
    inner = masters.predicted_exchange(part.fragment.units)
    return TrafficReport(_operations(part, inner, masters, exchange))


def _operations(
    part: Part, inner: Mapping[str, Operation], masters: Masters, exchange: Exchange
) -> dict[str, Operation]:
    """Means and new values across islands, and what every island does inside itself."""
    islands, elements = exchange.count, part.fragment.payload_numel
    nbytes = elements * FP32
    if part.differences is not None:  # with the scales of each rank's blocks
        form = part.differences.form
        scales = form.nbytes(part.piece_numel) - part.piece_numel * form.bits // 8
        nbytes = -(-elements * form.bits // 8) + islands * masters.layout.world * scales
    outer = Operation(1, (islands - 1) * elements, (islands - 1) * nbytes)
    return {"reduce_scatter/outer": outer, "all_gather/outer": outer} | {
        f"{name}/inner": Operation(one.calls, one.elements * islands, one.bytes * islands)
        for name, one in inner.items()
        if one.elements
    }


def total(reports: Iterable[TrafficReport]) -> TrafficReport:
    """All of them together."""
    found = TrafficReport()
    for report in reports:
        found.received_bytes += report.received_bytes
        found.control_bytes += report.control_bytes
        found.control_calls += report.control_calls
        for name, one in report.by_operation.items():
            found.count(name, one)
    return found
