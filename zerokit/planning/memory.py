"""A rank's peak memory by kind: what it holds between steps, and what a step adds.

What is held between steps comes from `zerokit.formulas`, which `ZeroOptimizer.predicted_memory` uses as well; gathered
units and buckets from a `Replay`; activations from a `ModelTrace`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from zerokit.formulas import KIND_OF_LINE, MEMORY_KINDS, MemoryReport, Pool, list_held, predict_memory
from zerokit.layout import Layout
from zerokit.owners import Owners
from zerokit.placement import AnyPlacement, Mesh
from zerokit.planning.recording import ModelTrace
from zerokit.planning.replay import Replay, Step
from zerokit.planning.work import MATRICES
from zerokit.runtime.measure import element_bytes
from zerokit.runtime.precision import Precision
from zerokit.runtime.trials import OptimizerStates, probe
from zerokit.sizes import ELSEWHERE, ElementBytes, Wholes

CONTEXT_BYTES = 500_000_000
"""What CUDA itself takes of a device for one process: about 0.5 GB on an H100 (pytorch/torchcomms#777)."""

COMMUNICATOR_BYTES = 600_000_000
"""What one of NCCL's communicators with all channels takes: 544 to 688 MB on A100s with NVLink (nccl#964)."""


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The bytes on the rank with the most.

    Attributes:
        held: between backward and step, as `ZeroOptimizer.predicted_memory()` has it.
        peak: when the most is held at once, by kind (`MEMORY_KINDS`), padding included; their sum is `total`.
        highest: the most of each kind, at whatever time.
        gathered: of `peak["parameters"]`, units that are gathered for the time being.
        context: what CUDA and NCCL take for themselves, outside torch's allocator; 0 on hosts.
    """

    held: MemoryReport
    peak: dict[str, int]
    highest: dict[str, int]
    gathered: int
    context: int

    @property
    def total(self) -> int:
        """The peak of torch's allocated memory."""
        return sum(self.peak.values())

    @property
    def away(self) -> int:
        """Masters and states that are on the host or on a disk between steps."""
        return self.held.host + self.held.disk

    @property
    def needed(self) -> int:
        """The memory that the device must have."""
        return self.total + self.context


def context_bytes(mesh: Mesh) -> int:
    """What CUDA and NCCL take of a device for a rank of this mesh, outside torch's allocator.

    There is one communicator each for gathers and reductions on one axis; on two axes one for both over the outer axis
    besides, and one between all ranks. The one for control values is small on one axis.
    """
    if mesh.world == 1:
        return CONTEXT_BYTES
    return CONTEXT_BYTES + COMMUNICATOR_BYTES * (4 if mesh.outer > 1 else 2)


def lacking_bytes(memory: PlannedMemory, room_bytes: int | None, away_room_bytes: int | None) -> int:
    """The bytes that the device lacks, or else the host or disk; 0 if it fits, or the room is unknown."""
    lacks = 0 if room_bytes is None else memory.needed - room_bytes
    if lacks <= 0 and away_room_bytes is not None:
        lacks = memory.away - away_room_bytes
    return max(0, lacks)


@cache
def adamw_states(master: torch.dtype) -> OptimizerStates:
    """AdamW's state for a flat parameter, measured as in the runtime."""
    return probe(torch.optim.AdamW, {}, master)


def element_sizes(
    precision: Precision, optimizer: str, layout: Layout, placement: AnyPlacement, home: str = "device"
) -> ElementBytes:
    """Bytes per element in each role, with AdamW; with "muon" the `MATRICES` have one momentum, on their owners.

    Masters and states have this `home` between steps.
    """
    size = precision.master.itemsize
    sizes = replace(element_bytes(precision, adamw_states(precision.master), averaged=False), home=home)
    if home == "fp8":
        sizes = replace(sizes, moments=(size, size))
    if optimizer == "adamw":
        return sizes
    wholes = Wholes(
        Owners(layout, placement, [MATRICES]),
        lambda group, shape: (size * math.prod(shape), 0),
        lambda group, shape: (size,) * (home == "fp8"),
    )
    return replace(sizes, wholes=wholes)


def fullest_rank(step: Step) -> int:
    """The rank that holds most: of all, the first one or the one that owns most; of the step's own ranks, any."""
    mesh, wholes = step.placement.mesh, step.sizes.wholes
    if wholes is None and not step.ranks:
        return 0
    owned = (
        wholes.owners.sums(lambda tensor: tensor.interval.numel) if wholes is not None else [0] * mesh.world
    )
    if not step.ranks:
        return mesh.rank(max(range(mesh.world), key=owned.__getitem__))
    held = np.array(owned) * (step.sizes.master + step.sizes.states) + _cut_bytes(step)
    return max(step.ranks, key=lambda rank: (held[mesh.position(rank)], -rank))


def _cut_bytes(step: Step) -> NDArray[np.int64]:
    """What each rank holds of all that is not updated whole, padding included, by position.

    Ranks of the same share differ by the alignment of cuts, and by the numbers that states have for each group.
    """
    sizes, world = step.sizes, step.placement.mesh.world
    masters = 0 if sizes.wholes is not None else sizes.master + sizes.states
    held = np.zeros(world, dtype=np.int64)
    for unit in step.layout.units:
        columns = {"parameters": sizes.of_unit(unit.index).compute}
        if unit.trainable:
            columns |= {"gradients": sizes.reduce, "optimizer": masters}
        for column, size in columns.items():
            cut = step.placement.of_unit(unit.index).cut_of(column, unit)
            nbytes = np.diff(cut.bounds) * size
            if column == "optimizer" and masters:
                nbytes += [
                    sum(sizes.of_group(group).scalars for group, _ in unit.groups_within(cut.piece(number)))
                    for number in range(len(cut))
                ]
            held += np.repeat(nbytes, world // len(cut))
    return held


class StepMemory:
    """The memory of a step of `accumulate` micro-batches, whose gradients are reduced in the last one.

    Computed once for all sizes of a micro-batch: they differ in activations alone.
    """

    def __init__(self, trace: ModelTrace, step: Step, *, accumulate: int = 1) -> None:
        placement, layout = step.placement, step.layout
        self._context = context_bytes(placement.mesh) if step.on_cuda else 0
        buffers = trace.buffer_bytes
        rank = fullest_rank(step)
        self._held = predict_memory(layout, rank=rank, placement=placement, sizes=step.sizes, buffers=buffers)
        replay = Replay(trace, step)
        self._fixed = dict.fromkeys(MEMORY_KINDS, 0)
        for one in list_held(layout, rank=rank, placement=placement, sizes=step.sizes):
            if (
                one.line == "gradients"
                and not placement.of_unit(one.unit).cuts_gradients
                and replay.is_lone(layout.units[one.unit])
            ):
                continue  # its memory is autograd's own, which comes with the gradient
            if one.line in ELSEWHERE:
                continue
            self._fixed[KIND_OF_LINE[one.line]] += one.numel * one.element_bytes
        pool = Pool.of(layout, placement)
        buckets = pool.buckets * pool.numel * step.sizes.reduce
        self._fixed["buffers and buckets"] += buckets + buffers
        # Micro-batches differ in what they hold: the first, those in the middle, and the last.
        passes = [True] * min(accumulate - 1, 2) + [False]
        readings = [one for accumulating in passes for one in replay.run(accumulating=accumulating)]
        self._events = np.array([one.event for one in readings])
        self._momentary = np.array([one.momentary for one in readings])
        self._starts = np.array([event.sample for event in trace.events])
        self._held_then = np.array([one.held for one in readings], dtype=np.int64)

    def of(self, trace: ModelTrace) -> PlannedMemory:
        """The memory with the activations of `trace`, which has the structure of the one given before."""
        now = trace.levels[self._starts][self._events]
        until_next = np.maximum.reduceat(trace.levels, self._starts)[self._events]
        by_kind = self._held_then.copy()
        by_kind[:, -1] += np.where(self._momentary, now, until_next)
        at = int(by_kind.sum(axis=1).argmax())
        fixed = np.array([self._fixed[kind] for kind in MEMORY_KINDS])
        # In the update no activations are left. What is on its way to owners and back is not held between steps either,
        # nor are the buffers of states that visit.
        passing = {MEMORY_KINDS[-1]: self._held.exchange, KIND_OF_LINE["optimizer"]: self._held.visiting}
        update = np.array([passing.get(kind, 0) for kind in MEMORY_KINDS], dtype=np.int64)
        most = by_kind[at] if by_kind[at].sum() >= update.sum() else update
        peak, highest = fixed + most, fixed + np.maximum(by_kind.max(axis=0), update)
        return PlannedMemory(
            self._held,
            dict(zip(MEMORY_KINDS, peak.tolist(), strict=True)),
            dict(zip(MEMORY_KINDS, highest.tolist(), strict=True)),
            int(self._held_then[at, 0]) if most is not update else 0,
            self._context,
        )
