"""One unit's gradients: the bucket that collects them in backward, and the shard that keeps their sum over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor, nn

from zerokit.layout import Unit
from zerokit.runtime.collectives import Exchange, Wire, Work
from zerokit.runtime.guard import drop_gradients, hooked, show_gradient, shown_gradient
from zerokit.runtime.shards import Shards
from zerokit.runtime.torch_internals import excluded_from_graphs, take_gradient
from zerokit.runtime.unit import UnitState

_SMALL_BYTES = 1 << 20
"""Up to this size a bucket is scaled behind one call that fills it; above, memory's time counts more than a call's."""


class Phase(IntEnum):
    """What has become of a unit's gradients in this backward pass; it only goes forward."""

    OPEN = 0  # none has come
    COLLECTING = 1  # some have
    COMPLETE = 2  # all have
    REDUCING = 3  # the bucket is with the collectives
    SUMMED = 4  # their sum over ranks is in the shard


class BucketPool:
    """So many buckets of `numel` elements; units with more have memory for a pass."""

    def __init__(self, count: int, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numel = numel
        self._dtype, self._device = dtype, device
        self.free = [torch.empty(numel, dtype=dtype, device=device) for _ in range(count)]
        """The buckets that are not lent: all of them between backward passes."""
        self._owned = list(self.free)
        self._large: list[Tensor] = []  # larger ones that are not lent, those used last behind

    def resize(self, numel: int) -> None:
        """Have buckets of so many elements; none is lent."""
        count = len(self._owned)
        self.free.clear()  # before others are made
        self._owned.clear()
        BucketPool.__init__(self, count, numel, self._dtype, self._device)

    def take(self, numel: int) -> Tensor | None:
        """A bucket of at least `numel` elements with arbitrary contents; None while all are in use."""
        if numel <= self.numel:
            return self.free.pop() if self.free else None
        fitting = [at for at, bucket in enumerate(self._large) if bucket.numel() == numel]
        if not fitting:
            self.release()
            return torch.empty(numel, dtype=self._dtype, device=self._device)
        bucket = self._large.pop(fitting[-1])
        storage, nbytes = bucket.untyped_storage(), numel * self._dtype.itemsize
        if storage.nbytes() < nbytes:
            storage.resize_(nbytes)
        return bucket

    def give(self, bucket: Tensor) -> None:
        (self.free if bucket.numel() <= self.numel else self._large).append(bucket)

    def reclaim(self) -> None:
        """Take all buckets back, because no unit uses its own any more."""
        self.free = list(self._owned)

    def release(self) -> None:
        """Free the memory of larger buckets that are not lent; their storages, and views of these, stay."""
        self._large.sort(key=id)  # so that each pass lends them in the same order
        for bucket in self._large:
            bucket.untyped_storage().resize_(0)


class Bucket:
    """Memory for one unit's gradients: `flat`, the `pieces` of its parameters, and the `gaps` between them."""

    def __init__(self, unit: Unit, memory: Tensor) -> None:
        self.memory = memory  # what the pool has lent, maybe longer
        self.flat = Shards(unit, memory[: unit.numel])
        self.pieces = self.flat.views()
        self.gaps = [self.flat.at(gap) for gap in unit.gaps()]
        self._reduction: Exchange | None = None

    def reduce(self, state: UnitState, out: Shards, wire: Wire | None) -> Work:
        """Start to sum it over ranks into `out`, in each call alike."""
        if self._reduction is None:
            sums = state.placement.sums
            self._reduction = state.collectives.reduction(self.flat, out, wire=wire, back=sums)
        return self._reduction.start()


class UnitGradients:
    """The gradients of one unit, summed in `dtype`; they cross between ranks on `wire`, if one is given."""

    def __init__(self, state: UnitState, dtype: torch.dtype, wire: Wire | None, pool: BucketPool) -> None:
        self.state, self.unit, self.dtype = state, state.unit, dtype
        self._wire, self._pool = wire, pool
        self._blocks = wire is not None and wire.block > 1
        self.cut = state.placement.cuts_gradients
        """Whether what is kept between backward and step has memory of its own; else it is the bucket."""
        self.phase = Phase.OPEN
        # Positions of the parameters
        self.waiting: dict[int, Tensor] = {}  # whose gradients of this pass are to be moved into the bucket
        self._arrived: set[int] = set()  # that have a gradient from this pass
        self.filled: set[int] = set()  # whose part of the bucket is filled
        self.received: set[int] = set()  # whose gradients have come since the last `forget`
        self.untrained: set[int] = set()  # that were frozen in a forward pass since then
        self.summed = False
        """Whether the shard holds a sum over ranks that later backward passes add to."""
        self.earlier_sum: Shards | None = None
        """That sum, where its place is about to be filled again."""
        self.bucket: Bucket | None = None
        """Where gradients accumulate: lent, or kept at stages 0 and 1 and under `accumulate()`."""
        self._lent: dict[int, Bucket] = {}
        """The pool's, by the identity of their memory, which lives for ever."""
        self._lone = (
            len(state.parameters) == 1
            and self.unit.payload_numel == self.unit.numel
            and state.dtype == dtype
            and state.device.type == "cpu"
        )
        """Whether autograd's own tensor can serve as the bucket: a unit of one unpadded parameter."""
        # Made at once: made in the first backward, they would lie between activations and fragment the heap.
        self._sum: Shards | None = None
        if self.cut:
            kept = state.placement.gradients(self.unit, state.collectives.position)
            self._sum = Shards(self.unit, torch.zeros(kept.numel, dtype=dtype, device=state.device), kept)
        elif not self._lone:
            self.take_own_bucket()

    @property
    def skipped(self) -> set[int]:
        """The positions of parameters without a gradient because they are, or were, frozen; they keep their values."""
        return (self.state.stopped | self.untrained) - self.received

    @property
    def held(self) -> Shards:
        """The elements that this rank keeps between backward and step."""
        if self._sum is not None:
            return self._sum
        assert self.bucket is not None
        return self.bucket.flat

    @property
    def shard(self) -> Tensor:
        """The sum over ranks of this rank's piece."""
        return self.held.at(self.state.own)

    def take_cut(self, *, summed: bool) -> None:
        """Be made anew with the unit, between passes; `summed` if there is a sum over ranks, which is to be filled."""
        received, untrained = self.received, self.untrained
        UnitGradients.__init__(self, self.state, self.dtype, self._wire, self._pool)
        if summed:
            if not self.cut:
                self.take_own_bucket()
            self.received, self.untrained, self.summed = received, untrained, True

    # ---- as they come

    @excluded_from_graphs
    def collect(self, position: int, parameter: nn.Parameter) -> bool:
        """Note `parameter.grad`. False where more than that is to be done, which is left to `Gradients.accept`."""
        if (
            self.phase is not Phase.COLLECTING
            or position in self._arrived
            or len(self._arrived) + 1 == len(self.state.parameters)
        ):
            return False
        gradient = parameter.grad
        if gradient is None or gradient.requires_grad or gradient.layout != torch.strided:
            return False
        if position in self.received and hooked(parameter):
            return False
        self.waiting[position] = gradient
        self.received.add(position)
        self._arrived.add(position)
        take_gradient(parameter)
        return True

    def note(self, position: int, gradient: Tensor) -> None:
        """Note a gradient, the first or the last of this pass."""
        self.waiting[position] = gradient
        self.received.add(position)
        self._arrived.add(position)
        whole = len(self._arrived) == len(self.state.parameters)
        self.phase = Phase.COMPLETE if whole else Phase.COLLECTING

    def note_untrained(self) -> None:
        """Note the parameters that are frozen in this forward pass."""
        self.untrained |= self.state.stopped

    def begin_pass(self) -> None:
        self.phase = Phase.OPEN
        self._arrived.clear()

    # ---- into the bucket

    def take_bucket(self) -> bool:
        """Take a bucket for the gradients of a pass. False if the pool has none left."""
        if self.bucket is None and not self.cut:
            self.take_own_bucket()
        elif self.bucket is None:
            memory = self._pool.take(self.unit.numel)
            if memory is None:
                return False
            if id(memory) not in self._lent:
                self._lent[id(memory)] = Bucket(self.unit, memory)
            self.bucket = self._lent[id(memory)]
        if not self.cut:
            self._set_sum_aside()
        return True

    def take_own_bucket(self) -> None:
        """Allocate a bucket of this unit's own, to hold whole gradients over several backward passes."""
        if self.bucket is None:
            memory = torch.zeros(self.unit.numel, dtype=self.dtype, device=self.state.device)
            self.bucket = Bucket(self.unit, memory)

    def _set_sum_aside(self) -> None:
        if self.summed:
            updated = self.state.updated
            self.earlier_sum = Shards(self.unit, self.held.at(updated).clone(), updated)
            self.summed = False

    def adopt(self, factor: float) -> bool:
        """Let a gradient that waits be the bucket: no copy, and no second piece of memory. False if it cannot."""
        gradient = self.waiting.get(0)
        if not self._lone or gradient is None or self.bucket is not None:
            return False
        if gradient.dtype != self.dtype or not gradient.is_contiguous():
            return False
        flat = gradient.view(-1)
        self.bucket = Bucket(self.unit, flat if factor == 1.0 else flat.mul_(factor))
        self.filled.add(0)
        self.waiting.clear()
        return True

    def fill(self, factor: float) -> None:
        """Move the gradients that wait, times `factor`, into the bucket."""
        assert self.bucket is not None
        pieces = self.bucket.pieces
        first = [position for position in self.waiting if position not in self.filled]
        later = [position for position in self.waiting if position in self.filled]
        if first:
            targets = [pieces[position] for position in first]
            gradients = [self.waiting[position] for position in first]
            small = self.bucket.flat.tensor.nbytes <= _SMALL_BYTES or self.state.collectives.runs_ahead
            if factor != 1.0 and not small and gradients[0].dtype == self.dtype:
                for gradient, target in zip(gradients, targets, strict=True):
                    torch.mul(gradient, factor, out=target)
            else:
                torch._foreach_copy_(targets, gradients)
                if factor != 1.0 and len(first) == len(pieces):
                    self.bucket.flat.tensor.mul_(factor)
                elif factor != 1.0:
                    torch._foreach_mul_(targets, factor)
        if later:
            targets = [pieces[position] for position in later]
            gradients = [self.waiting[position] for position in later]
            if gradients[0].dtype != self.dtype:  # they would be added one by one
                wide = [torch.empty_like(target) for target in targets]
                torch._foreach_copy_(wide, gradients)
                gradients = wide
            torch._foreach_add_(targets, gradients, alpha=factor)
        self.filled.update(first)
        self.waiting.clear()

    # ---- over ranks, into the shard

    def reduce(self, factor: float) -> Work:
        """Pass the bucket, times `factor` and with zeros for missing gradients, to the collectives."""
        bucket = self.bucket
        assert bucket is not None
        if len(self.filled) < len(bucket.pieces):
            for position, piece in enumerate(bucket.pieces):
                if position not in self.filled:
                    piece.zero_()
        # A lent bucket's padding is another unit's, and a block of small integers may overflow in it.
        if bucket.gaps and (self.cut or self._blocks):
            torch._foreach_zero_(bucket.gaps)
        if factor != 1.0:
            bucket.flat.tensor.mul_(factor)
        self.phase = Phase.REDUCING
        self._set_sum_aside()
        return bucket.reduce(self.state, self.held, self._wire)

    def finish(self) -> None:
        """Note that the sum has arrived where this rank updates."""
        if self.earlier_sum is not None:
            if self.state.placement.sums:
                self.state.collectives.wait_for_readers()  # other ranks may still be gathering this one's piece
            self.held.at(self.earlier_sum.interval).add_(self.earlier_sum.tensor)
            self.earlier_sum = None
        self.phase, self.summed = Phase.SUMMED, True
        self.filled.clear()
        if self.cut:
            self._drop()

    def _drop(self) -> None:
        if self.bucket is not None and id(self.bucket.memory) in self._lent:
            self._pool.give(self.bucket.memory)
        self.bucket = None

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
        drop_gradients(self.state.parameters)  # which an exception of a user's hook kept from being taken

    # ---- for the user

    def clear(self, position: int) -> None:
        """Set the gradient of one parameter to zero, wherever it is kept between backward passes."""
        memory = self.unit.slices[position].memory
        for held in (None if self.bucket is None else self.bucket.flat, self._sum, self.earlier_sum):
            if held is not None:
                held.at(memory).zero_()

    def show(self) -> Shards:
        """Show whole gradients in the unit's parameters, in their dtype; returns the sums."""
        state = self.state
        if len(state.placement.owners(self.unit)) == 1:
            whole = Shards(self.unit, self.held.at(state.updated).clone())
        else:
            whole = Shards(self.unit, torch.zeros(self.unit.numel, dtype=self.dtype, device=state.device))
            whole.at(state.own).copy_(self.shard)
            state.collectives.gather(whole).start().wait()
        for parameter, piece in zip(state.parameters, whole.views(), strict=True):
            show_gradient(parameter, piece.to(state.dtype, copy=True))
        return whole

    def shown(self) -> list[Tensor | None]:
        """The gradients that the parameters show."""
        return [shown_gradient(parameter) for parameter in self.state.parameters]

    def show_those_of(self, source: int, there: Sequence[bool]) -> None:
        """Show those of rank `source`, which has some `there`, by position. Collective."""
        for parameter, gradient, shows in zip(self.state.parameters, self.shown(), there, strict=True):
            if shows and gradient is None:
                gradient = torch.empty(parameter.shape, dtype=self.state.dtype, device=self.state.device)
            if shows and gradient is not None:
                gradient = gradient.detach()
                self.state.collectives.broadcast(gradient, source)
            show_gradient(parameter, gradient if shows else None)

    def take_back(self, before: Shards) -> None:
        """Store this rank's part of the shown gradients; values equal to `before` keep their precision."""
        for parameter, piece in zip(self.state.parameters, before.views(), strict=True):
            gradient = shown_gradient(parameter)
            if gradient is None:
                piece.zero_()
            else:
                shown = gradient.detach().reshape(piece.shape)
                piece.copy_(torch.where(shown != piece.to(shown.dtype), shown.to(piece.dtype), piece))
        updated = self.state.updated
        self.held.at(updated).copy_(before.at(updated))
