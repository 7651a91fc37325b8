"""Measures a rank's memory by summing live storages; the counterpart of `zerokit.formulas`."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from zerokit.formulas import MemoryReport, TrafficReport, padding_line, predict_memory, predict_traffic
from zerokit.layout import Layout
from zerokit.owners import Shape
from zerokit.runtime.build import Runtime
from zerokit.runtime.masters import WholeMaster
from zerokit.runtime.precision import FLOATING, Precision
from zerokit.runtime.trials import OptimizerStates, tensors_in
from zerokit.runtime.use import State
from zerokit.schedule import Kind
from zerokit.sizes import ElementBytes, StateBytes, Wholes


@dataclass(frozen=True, slots=True)
class Holding:
    """The bytes of one tensor, with its line in `MemoryReport`."""

    line: str
    tensor: Tensor
    used: int
    padding: int


def measure_memory(runtime: Runtime) -> MemoryReport:
    """The bytes of every storage of the runtime, the optimizer and the model's buffers on this rank."""
    lines = MemoryReport().as_dict()
    for one in list_holdings(runtime):
        lines[one.line] += one.used
        lines[padding_line(one.line)] += one.padding
    most = {
        "transient": runtime.gradients.transient,
        "exchange": runtime.wholes.most,
        "visiting": runtime.home.most,
    }
    return MemoryReport(**lines | most)


def predicted_memory(
    runtime: Runtime, *, averaged: bool, rank: int | None = None, layout: Layout | None = None
) -> MemoryReport:
    """What `measure_memory` gives after the first step, from the layout alone: also of other ranks and layouts."""
    sizes = _sizes(runtime, averaged=averaged)
    if layout is not None and sizes.wholes is not None:
        sizes = replace(sizes, wholes=replace(sizes.wholes, owners=runtime.owners.under(layout)))
    return predict_memory(
        runtime.layout if layout is None else layout,
        rank=runtime.collectives.rank if rank is None else rank,
        placement=runtime.placement,
        sizes=sizes,
        buffers=sum(buffer.untyped_storage().nbytes() for buffer in runtime.model.buffers()),
        reductions=runtime.engine.order.backward.units(Kind.REDUCE),
    )


def predicted_traffic(
    runtime: Runtime, *, averaged: bool, micro_batches: int, reductions: int
) -> TrafficReport:
    """The traffic of a step that the layout predicts."""
    return predict_traffic(
        runtime.layout,
        placement=runtime.placement,
        sizes=_sizes(runtime, averaged=averaged),
        order=runtime.engine.order,
        micro_batches=micro_batches,
        reductions=reductions,
    )


def list_holdings(runtime: Runtime) -> list[Holding]:
    """The tensors that `measure_memory` adds up."""
    holdings: list[Holding] = []
    seen: set[int] = set()
    away = {id(tensor) for unit in runtime.units for tensor in runtime.home.away(unit)}

    def add(line: str, tensor: Tensor, payload: int | None = None, *, elements: bool = False) -> None:
        """Count `tensor`'s storage, once, or its `elements`, under `line`; `payload` of them are not padding."""
        if (coded := runtime.home.coded(tensor)) is not None:
            padding = 0 if payload is None else tensor.numel() - payload
            holdings.append(Holding(line, tensor, coded.nbytes - padding, padding))
            return
        if id(tensor) in away:
            line, elements = runtime.home.name, True
        storage = tensor.untyped_storage()
        held = tensor.nbytes if elements else storage.nbytes()
        if elements or (held and storage.data_ptr() not in seen):
            seen.add(storage.data_ptr())
            used = held if payload is None else payload * tensor.element_size()
            holdings.append(Holding(line, tensor, used, held - used))

    for state in runtime.units:
        unit = state.unit
        line = "parameters" if unit.trainable else "frozen"
        if state.comes_and_goes:
            # What a freed unit's storage holds cannot be read off the storage where its pages come and go.
            add(line, state.kept.tensor, state.kept.payload_numel, elements=True)
            if state.state is not State.FREED:
                add("gathered", state.whole.tensor, elements=True)
        else:
            add(line, state.whole.tensor, unit.payload_numel)
        if unit.trainable:
            own = runtime.gradients.units[unit.index]
            if own.cut or own.bucket is not None:
                add("gradients", own.held.tensor, own.held.payload_numel)
            if own.cut and own.bucket is not None:
                add("buckets", own.bucket.memory)
        for master in state.masters:
            payload = master.payload_numel
            add("optimizer", master.tensor, payload)
            if isinstance(master, WholeMaster):
                for value in tensors_in(runtime.inner.state.get(master.tensor, {})):
                    add("optimizer" if value.dim() else "scalars", value, elements=True)
                continue
            for value in runtime.inner.state.get(master.tensor, {}).values():
                if isinstance(value, Tensor):
                    elementwise = value.shape == master.tensor.shape
                    add("optimizer" if elementwise else "scalars", value, payload if elementwise else None)
    for bucket in runtime.gradients.pool.free:
        add("buckets", bucket)
    for buffer in runtime.model.buffers():
        add("buffers", buffer)
    return holdings


def _sizes(runtime: Runtime, *, averaged: bool) -> ElementBytes:
    """Bytes per element, with those of units that compute in another dtype than the rest."""
    precision = runtime.precision
    average, home = precision.master.itemsize if averaged else 0, runtime.home.name
    coded = (torch.float32.itemsize,) if home == "fp8" else ()
    flat = {
        number: StateBytes(states.element_bytes + average, states.scalar_bytes, coded * states.moments)
        for number, states in enumerate(runtime.states)
        if states.whole is None
    }

    def states_of(group: int, shape: Shape) -> tuple[int, int]:
        whole = runtime.states[group].whole
        assert whole is not None
        every, single = whole.nbytes(shape)
        return every + average * math.prod(shape), single + (0 if shape else average)

    def moments_of(group: int, shape: Shape) -> tuple[int, ...]:
        whole = runtime.states[group].whole
        assert whole is not None
        return coded * whole.moments(shape)

    wholes = Wholes(runtime.owners, states_of, moments_of) if runtime.owners else None
    of = partial(element_bytes, states=runtime.states[0], averaged=averaged)
    differing = {
        unit.index: of(replace(precision, compute=unit.dtype))
        for unit in runtime.units
        if unit.dtype != precision.compute and unit.dtype in FLOATING
    }
    return replace(of(precision), differing=differing, groups=flat, wholes=wholes, home=home)


def element_bytes(precision: Precision, states: OptimizerStates, *, averaged: bool) -> ElementBytes:
    """Bytes per element in each role, for the formulas; `averaged` weights are one more state."""
    return ElementBytes(
        compute=precision.compute.itemsize,
        reduce=precision.reduce.itemsize,
        master=0 if precision.master == precision.compute else precision.master.itemsize,
        states=states.element_bytes + (precision.master.itemsize if averaged else 0),
        scalars=states.scalar_bytes,
        wire=precision.wire.itemsize if isinstance(precision.wire, torch.dtype) else precision.blocks,
    )
