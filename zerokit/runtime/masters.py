"""What one rank owns of a unit: its shard, and the masters in it.

A master is what the optimizer updates, in the master dtype: one for each group of parameters in the unit (a call over
each parameter's own takes up to four times as long in deep, narrow models). The optimizer counts steps by tensor, so
parameters that are no longer trained alike get one master each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn
from torch.optim import Optimizer

from zerokit.layout import Interval, Slice, Unit
from zerokit.placement import Placement
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.guard import TICKET, Ticket, WithoutGradient
from zerokit.runtime.torch_internals import change_class


@dataclass(slots=True)
class MasterSlice:
    """The part of one unit and group that the optimizer updates: `tensor`, elements `interval` of the unit's memory."""

    group: int
    interval: Interval
    tensor: nn.Parameter

    def part(self, tensor: Tensor, interval: Interval) -> Tensor:
        """The elements `interval` (memory coordinates) of a tensor of the master's shape, as far as it has them."""
        both = self.interval.intersection(interval)
        return tensor[both.start - self.interval.start : both.stop - self.interval.start]


class OwnedUnit:
    """One rank's part of a unit: it keeps the elements `kept` of the parameters, and updates those `updated`."""

    shard: Tensor  # the kept elements

    def __init__(
        self, unit: Unit, parameters: Sequence[nn.Parameter], collectives: Collectives, placement: Placement
    ) -> None:
        self.unit, self.index, self.parameters = unit, unit.index, list(parameters)
        self.collectives, self.device, self.placement = collectives, collectives.device, placement
        self.own = unit.shard(collectives.position)
        self.kept = placement.parameters(unit, collectives.position)
        self.updated = placement.updated(unit, collectives.position)
        self.masters: list[MasterSlice] = []
        self.separate = False
        """Whether masters have memory of their own, in another dtype than the parameters."""

    def kept_part(self, interval: Interval) -> Tensor:
        """The elements `interval` (memory coordinates) of this rank's kept memory."""
        return self.shard[interval.start - self.kept.start : interval.stop - self.kept.start]

    def members(self, master: MasterSlice, within: Interval | None = None) -> list[Slice]:
        """The slices of parameters in `master`, padding left out; those in the interval `within`, if one is given."""
        piece = master.interval if within is None else master.interval.intersection(within)
        return [s for s in self.unit.slices_within(piece) if s.parameter.group == master.group]

    def positions_in(self, master: MasterSlice) -> list[int]:
        """The unit's parameters that have elements in `master`."""
        names = {part.parameter.name for part in self.members(master)}
        return [position for position, p in enumerate(self.unit.parameters) if p.name in names]

    @property
    def divided(self) -> bool:
        """Whether parameters that share a group have separate masters."""
        groups = [master.group for master in self.masters]
        return len(set(groups)) < len(groups)

    def divide(self, inner: Optimizer) -> None:
        """Give `inner` one master a parameter; values and states stay."""
        before, self.masters = self.masters, []
        for old in before:
            pieces: list[MasterSlice] = []
            starts = sorted(s.offset for s in self.members(old) if s.offset > old.interval.start)
            for piece in map(Interval, [old.interval.start, *starts], [*starts, old.interval.stop]):
                values = self.kept_part(piece)
                if self.separate:
                    values = old.part(old.tensor.detach(), piece).clone()
                pieces.append(MasterSlice(old.group, piece, nn.Parameter(values)))
                if old.tensor in inner.state:
                    inner.state[pieces[-1].tensor] = {
                        kind: (old.part(value, piece) if value.shape == old.tensor.shape else value).clone()
                        if isinstance(value, Tensor)
                        else value
                        for kind, value in inner.state[old.tensor].items()
                    }
            inner.state.pop(old.tensor, None)
            params = inner.param_groups[old.group]["params"]
            at = next(at for at, tensor in enumerate(params) if tensor is old.tensor)
            params[at : at + 1] = [new.tensor for new in pieces]
            self.masters += pieces
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
