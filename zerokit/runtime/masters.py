"""What one rank owns of a unit: its shard, and its masters.

A master is what the optimizer updates, in the master dtype: a slice for each group of parameters in the shard (a call
over each parameter's own takes up to four times as long in deep, narrow models). The optimizer counts steps by tensor,
so parameters that are no longer trained alike get one master each. Groups of optimizers that update whole tensors have
a master for each tensor, on its owner (`zerokit.owners`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.layout import Interval, Slice, Unit
from zerokit.owners import Owners, Whole
from zerokit.placement import Placement
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.guard import TICKET, Ticket, WithoutGradient
from zerokit.runtime.shards import Shards
from zerokit.runtime.torch_internals import change_class


class Master(Shards):
    """Elements of one unit and optimizer group that the optimizer updates; the model computes with those in `kept`."""

    __slots__ = ("group", "kept", "separate")
    tensor: nn.Parameter

    def __init__(self, kept: Shards, group: int, interval: Interval, exact: Tensor | None) -> None:
        """The master has memory of its own if there are `exact` values, which `kept` may have rounded."""
        self.group, self.kept, self.separate = group, kept.at(interval), exact is not None
        super().__init__(kept.unit, nn.Parameter(self.kept if exact is None else exact), interval)

    @property
    def values(self) -> Shards:
        """The same elements, without the parameter's gradient and guards."""
        return self.like(self.tensor.detach())

    def like(self, tensor: Tensor) -> Shards:
        return super().like(tensor.reshape(-1))


class MasterSlice(Master):
    """The part of a unit and group that lies in this rank's shard, flat."""

    __slots__ = ()


class WholeMaster(Master):
    """A tensor that its owner updates whole, in its own shape; `kept` is current while the unit is whole here."""

    __slots__ = ("whole",)

    def __init__(self, memory: Shards, whole: Whole, exact: Tensor | None) -> None:
        """`memory` is the whole unit; `exact` [elements] is what the master has of its own, if it is separate."""
        self.whole = whole
        super().__init__(memory, whole.group, whole.interval, exact)
        self.tensor = nn.Parameter(self.tensor.detach().view(whole.shape))


class OwnedUnit(ABC):
    """One rank's part of a unit: the parameters' elements `kept`, the shard `own` of them, and those `updated`."""

    dtype: torch.dtype
    separate: bool
    """Whether masters have memory of their own, in another dtype than the parameters."""
    comes_and_goes: bool
    """Whether whole parameters have memory only while they are gathered."""

    def __init__(
        self, unit: Unit, parameters: Sequence[nn.Parameter], collectives: Collectives, placement: Placement
    ) -> None:
        self.unit, self.index, self.parameters = unit, unit.index, list(parameters)
        self.collectives, self.device, self.placement = collectives, collectives.device, placement
        self.own = unit.shard(collectives.position)
        self.updated = placement.updated(unit, collectives.position)
        self.owner = placement.owner(collectives.position)
        """Which of the owners this rank is."""
        self.slices: list[MasterSlice] = []
        """The masters that lie in this rank's shard."""
        self.owned: list[WholeMaster] = []
        """Those of the tensors that it owns."""

    def members(self, master: Master, within: Interval | None = None) -> list[Slice]:
        """The slices of parameters in `master`, padding left out; those in the interval `within`, if one is given."""
        piece = master.interval if within is None else master.interval.intersection(within)
        return [s for s in self.unit.slices_within(piece) if s.parameter.group == master.group]

    def positions_in(self, master: Master) -> list[int]:
        """The unit's parameters that have elements in `master`."""
        names = {part.parameter.name for part in self.members(master)}
        return [position for position, p in enumerate(self.unit.parameters) if p.name in names]

    @property
    @abstractmethod
    def whole(self) -> Shards:
        """The whole unit in the parameters' dtype, which may have no memory now."""

    @property
    @abstractmethod
    def kept(self) -> Shards:
        """What this rank keeps of the parameters between steps."""

    @abstractmethod
    def note_update(self) -> None:
        """Note that the optimizer has changed what is kept of the parameters."""

    @property
    def masters(self) -> list[Master]:
        return [*self.slices, *self.owned]

    @property
    def apart(self) -> bool:
        """Whether masters of whole tensors have memory of their own: their parameters may come and go."""
        return self.separate or self.comes_and_goes

    def take_masters(self, masters: Iterable[Master]) -> None:
        """Have these masters from now on, and no others."""
        masters = list(masters)
        self.slices[:] = [master for master in masters if isinstance(master, MasterSlice)]
        self.owned[:] = [master for master in masters if isinstance(master, WholeMaster)]

    def masters_of(self, exact: Shards, owners: Owners) -> Iterator[Master]:
        """The masters of this rank, from the unit's whole values."""
        for group, stretch in self.unit.groups_within(self.updated):
            if group not in owners.groups:
                own = exact.at(stretch).clone() if self.separate else None
                yield MasterSlice(self.kept, group, stretch, own)
        for whole in owners.owned(self.index, self.owner):
            values = exact.at(whole.interval).clone() if self.apart else None
            yield WholeMaster(self.whole, whole, values)

    def refresh_masters(self, *, exactly: bool = False) -> None:
        """Take over the parameters' values, all of them or those that are not the masters' rounded ones."""
        for master in self.masters:
            if master.separate:
                values, new = master.values.tensor, master.kept.to(master.dtype)
                changed = values.to(self.dtype) != master.kept
                values.copy_(new if exactly else torch.where(changed, new, values))

    @property
    def divided(self) -> bool:
        """Whether parameters that share a group have separate masters."""
        groups = [master.group for master in self.slices]
        return len(set(groups)) < len(groups)

    def divide(self, inner: Optimizer) -> None:
        """Give `inner` one master a parameter; values and states stay."""
        before = list(self.slices)
        self.slices.clear()
        for old in before:
            pieces: list[MasterSlice] = []
            starts = sorted(s.offset for s in self.members(old) if s.offset > old.interval.start)
            for piece in map(Interval, [old.interval.start, *starts], [*starts, old.interval.stop]):
                exact = old.values.at(piece).clone() if old.separate else None
                pieces.append(MasterSlice(self.kept, old.group, piece, exact))
                if old.tensor in inner.state:
                    inner.state[pieces[-1].tensor] = {
                        kind: (
                            old.like(value).at(piece) if value.shape == old.tensor.shape else value
                        ).clone()
                        if isinstance(value, Tensor)
                        else value
                        for kind, value in inner.state[old.tensor].items()
                    }
            inner.state.pop(old.tensor, None)
            params = inner.param_groups[old.group]["params"]
            at = next(at for at, tensor in enumerate(params) if tensor is old.tensor)
            params[at : at + 1] = [new.tensor for new in pieces]
            self.slices.extend(pieces)
        self.guard_masters()

    def guard_masters(self) -> None:
        """Guard the masters after the optimizer's update; their gradients are elsewhere."""
        for master in self.masters:
            if TICKET not in master.tensor.__dict__:
                positions, name = tuple(self.positions_in(master)), f"master of {self.unit.name}"
                first: Ticket = self.parameters[0].__dict__[TICKET]
                master.tensor.__dict__[TICKET] = replace(first, positions=positions, name=name)
            change_class(master.tensor, WithoutGradient)

    def unguard_masters(self) -> None:
        for master in self.masters:
            change_class(master.tensor, nn.Parameter)


def write_back(units: Sequence[OwnedUnit]) -> None:
    """Copy updated masters into what this rank keeps of the parameters, by one operation; graphs made before end."""
    kept, masters = [], []
    for unit in units:
        for master in unit.slices if unit.separate else ():  # whole tensors travel
            kept.append(master.kept)
            masters.append(master.tensor.detach())
    if kept:
        torch._foreach_copy_(kept, masters)
    for unit in units:
        if unit.unit.trainable:
            unit.note_update()
