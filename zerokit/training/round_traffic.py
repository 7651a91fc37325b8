"""What synchronisations move: counted as it goes, and predicted from the layout."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from zerokit.formulas import BlockFormat, Operation, TrafficReport
from zerokit.training.exchange import Exchange
from zerokit.training.masters import Masters
from zerokit.training.outer import FP32, Part


class RoundTraffic:
    """The last synchronisation of each fragment, summed over all ranks of all islands."""

    def __init__(self, masters: Masters, exchange: Exchange, form: BlockFormat | None) -> None:
        self._masters, self._exchange, self._form = masters, exchange, form
        self._last: dict[int, TrafficReport] = {}

    def clear(self) -> None:
        """Forget all of them."""
        self._last.clear()

    def count(self, part: Part) -> None:
        """The synchronisation of `part` is over: take what it has moved."""
        inner = self._masters.exchanged()
        calls, nbytes = self._exchange.take_control()
        piece = part.region.piece_numel
        sent = piece * FP32 if self._form is None else self._form.nbytes(piece)
        self._last[part.fragment.index] = TrafficReport(
            self._across(part) | self._inside(inner.by_operation),
            2 * (self._exchange.count - 1) * sent + inner.received_bytes,
            nbytes + inner.control_bytes,
            calls + inner.control_calls,
        )

    def report(self) -> TrafficReport:
        """All fragments together: a round."""
        return _total(self._last.values())

    def predict(self, parts: Iterable[Part]) -> TrafficReport:
        """What a round of these parts must move."""
        return _total(
            TrafficReport(
                self._across(part) | self._inside(self._masters.predicted_exchange(part.fragment.units))
            )
            for part in parts
        )

    def _across(self, part: Part) -> dict[str, Operation]:
        elements, nbytes = part.fragment.payload_numel, part.fragment.payload_numel * FP32
        if self._form is not None:  # with the scales of each rank's blocks
            piece, ranks = part.region.piece_numel, self._exchange.count * self._masters.layout.world
            scales = self._form.nbytes(piece) - piece * self._form.bits // 8
            nbytes = -(-elements * self._form.bits // 8) + ranks * scales
        others = self._exchange.count - 1
        one = Operation(1, others * elements, others * nbytes)
        return {"reduce_scatter/outer": one, "all_gather/outer": one}

    def _inside(self, operations: Mapping[str, Operation]) -> dict[str, Operation]:
        """What every island does inside itself, summed over them; what moves nothing is left out."""
        islands = self._exchange.count
        return {
            f"{name}/inner": Operation(one.calls, one.elements * islands, one.bytes * islands)
            for name, one in operations.items()
            if one.elements
        }


def _total(reports: Iterable[TrafficReport]) -> TrafficReport:
    operations: dict[str, Operation] = {}
    received = control = calls = 0
    for report in reports:
        received += report.received_bytes
        control += report.control_bytes
        calls += report.control_calls
        for name, one in report.by_operation.items():
            before = operations.get(name, Operation(0, 0, 0))
            operations[name] = Operation(
                before.calls + one.calls, before.elements + one.elements, before.bytes + one.bytes
            )
    return TrafficReport(operations, received, control, calls)
