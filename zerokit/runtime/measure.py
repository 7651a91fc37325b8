"""What a rank holds, summed over live storages; the counterpart of `zerokit.formulas`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.formulas import ElementBytes, MemoryReport, Operation, TrafficReport, operation_name
from zerokit.layout import Interval
from zerokit.placement import Mesh
from zerokit.runtime.admission import OptimizerStates
from zerokit.runtime.collectives import Counters
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.precision import Precision
from zerokit.runtime.storage import UnitState


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes of one tensor, under the line of `MemoryReport` that has those in use."""

    line: str
    tensor: Tensor
    used: int
    padding: int


class _Ledger:
    """Lists storages, each once."""

    def __init__(self) -> None:
        self.holdings: list[Holding] = []
        self._seen: set[int] = set()

    def add(self, line: str, tensor: Tensor, payload: int | None = None) -> None:
        """Count `tensor`'s storage under `line`; of its elements `payload` are real and the rest is padding."""
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or storage.data_ptr() in self._seen:
            return
        self._seen.add(storage.data_ptr())
        self._book(line, tensor, storage.nbytes(), payload)

    def add_bytes(self, line: str, tensor: Tensor, payload: int | None = None) -> None:
        """Count `tensor`'s own elements, not its storage."""
        self._seen.add(tensor.untyped_storage().data_ptr())
        self._book(line, tensor, tensor.numel() * tensor.element_size(), payload)

    def _book(self, line: str, tensor: Tensor, held: int, payload: int | None) -> None:
        used = held if payload is None else payload * tensor.element_size()
        self.holdings.append(Holding(line, tensor, used, held - used))


def measure_memory(
    model: nn.Module, storages: Sequence[UnitState], gradients: Gradients, inner: Optimizer
) -> MemoryReport:
    """Bytes of every storage that the runtime, the optimizer and the model's buffers hold on this rank."""
    lines = MemoryReport().as_dict()
    for one in list_holdings(model, storages, gradients, inner):
        lines[one.line] += one.used
        lines["padding"] += one.padding
    return MemoryReport(**lines | {"transient": gradients.transient})


def list_holdings(
    model: nn.Module, storages: Sequence[UnitState], gradients: Gradients, inner: Optimizer
) -> list[Holding]:
    """What `measure_memory` adds up, tensor by tensor."""
    ledger = _Ledger()
    for storage in storages:
        unit = storage.unit
        line = "parameters" if unit.trainable else "frozen"
        if storage.placement.cuts_parameters:
            # What a freed unit's storage holds cannot be read off the storage where its pages come and go.
            ledger.add_bytes(line, storage.shard, unit.payload_within(storage.kept))
            if storage.resident:
                ledger.add_bytes("gathered", storage.whole)
        else:
            ledger.add(line, storage.whole, unit.payload_numel)
        if unit.trainable:
            own = gradients.units[unit.index]
            if own.cut or own.bucket is not None:
                ledger.add("gradients", own.memory, unit.payload_within(own.kept))
            if own.cut and own.bucket is not None:
                ledger.add("buckets", own.bucket)
        for flat in storage.flats:
            payload = unit.payload_within(Interval(flat.interval.start, flat.interval.stop))
            ledger.add("optimizer", flat.tensor, payload)
            for value in inner.state.get(flat.tensor, {}).values():
                if isinstance(value, Tensor):
                    if value.shape == flat.tensor.shape:
                        ledger.add("optimizer", value, payload)
                    else:
                        ledger.add("scalars", value)
    for bucket in gradients.pool.tensors():
        ledger.add("buckets", bucket)
    for buffer in model.buffers():
        ledger.add("buffers", buffer)
    return ledger.holdings


def traffic_of(counters: Counters, mesh: Mesh) -> TrafficReport:
    """A step's counters as a report."""
    operations = {
        operation_name(name, axis, mesh): Operation(tally.calls, tally.elements, tally.bytes)
        for (name, axis), tally in counters.by_operation.items()
    }
    return TrafficReport(operations, counters.received_bytes, counters.control_bytes, counters.control_calls)


def element_bytes(precision: Precision, states: OptimizerStates, *, averaged: bool) -> ElementBytes:
    """What an element takes in each role, for the formulas; `averaged` weights are one more state."""
    return ElementBytes(
        compute=precision.compute.itemsize,
        reduce=precision.reduce.itemsize,
        master=0 if precision.master == precision.compute else precision.master.itemsize,
        states=states.element_bytes + (precision.master.itemsize if averaged else 0),
        scalars=states.scalar_bytes,
        wire=None if precision.wire is None else precision.wire.itemsize,
    )
