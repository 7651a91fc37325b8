"""One unit's gradients: where they are collected in a backward pass, and where their sum over ranks is kept."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from zerokit.layout import Interval
from zerokit.runtime.collectives import Collectives, Work
from zerokit.runtime.storage import UnitState

_SMALL_BYTES = 1 << 20
"""On hosts, gradients of units up to this size wait for each other: the time of many small copies is Python's."""


class Phase(Enum):
    """The state of a unit in one backward pass."""

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

    def owns(self, bucket: Tensor) -> bool:
        """Whether `bucket` begins one of the pool's, which live as long as it does."""
        return bucket.data_ptr() in self._owned

    def tensors(self) -> list[Tensor]:
        """The buckets that are not lent: all of them between backward passes."""
        return list(self._free)


class UnitGradients:
    """The gradients of one unit."""

    def __init__(self, storage: UnitState, dtype: torch.dtype, wire: torch.dtype | None = None) -> None:
        """`wire` is the dtype in which they cross between ranks, where that is not `dtype`."""
        self.storage = storage
        self.wire = wire
        self.unit = storage.unit
        self.dtype = dtype
        self.placement = storage.placement
        self.updated = self.placement.updated(self.unit, storage.collectives.position)
        """What this rank updates of the unit, and so needs the summed gradients of."""
        self.kept = self.placement.gradients(self.unit, storage.collectives.position)
        """What this rank keeps of the unit's gradients after backward."""
        self.cut = self.placement.cuts_gradients
        """Whether that has memory of its own; else it is the bucket."""
        self.adds = self.cut and self.kept == storage.own
        """Whether sums over ranks are added there; else they arrive in the midst of what is summed."""
        self.phase = Phase.IDLE
        self.arrived: set[int] = set()
        """Positions of the parameters that have a gradient from this pass."""
        self.filled: set[int] = set()
        """Positions of those whose part of the bucket is filled."""
        self.batches = storage.collectives.runs_ahead or self.unit.numel * dtype.itemsize <= _SMALL_BYTES
        """Whether gradients wait until they can be copied into the bucket together."""
        self.waiting: dict[int, Tensor] = {}
        """Those gradients."""
        self.received: set[int] = set()
        """Positions of the parameters whose gradients have come since the last `forget`."""
        self.summed = False
        """Whether the shard holds a sum over ranks that later backward passes add to."""
        self.bucket: Tensor | None = None
        """Where gradients accumulate: lent, or kept at stages 0 and 1 and under `accumulate()`."""
        self._pieces: list[Tensor] = []
        """Views of the bucket, one a parameter, each in its parameter's shape."""
        self._lent: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        """Those of the pool's buckets, and the gaps between them, by address: these buckets live for ever."""
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
        if self.cut:
            self._sum = torch.zeros(self.kept.numel, dtype=dtype, device=storage.device)
        elif not self._lone:
            self.prepare_own()

    @property
    def shard(self) -> Tensor:
        """The memory of the sum over ranks of this rank's piece."""
        return self.of(self.storage.own)

    @property
    def memory(self) -> Tensor:
        """What this rank keeps."""
        memory = self.bucket if self._sum is None else self._sum
        assert memory is not None
        return memory

    def begin_pass(self) -> None:
        self.phase = Phase.IDLE
        self.arrived.clear()

    def prepare(self, pool: BucketPool) -> bool:
        """Take a bucket for the gradients of a pass. False when the pool has none left."""
        if self.bucket is None and not self.cut:
            self.prepare_own()
        elif self.bucket is None:
            self.bucket = pool.take(self.unit.numel)
            if self.bucket is None:
                return False
            self._zero_gaps(pool)
        if self.summed and not self.adds:
            # The shard lies inside what is about to be filled again.
            self.carry, self.summed = self.shard.clone(), False
        return True

    def prepare_own(self) -> None:
        """Allocate a bucket of this unit's own, to hold whole gradients over several backward passes."""
        if self.bucket is None:
            self.bucket = torch.zeros(self.unit.numel, dtype=self.dtype, device=self.storage.device)
            self._pieces = self._divide(self.bucket)

    def _divide(self, bucket: Tensor) -> list[Tensor]:
        return [
            bucket[part.memory.start : part.memory.stop].view(part.parameter.shape)
            for part in self.unit.slices
        ]

    def _zero_gaps(self, pool: BucketPool) -> None:
        """Make the views of a bucket that was just lent, and clear what no gradient will fill."""
        assert self.bucket is not None
        known = self._lent.get(self.bucket.data_ptr())
        if known is None:
            gaps = [self.bucket[gap.start : gap.stop] for gap in self.unit.gaps()]
            known = self._divide(self.bucket), gaps
            if pool.owns(self.bucket):
                self._lent[self.bucket.data_ptr()] = known
        self._pieces, gaps = known
        for gap in gaps:
            gap.zero_()

    def fill_waiting(self, factor: float) -> None:
        """Take the gradients that wait, times `factor`, into the bucket."""
        first = [position for position in self.waiting if position not in self.filled]
        later = [position for position in self.waiting if position in self.filled]
        if first:
            pieces = [self._pieces[position] for position in first]
            torch._foreach_copy_(pieces, [self.waiting[position] for position in first])
            if factor != 1.0 and len(first) == len(self._pieces):
                assert self.bucket is not None
                self.bucket.mul_(factor)
            elif factor != 1.0:
                torch._foreach_mul_(pieces, factor)
        if later:
            pieces = [self._pieces[position] for position in later]
            gradients = [self.waiting[position] for position in later]
            if gradients[0].dtype != self.dtype:  # they would be added one by one
                wide = [torch.empty_like(piece) for piece in pieces]
                torch._foreach_copy_(wide, gradients)
                gradients = wide
            torch._foreach_add_(pieces, gradients, alpha=factor)
        self.filled.update(first)
        self.waiting.clear()

    def fill(self, position: int, gradient: Tensor, factor: float) -> None:
        """Take parameter number `position`'s gradient, times `factor`, into the bucket."""
        target = self._pieces[position]
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
        self._pieces = self._divide(self.bucket)
        self.filled.add(0)

    def complete_with_zeros(self) -> None:
        if len(self.filled) < len(self._pieces):
            for position, piece in enumerate(self._pieces):
                if position not in self.filled:
                    piece.zero_()

    def reduce(self, collectives: Collectives, factor: float) -> Work:
        """Hand the bucket, times `factor`, to the collectives."""
        assert self.bucket is not None
        self.complete_with_zeros()
        if factor != 1.0:
            self.bucket.mul_(factor)
        self.phase = Phase.REDUCING
        between = None if self.adds else self._sum
        return collectives.reduce_scatter(
            self.unit, self.bucket, self.shard, between=between, add=self.summed and self.adds, wire=self.wire
        )

    def finish(self, pool: BucketPool) -> None:
        """The sum has arrived in the shard."""
        assert self.bucket is not None
        if self.carry is not None:
            self.shard.add_(self.carry)
            self.carry = None
        self.summed = True
        self.filled.clear()
        if self.cut:
            pool.give(self.bucket)
            self._drop()

    def _drop(self) -> None:
        self.bucket, self._pieces = None, []

    def forget(self, pool: BucketPool) -> None:
        """Drop all gradients; memory that is kept stays."""
        self.summed, self.carry = False, None
        self.begin_pass()
        self.filled.clear()
        self.waiting.clear()
        self.received.clear()
        if self._lone and not self.cut:
            self._drop()
        elif self.cut and self.bucket is not None:
            pool.give(self.bucket)
            self._drop()

    def clear(self, position: int) -> None:
        """Let the gradient of one parameter be zero, wherever it is kept between backward passes."""
        part = self.unit.slices[position]
        if self.bucket is not None:
            self.bucket[part.memory.start : part.memory.stop].zero_()
        if self.cut:
            self.of(part.memory.intersection(self.kept)).zero_()
        if self.carry is not None:
            own = part.memory.intersection(self.storage.own).shifted(-self.storage.own.start)
            self.carry[own.start : own.stop].zero_()

    def of(self, interval: Interval) -> Tensor:
        """The gradients of elements `interval` (memory coordinates) of the unit."""
        return self.memory[interval.start - self.kept.start : interval.stop - self.kept.start]
