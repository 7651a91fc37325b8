"""A unit in memory: whole parameters as views of one flat storage, and what this rank keeps of it.

stage 0, 1, 2   `whole` always exists; this rank's `shard` is a view of it
stage 3         `shard` always exists; `whole` has memory while the unit is gathered, see `memory`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from zerokit.errors import UsageError
from zerokit.layout import Interval, Unit
from zerokit.runtime.collectives import Collectives, Work
from zerokit.runtime.memory import unit_memory


@dataclass(slots=True)
class Flat:
    """What the optimizer updates of one unit and group: `tensor`, elements `interval` of the unit's memory."""

    group: int
    interval: Interval
    tensor: nn.Parameter


class FlatUnit:
    """The storage of one unit on one rank.

    Args:
        unit: its layout.
        parameters: the model's parameters, in the unit's order; they become views of this storage.
        collectives: how it is gathered.
        dtype: of the storage.
        sharded: whether only the shard is kept between uses (stage 3).
    """

    def __init__(
        self,
        unit: Unit,
        parameters: Sequence[nn.Parameter],
        collectives: Collectives,
        dtype: torch.dtype,
        *,
        sharded: bool,
    ) -> None:
        self.unit = unit
        self.parameters = list(parameters)
        self.collectives = collectives
        self.dtype = dtype
        self.sharded = sharded
        self.device = collectives.device
        self.payload = [unit.payload_within(unit.shard(rank)) for rank in range(unit.world)]
        self.own = unit.shard(collectives.rank)
        self.flats: list[Flat] = []
        self.pending: Work | None = None
        self.resident = True
        self.memory = unit_memory(unit.numel, self.own, dtype, self.device, sharded=sharded)
        self.whole, self.shard = self.memory.whole, self.memory.shard
        self._views = [
            self.whole[part.offset : part.offset + part.parameter.numel].view(part.parameter.shape)
            for part in unit.slices
        ]
        self._empty = torch.empty(0, dtype=dtype, device=self.device)

    def adopt(self, initial: Mapping[nn.Parameter, Tensor], master: torch.dtype) -> Tensor:
        """Make the parameters views of this storage; returns the unit's values [numel], in the master dtype.

        Those on `meta` take their values from `initial`. The returned values are to be agreed on with the other
        ranks and handed to `settle`: masters start from them, not from what compute rounds them to.
        """
        exact = self.whole
        if self.unit.trainable and master != self.dtype:
            exact = torch.zeros(self.unit.numel, dtype=master, device=self.device)
        with torch.no_grad():
            places = zip(self.parameters, self._views, self.unit.slices, strict=True)
            for parameter, view, part in places:
                target = exact[part.offset : part.offset + part.parameter.numel].view(part.parameter.shape)
                if not parameter.is_meta:
                    target.copy_(parameter)
                    parameter.data = view
                    continue
                target.copy_(initial[parameter])
                # `.data` cannot cross from meta to a device; swapping keeps the object, so ties and groups hold.
                # Only then does it become a view: made from one, it would share the storage's version counter,
                # and autograd would take every gather for a change of the parameter.
                real = nn.Parameter(
                    torch.empty(0, dtype=self.dtype, device=self.device), parameter.requires_grad
                )
                real.__dict__.update(parameter.__dict__)
                torch.utils.swap_tensors(parameter, real)
                parameter.data = view
        return exact

    def settle(self, exact: Tensor, *, everything: bool) -> None:
        """Take the values that all ranks agreed on, and create what the optimizer updates.

        That is the whole unit (stage 0) or this rank's shard of it. Where the master dtype is the storage's own, the
        masters are the storage itself.
        """
        separate = exact.dtype != self.dtype
        if separate:
            self.whole.copy_(exact)
        if self.sharded:
            self.memory.store()
            self.free()
        if self.unit.trainable:
            for group, stretch in self.unit.groups_within(
                Interval(0, self.unit.numel) if everything else self.own
            ):
                master = exact[stretch.start : stretch.stop].clone() if separate else self.slice_of(stretch)
                self.flats.append(Flat(group, stretch, nn.Parameter(master)))

    def slice_of(self, interval: Interval) -> Tensor:
        """Elements `interval` (memory coordinates) of what this rank keeps."""
        if self.sharded:
            return self.shard[interval.start - self.own.start : interval.stop - self.own.start]
        return self.whole[interval.start : interval.stop]

    def write_back(self) -> None:
        """Copy updated masters into what this rank keeps of the parameters."""
        for flat in self.flats:
            kept = self.slice_of(flat.interval)
            if kept.data_ptr() != flat.tensor.data_ptr():
                kept.copy_(flat.tensor.detach())

    def read_in(self) -> None:
        """The opposite: parameters were changed as a whole; refresh this rank's shard and masters."""
        self.memory.store()
        with torch.no_grad():
            for flat in self.flats:
                kept = self.slice_of(flat.interval)
                if kept.data_ptr() != flat.tensor.data_ptr():
                    flat.tensor.copy_(kept)

    def gather(self) -> None:
        """Start gathering the unit; `ready` must follow before its parameters are used."""
        self.memory.grow()
        self.pending = self.collectives.all_gather(self.whole, self.unit.index, self.payload)
        self.resident = True

    def ready(self) -> None:
        """Wait for a gather in flight, so that the parameters hold their values."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        pending.wait()
        if self.sharded:
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.data = view

    def free(self) -> None:
        """Stage 3: give the gathered unit's memory back; see memory's [Note: one storage for life]."""
        self.ready()
        for parameter in self.parameters:
            parameter.data = self._empty
        self.memory.shrink()
        self.resident = False

    def check(self) -> None:
        """Raise `UsageError` if someone re-pointed or unfroze a parameter: updates would be lost without a word."""
        usable = not self.sharded or (self.resident and self.pending is None)
        for parameter, view, layout in zip(self.parameters, self._views, self.unit.parameters, strict=True):
            if parameter.requires_grad and not layout.trainable:
                raise UsageError(
                    f"parameter {layout.name} was frozen when ZeroOptimizer was built, so nothing updates it: call "
                    "requires_grad_(True) before, or build the optimizer anew"
                )
            expected = view if usable else self._empty
            if parameter.data_ptr() != expected.data_ptr() or parameter.dtype != self.dtype:
                raise UsageError(
                    f"parameter {layout.name} no longer lies in zerokit's storage (found {parameter.dtype} on "
                    f"{parameter.device}, expected {self.dtype} on {self.device}): calling .to(), .float(), .half() or "
                    "assigning .data after ZeroOptimizer was built cuts the parameter off from its updates. "
                    "Do it before, or choose precision="
                )
