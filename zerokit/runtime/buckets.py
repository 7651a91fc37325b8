"""One unit's gradients: the bucket that collects them in backward, and the shard that keeps their sum over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zerokit.layout import Interval
from zerokit.runtime.collectives import Wire, Work
from zerokit.runtime.guard import hooked, show_gradient, shown_gradient
from zerokit.runtime.hooks import excluded_from_graphs
from zerokit.runtime.unit import UnitState, unit_views

SMALL_BYTES = 1 << 20
"""On hosts, gradients of units up to this size wait for each other: the time of many small copies is Python's."""


class BucketPool:
    """At most `count` buckets for units of so many elements as `fitting` lists; larger ones allocate their own."""

    def __init__(self, fitting: Sequence[int], count: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel = max(fitting, default=0)
        self._dtype, self._device = dtype, device
        self.free = [
            torch.empty(self.numel, dtype=dtype, device=device) for _ in range(min(count, len(fitting)))
        ]
        """The buckets that are not lent: all of them between backward passes."""
        self.owned = {bucket.data_ptr(): bucket for bucket in self.free}  # all of them, by address

    def take(self, numel: int) -> Tensor | None:
        """A bucket of `numel` elements with arbitrary contents; None while all are in use."""
        if numel > self.numel:
            return torch.empty(numel, dtype=self._dtype, device=self._device)
        return self.free.pop()[:numel] if self.free else None

    def give(self, bucket: Tensor) -> None:
        whole = self.owned.get(bucket.data_ptr())
        if whole is not None:
            self.free.append(whole)


class UnitGradients:
    """The gradients of one unit, summed in `dtype`; they cross between ranks on `wire`, if one is given."""

    def __init__(self, state: UnitState, dtype: torch.dtype, wire: Wire | None, pool: BucketPool) -> None:
        self.state, self.unit, self.dtype = state, state.unit, dtype
        self._wire, self._pool = wire, pool
        self.kept = state.placement.gradients(self.unit, state.collectives.position)
        """What this rank keeps of the unit's gradients after backward."""
        self.cut = state.placement.cuts_gradients
        """Whether that has memory of its own; else it is the bucket."""
        self._adds = self.cut and self.kept == state.own
        """Whether sums over ranks are added there; else they arrive in the midst of what is summed."""
        self.complete = False  # whether all gradients of this backward pass have arrived
        self.reduced = False  # whether this backward pass has handed the bucket to the collectives
        self.collects = False  # whether gradients before the last one of this pass need only be noted
        # Positions of the parameters
        self.arrived: set[int] = set()  # that have a gradient from this pass
        self.filled: set[int] = set()  # whose part of the bucket is filled
        self.received: set[int] = set()  # whose gradients have come since the last `forget`
        self.untrained: set[int] = set()  # that were frozen in a forward pass since then
        self.batches = state.collectives.runs_ahead or self.unit.numel * dtype.itemsize <= SMALL_BYTES
        """Whether gradients wait until they can be copied into the bucket together."""
        self.waiting: dict[int, Tensor] = {}  # those gradients, by position
        self.summed = False
        """Whether the shard holds a sum over ranks that later backward passes add to."""
        self.earlier_sum: Tensor | None = None
        """That sum, where its place in the bucket is about to be filled again."""
        self.bucket: Tensor | None = None
        """Where gradients accumulate: lent, or kept at stages 0 and 1 and under `accumulate()`."""
        self._pieces: list[Tensor] = []  # views of the bucket, one a parameter, each in its parameter's shape
        self._gaps: list[Tensor] = []
        """The padding of a lent bucket, and of any that a block of small integers may overflow in: it is cleared."""
        self._lent: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        """Those of the pool's buckets, and the gaps between them, by address: these buckets live for ever."""
        self._lone = (
            len(state.parameters) == 1
            and self.unit.payload_numel == self.unit.numel
            and state.dtype == dtype
            and state.device.type == "cpu"
        )
        """Whether autograd's own tensor can serve as the bucket: a unit of one unpadded parameter."""
        # Made at once: made in the first backward, they would lie between activations and fragment the heap.
        self._sum = torch.zeros(self.kept.numel, dtype=dtype, device=state.device) if self.cut else None
        if not self.cut and not self._lone:
            self.take_own_bucket()

    @property
    def skipped(self) -> set[int]:
        """The positions of parameters without a gradient because they are, or were, frozen; they keep their values."""
        return (self.state.stopped | self.untrained) - self.received

    @property
    def memory(self) -> Tensor:
        """The elements that this rank keeps."""
        memory = self.bucket if self._sum is None else self._sum
        assert memory is not None
        return memory

    @property
    def shard(self) -> Tensor:
        """The sum over ranks of this rank's piece."""
        return self.of(self.state.own)

    def of(self, interval: Interval) -> Tensor:
        """The gradients of elements `interval` (memory coordinates) of the unit."""
        return self.memory[interval.start - self.kept.start : interval.stop - self.kept.start]

    # ---- into the bucket

    @excluded_from_graphs
    def collect(self, position: int, parameter: nn.Parameter) -> bool:
        """Note `parameter.grad`. False where more than that is to be done, which is left to `Gradients.accept`."""
        if (
            not self.collects
            or position in self.waiting
            or len(self.arrived) + 1 == len(self.state.parameters)
        ):
            return False
        gradient = parameter.grad
        if gradient is None or gradient.requires_grad or gradient.layout != torch.strided:
            return False
        if position in self.received and hooked(parameter):
            return False
        self.waiting[position] = gradient
        self.received.add(position)
        self.arrived.add(position)
        parameter.grad = None
        return True

    def take_bucket(self) -> bool:
        """Take a bucket for the gradients of a pass. False if the pool has none left."""
        if self.bucket is None and not self.cut:
            self.take_own_bucket()
        elif self.bucket is None:
            self.bucket = self._pool.take(self.unit.numel)
            if self.bucket is None:
                return False
            self._take_views(self.bucket)
        if self.summed and not self._adds:
            self.earlier_sum, self.summed = self.shard.clone(), False
        return True

    def take_own_bucket(self) -> None:
        """Allocate a bucket of this unit's own, to hold whole gradients over several backward passes."""
        if self.bucket is None:
            self.bucket = torch.zeros(self.unit.numel, dtype=self.dtype, device=self.state.device)
            self._pieces = unit_views(self.unit, self.bucket)
            if self._wire is not None and self._wire.block > 1:
                self._gaps = [self.bucket[gap.start : gap.stop] for gap in self.unit.gaps()]

    def _take_views(self, bucket: Tensor) -> None:
        """Make the views of a bucket that was just lent."""
        known = self._lent.get(bucket.data_ptr())
        if known is None:
            known = unit_views(self.unit, bucket), [bucket[gap.start : gap.stop] for gap in self.unit.gaps()]
            if bucket.data_ptr() in self._pool.owned:
                self._lent[bucket.data_ptr()] = known
        self._pieces, self._gaps = known

    def can_adopt(self, gradient: Tensor) -> bool:
        """Whether `gradient` itself can serve as the bucket: no copy, and no second piece of memory."""
        return (
            self._lone and self.bucket is None and gradient.dtype == self.dtype and gradient.is_contiguous()
        )

    def adopt(self, gradient: Tensor, factor: float) -> None:
        self.bucket = gradient.detach().view(-1).mul_(factor)
        self._pieces = unit_views(self.unit, self.bucket)
        self.filled.add(0)

    def fill(self, position: int, gradient: Tensor, factor: float) -> None:
        target = self._pieces[position]
        if position in self.filled:
            target.add_(gradient, alpha=factor)
        elif gradient.dtype == self.dtype:
            torch.mul(gradient, factor, out=target)
        else:
            target.copy_(gradient).mul_(factor)
        self.filled.add(position)

    def fill_waiting(self, factor: float) -> None:
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

    # ---- over ranks, into the shard

    def reduce(self, factor: float) -> Work:
        """Pass the bucket, times `factor` and with zeros for missing gradients, to the collectives."""
        assert self.bucket is not None
        if len(self.filled) < len(self._pieces):
            for position, piece in enumerate(self._pieces):
                if position not in self.filled:
                    piece.zero_()
        if self._gaps:
            torch._foreach_zero_(self._gaps)
        if factor != 1.0:
            self.bucket.mul_(factor)
        self.reduced, self.collects = True, False
        return self.state.collectives.reduce_scatter(
            self.unit,
            self.bucket,
            self.shard,
            between=None if self._adds else self._sum,
            add=self.summed and self._adds,
            wire=self._wire,
        )

    def finish(self) -> None:
        """Note that the sum has arrived in the shard."""
        if self.earlier_sum is not None:
            self.shard.add_(self.earlier_sum)
            self.earlier_sum = None
        self.summed = True
        self.filled.clear()
        if self.cut:
            self._drop()

    def begin_pass(self) -> None:
        self.complete = self.reduced = self.collects = False
        self.arrived.clear()

    def _drop(self) -> None:
        if self.cut and self.bucket is not None:
            self._pool.give(self.bucket)
        self.bucket, self._pieces, self._gaps = None, [], []

    def forget(self) -> None:
        """Drop all gradients; permanent memory stays."""
        self.summed, self.earlier_sum = False, None
        self.begin_pass()
        self.filled.clear()
        self.waiting.clear()
        self.received.clear()
        self.untrained.clear()
        if self.cut or self._lone:
            self._drop()

    # ---- for the user

    def clear(self, position: int) -> None:
        """Set the gradient of one parameter to zero, wherever it is kept between backward passes."""
        memory = self.unit.slices[position].memory
        if self.bucket is not None:
            self.bucket[memory.start : memory.stop].zero_()
        if self.cut:
            self.of(memory.intersection(self.kept)).zero_()
        if self.earlier_sum is not None:
            own = memory.intersection(self.state.own).shifted(-self.state.own.start)
            self.earlier_sum[own.start : own.stop].zero_()

    def show(self) -> Tensor:
        """Show whole gradients [numel] in the unit's parameters, in their dtype; returns the sums."""
        state = self.state
        if state.updated.numel == self.unit.numel:
            whole = self.of(state.updated).clone()
        else:
            whole = torch.zeros(self.unit.numel, dtype=self.dtype, device=state.device)
            whole[state.own.start : state.own.stop] = self.shard
            state.collectives.all_gather(self.unit, whole).wait()
        for parameter, piece in zip(state.parameters, unit_views(self.unit, whole), strict=True):
            show_gradient(parameter, piece.to(state.dtype, copy=True))
        return whole

    def take_back(self, before: Tensor) -> None:
        """Store this rank's part of the shown gradients; values equal to `before` keep their precision."""
        for parameter, piece in zip(self.state.parameters, unit_views(self.unit, before), strict=True):
            gradient = shown_gradient(parameter)
            show_gradient(parameter, None)
            if gradient is None:
                piece.zero_()
            else:
                shown = gradient.detach().reshape(piece.shape)
                piece.copy_(torch.where(shown != piece.to(shown.dtype), shown.to(piece.dtype), piece))
        updated = self.state.updated
        self.of(updated).copy_(before[updated.start : updated.stop])
