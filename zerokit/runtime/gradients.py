"""Gradients: from autograd into flat buckets, over the ranks, into shards.

    stage 0, 1   one whole bucket a unit, kept; the sum over ranks stands in this rank's piece of it (and, at
                 stage 0, is gathered to all pieces)
    stage 2, 3   one shard a unit, kept; buckets are lent by a small pool while a unit's gradients arrive

A gradient is multiplied by 1/N while it is copied into its bucket (that of a unit of one unpadded parameter, made by
autograd, is the bucket), and N ranks' buckets are then summed in rank order. Units are reduced in one order on every
rank. At stage 3 it is part of the order of gathers (see order's [Note: one order]); at the others it is reversed line
order in the first backward, in which rank 0 records the order in which its units became complete. A unit that is
incomplete at the end of backward is reduced with zeros in place of what is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

import torch
from torch import Tensor, nn

from zerokit.errors import ScheduleError
from zerokit.formulas import pooled_buckets
from zerokit.layout import Interval
from zerokit.runtime.collectives import Collectives, Work
from zerokit.runtime.storage import Flat, FlatUnit

_MOST_IN_FLIGHT = 3
"""Reductions at a time where no pool limits them: each has memory for what arrives."""


class Phase(Enum):
    """A unit's way through one backward pass."""

    IDLE = "no gradient yet"
    FILLING = "some gradients have arrived"
    COMPLETE = "all gradients have arrived"
    REDUCING = "handed to the collectives"


class BucketPool:
    """A few buckets lent in turn; units larger than these borrow memory for as long as they are in flight."""

    def __init__(self, fitting: Sequence[int], count: int, dtype: torch.dtype, device: torch.device) -> None:
        """`fitting` lists the elements of the units that the pool's `count` buckets serve."""
        self.numel = max(fitting, default=0)
        self._dtype, self._device = dtype, device
        self._free = [
            torch.empty(self.numel, dtype=dtype, device=device) for _ in range(min(count, len(fitting)))
        ]
        self._owned = {bucket.data_ptr(): bucket for bucket in self._free}

    def take(self, numel: int) -> Tensor | None:
        """A bucket of `numel` elements with arbitrary contents; None while all are lent."""
        if numel > self.numel:
            return torch.empty(numel, dtype=self._dtype, device=self._device)
        return self._free.pop()[:numel] if self._free else None

    def give(self, bucket: Tensor) -> None:
        whole = self._owned.get(bucket.data_ptr())
        if whole is not None:
            self._free.append(whole)

    def tensors(self) -> list[Tensor]:
        """The buckets that are not lent: all of them between backward passes."""
        return list(self._free)


class UnitGradients:
    """The gradients of one unit."""

    def __init__(self, storage: FlatUnit, dtype: torch.dtype, *, whole: bool, gather: bool) -> None:
        self.storage = storage
        self.unit = storage.unit
        self.dtype = dtype
        self.whole = whole
        self.gather = gather
        self.phase = Phase.IDLE
        self.arrived: set[int] = set()
        """Positions of the parameters whose gradients this pass has brought."""
        self.filled: set[int] = set()
        """Positions of those whose place in the bucket holds something."""
        self.summed = False
        """Whether the shard holds a sum over ranks that later backward passes add to."""
        self.bucket: Tensor | None = None
        """Where gradients accumulate: lent, or kept at stages 0 and 1 and under `accumulate()`."""
        self.carry: Tensor | None = None
        self._lone = (
            len(storage.parameters) == 1
            and self.unit.payload_numel == self.unit.numel
            and storage.dtype == dtype
            and storage.device.type == "cpu"
        )
        """Whether autograd's own tensor can serve as the bucket: a unit of one unpadded parameter."""
        # Made at once: made in the first backward, they would lie between activations and fragment the heap.
        self._sum: Tensor | None = None
        if not whole:
            self._sum = torch.zeros(self.unit.shard_numel, dtype=dtype, device=storage.device)
        elif not self._lone:
            self.prepare_own()

    @property
    def shard(self) -> Tensor:
        """Where the sum over ranks of this rank's piece stands, or is to stand."""
        if self._sum is not None:
            return self._sum
        assert self.bucket is not None
        return self.bucket[self.storage.own.start : self.storage.own.stop]

    def begin_pass(self) -> None:
        self.phase = Phase.IDLE
        self.arrived.clear()

    def prepare(self, pool: BucketPool) -> bool:
        """Have a bucket for the gradients of a pass. False when the pool has none left."""
        if self.bucket is None and self.whole:
            self.prepare_own()
        elif self.bucket is None:
            self.bucket = pool.take(self.unit.numel)
            if self.bucket is None:
                return False
            for gap in self.unit.gaps():
                self.bucket[gap.start : gap.stop].zero_()
        if self.whole and self.summed:
            # The shard lies inside the bucket that is about to be filled again.
            self.carry, self.summed = self.shard.clone(), False
        return True

    def prepare_own(self) -> None:
        """Have a bucket of this unit's own, to hold whole gradients over several backward passes."""
        if self.bucket is None:
            self.bucket = torch.zeros(self.unit.numel, dtype=self.dtype, device=self.storage.device)

    def fill(self, position: int, gradient: Tensor, factor: float) -> None:
        """Take parameter number `position`'s gradient, times `factor`, into the bucket."""
        assert self.bucket is not None
        part = self.unit.slices[position]
        target = self.bucket[part.offset : part.offset + part.parameter.numel].view(part.parameter.shape)
        if position in self.filled:
            target.add_(gradient, alpha=factor)
        elif gradient.dtype == self.dtype:
            torch.mul(gradient, factor, out=target)
        else:
            target.copy_(gradient).mul_(factor)
        self.filled.add(position)

    def may_steal(self, gradient: Tensor) -> bool:
        """Whether `gradient` itself can serve as the bucket: no copy, and no second piece of memory."""
        return (
            self._lone and self.bucket is None and gradient.dtype == self.dtype and gradient.is_contiguous()
        )

    def steal(self, gradient: Tensor, factor: float) -> None:
        self.bucket = gradient.detach().view(-1).mul_(factor)
        self.filled.add(0)

    def complete_with_zeros(self) -> None:
        assert self.bucket is not None
        for position, part in enumerate(self.unit.slices):
            if position not in self.filled:
                self.bucket[part.offset : part.offset + part.parameter.numel].zero_()

    def reduce(self, collectives: Collectives) -> Work:
        """Hand the bucket to the collectives."""
        assert self.bucket is not None
        self.complete_with_zeros()
        self.phase = Phase.REDUCING
        add = self.summed and not self.whole
        return collectives.reduce_scatter(
            self.bucket, self.shard, self.unit.index, self.storage.payload, add=add
        )

    def finish(self, pool: BucketPool) -> None:
        """The sum has arrived in the shard."""
        assert self.bucket is not None
        if self.carry is not None:
            self.shard.add_(self.carry)
            self.carry = None
        self.summed = True
        self.filled.clear()
        if not self.whole:
            pool.give(self.bucket)
            self.bucket = None

    def forget(self, pool: BucketPool) -> None:
        """Drop all gradients; memory that is kept stays."""
        self.summed, self.carry = False, None
        self.begin_pass()
        self.filled.clear()
        if self.whole and self._lone:
            self.bucket = None
        elif not self.whole and self.bucket is not None:
            pool.give(self.bucket)
            self.bucket = None

    def clear(self, position: int) -> None:
        """Let the gradient of one parameter be zero, wherever it stands between backward passes."""
        part = self.unit.slices[position]
        if self.bucket is not None:
            self.bucket[part.memory.start : part.memory.stop].zero_()
        if not self.whole:
            own = part.memory.intersection(self.storage.own).shifted(-self.storage.own.start)
            self.shard[own.start : own.stop].zero_()
        if self.carry is not None:
            own = part.memory.intersection(self.storage.own).shifted(-self.storage.own.start)
            self.carry[own.start : own.stop].zero_()

    def of(self, interval: Interval) -> Tensor:
        """The gradients of elements `interval` (memory coordinates) of the unit."""
        if self.whole:
            assert self.bucket is not None
            return self.bucket[interval.start : interval.stop]
        own = self.storage.own.start
        return self.shard[interval.start - own : interval.stop - own]


class Gradients:
    """All units' gradients and the one order in which they are reduced."""

    def __init__(
        self,
        storages: Sequence[FlatUnit],
        collectives: Collectives,
        dtype: torch.dtype,
        *,
        stage: int,
        fitting: Sequence[int],
    ) -> None:
        self.units = {
            storage.unit.index: UnitGradients(storage, dtype, whole=stage < 2, gather=stage == 0)
            for storage in storages
            if storage.unit.trainable
        }
        self._collectives = collectives
        self._factor = 1.0 / collectives.world
        count = pooled_buckets(stage)
        self.pool = BucketPool(fitting if count else (), count, dtype, collectives.device)
        self._most_in_flight = count or _MOST_IN_FLIGHT
        # Before it is recorded, units of the rest come last: where they are used is not known.
        self.order = sorted(
            self.units, key=lambda index: (bool(self.units[index].unit.scopes), index), reverse=True
        )
        self._allowed = len(self.order)
        self.over: Callable[[int], bool] = lambda index: False
        """Whether the current backward pass will bring no more gradients to a unit."""
        self.recorded = False
        self.accumulating = False
        self.spoiled = False
        """Whether a failed backward pass has left sums of earlier ones that nobody can separate from it."""
        self._cleared: set[tuple[int, int]] = set()
        self._completed: list[int] = []
        self._next = 0
        self._reductions: deque[tuple[UnitGradients, Work]] = deque()
        self._gathers: list[Work] = []
        self.received = False
        """Whether a backward pass has brought any gradient since the last `forget`."""

    def accept(self, index: int, position: int, parameter: nn.Parameter) -> None:
        """Take `parameter.grad`, which has just become ready, and reduce every unit that this completes."""
        unit = self.units[index]
        unit.storage.unguard()
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        gradient = gradient.detach()  # backward(create_graph=True) gives it a graph
        if unit.phase in (Phase.COMPLETE, Phase.REDUCING):
            raise ScheduleError(
                f"a gradient for {unit.unit.parameters[position].name} came after its unit had been reduced in this "
                "backward pass. Reentrant activation checkpointing does that: use torch.utils.checkpoint with "
                "use_reentrant=False. So does a module that this rank uses elsewhere than rank 0 did first: name it "
                "in units="
            )
        if gradient.layout != torch.strided:
            raise ScheduleError(
                f"the gradient of {unit.unit.parameters[position].name} is "
                f"{gradient.layout}, but flat buckets are dense: "
                "build the embedding with sparse=False"
            )
        self.received = True
        if self._cleared:
            self._cleared.clear()
        unit.phase = Phase.FILLING
        if self.accumulating:
            if not unit.whole:
                unit.prepare_own()
            self._prepare(unit)
            unit.fill(position, gradient, self._factor)
            return
        if unit.may_steal(gradient):
            unit.steal(gradient, self._factor)
        else:
            self._prepare(unit)
            unit.fill(position, gradient, self._factor)
        unit.arrived.add(position)
        if len(unit.arrived) == len(unit.storage.parameters):
            self._complete(unit)

    def follow(self, order: Sequence[int]) -> None:
        """Reduce in this order in the backward pass that begins, as far as `allow` says."""
        if not self._next:
            self.order = list(order)
            self._allowed = 0

    def allow(self, count: int) -> None:
        """The first `count` reductions may be issued, once they are complete."""
        self._allowed = count
        if not self.accumulating:
            self._issue()

    def reduce_due(self, count: int) -> None:
        """Issue the first `count` reductions, with zeros for gradients that will not come any more.

        Without this a rank on which a gradient is missing would hold back its reductions until the end of backward,
        while others wait for them before they issue the gather that this rank waits for. Stops at a unit whose
        gradients may still come: then all ranks must do the same.
        """
        while not self.accumulating and self._next < min(count, len(self.order)):
            index = self.order[self._next]
            if self.units[index].phase is not Phase.COMPLETE and not self.over(index):
                return
            self._issue_next()

    def end_backward(self) -> None:
        """Reduce what is left, with zeros for what never came, and wait for everything."""
        if not self.accumulating:
            while self._next < len(self.order):
                self._issue_next()
            while self._reductions:
                self._finish_oldest()
            for gather in self._gathers:
                gather.wait()
            self._gathers.clear()
            self._collectives.settle()
        self._next = 0
        for unit in self.units.values():
            unit.begin_pass()

    @property
    def pending(self) -> bool:
        """Whether some gradients wait in whole buckets, not summed over ranks yet (after `accumulate()`)."""
        return any(unit.filled for unit in self.units.values())

    @property
    def summed(self) -> bool:
        """Whether the shards hold sums over ranks."""
        return all(unit.summed for unit in self.units.values())

    def forget(self) -> None:
        """Wait for what is in flight and drop all gradients."""
        while self._reductions:
            _, work = self._reductions.popleft()
            work.wait()
        for gather in self._gathers:
            gather.wait()
        self._gathers.clear()
        self._collectives.settle()
        for unit in self.units.values():
            unit.forget(self.pool)
        self._next = 0
        self.received = self.spoiled = False
        self._cleared.clear()

    def clear(self, index: int, position: int) -> None:
        """Forget the gradient of one parameter; all gradients, when this was the last one."""
        self.units[index].clear(position)
        self._cleared.add((index, position))
        if len(self._cleared) == sum(len(unit.storage.parameters) for unit in self.units.values()):
            self.forget()

    def holds(self, index: int, position: int) -> bool:
        """Whether there is a gradient of this parameter, as far as this rank knows."""
        return self.received and index in self.units and (index, position) not in self._cleared

    def complete_units(self) -> list[int]:
        """Units whose gradients have all arrived in this backward pass."""
        return [i for i, unit in self.units.items() if unit.phase in (Phase.COMPLETE, Phase.REDUCING)]

    def completed_order(self) -> list[int]:
        """The order in which units became complete on this rank, every trainable unit once."""
        first = dict.fromkeys(self._completed)
        return [*first, *(index for index in self.order if index not in first)]

    def adopt_order(self, order: Sequence[int]) -> None:
        self.order = list(order)
        self.recorded = True
        self._completed.clear()

    def shards(self) -> list[Tensor]:
        """This rank's piece of every unit's gradient, in line order."""
        return [unit.of(unit.storage.own) for unit in self.units.values()]

    def of(self, storage: FlatUnit, flat: Flat) -> Tensor:
        """The gradient of what the optimizer updates."""
        return self.units[storage.unit.index].of(flat.interval)

    def scaled(self) -> list[Tensor]:
        """Every tensor that a common factor must be applied to."""
        return [
            unit.of(Interval(0, unit.unit.numel) if unit.gather else unit.storage.own)
            for unit in self.units.values()
        ]

    def clear_padding(self) -> None:
        """After a factor that is not finite: zero times it is nan, and whole buckets keep their padding."""
        for unit in self.units.values():
            if unit.whole and unit.bucket is not None:
                for gap in unit.unit.gaps():
                    unit.bucket[gap.start : gap.stop].zero_()

    def _prepare(self, unit: UnitGradients) -> None:
        while not unit.prepare(self.pool):
            if self._reductions:
                self._finish_oldest()
            else:
                # Both buckets wait for a unit that comes earlier in the order: this one needs memory of its own.
                unit.prepare_own()

    def _complete(self, unit: UnitGradients) -> None:
        unit.phase = Phase.COMPLETE
        if not self.recorded:
            self._completed.append(unit.unit.index)
        self._issue()

    def _issue(self) -> None:
        stop = min(self._allowed, len(self.order))
        while self._next < stop and self.units[self.order[self._next]].phase is Phase.COMPLETE:
            self._issue_next()

    def _issue_next(self) -> None:
        unit = self.units[self.order[self._next]]
        self._prepare(unit)
        while len(self._reductions) >= self._most_in_flight:
            self._finish_oldest()
        self._reductions.append((unit, unit.reduce(self._collectives)))
        self._next += 1

    def _finish_oldest(self) -> None:
        unit, work = self._reductions.popleft()
        work.wait()
        unit.finish(self.pool)
        if unit.gather:
            assert unit.bucket is not None
            self._gathers.append(
                self._collectives.all_gather(unit.bucket, unit.unit.index, unit.storage.payload)
            )
