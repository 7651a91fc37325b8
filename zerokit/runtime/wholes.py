"""Updates of whole tensors: pieces of gradients go to owners, and updated pieces come back (`zerokit.owners`).

All gradients leave at the beginning, so that each owner has the next tensor's while it updates one. A unit's updated
pieces leave as soon as its last tensor is updated, and every rank waits for them at the end. So a rank computes what it
owns without waiting for another rank's computation. It takes part in every exchange, whether it owns something or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerokit.formulas import Operation, operation_name
from zerokit.layout import Interval
from zerokit.owners import Move, Owners
from zerokit.placement import Axis
from zerokit.runtime.collectives import DONE, Collectives, Kind, Parcels, Work
from zerokit.runtime.collectives.base import Count
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.inner import Part, Turns
from zerokit.runtime.masters import Master, WholeMaster
from zerokit.runtime.shards import Shards
from zerokit.runtime.unit import UnitState

ValuesOf = Callable[[WholeMaster], Tensor]


class WholeTensors:
    """The tensors of all units that are updated whole: `owners` says by whom."""

    def __init__(
        self,
        units: Sequence[UnitState],
        gradients: Gradients,
        collectives: Collectives,
        owners: Owners,
        parts: Sequence[Part],
    ) -> None:
        self.owners = owners
        self._gradients, self._parts = gradients, [part for part in parts if part.whole]
        self._units = [_UnitWholes(units[index], owners, collectives) for index in owners.units]
        self._collectives = collectives

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those that update them."""
        return [part.optimizer for part in self._parts]

    def spread(self, unit: UnitState, values_of: ValuesOf, into: Shards, *, counted: bool = True) -> Work:
        """Start to write what owners have of a unit's tensors to this rank's piece of them, `into`. Collective.

        `values_of` gives the values of an owner's master [its elements]. `counted`: as traffic of a step.
        """
        own = next((one for one in self._units if one.unit is unit), None)
        return DONE if own is None else own.spread(values_of, into, counted=counted)

    def publish(self) -> None:
        """Write the masters to what every rank keeps of the parameters. Collective."""
        works = [one.spread(_values, one.unit.kept) for one in self._units]
        self._finish(works)

    def _finish(self, works: Sequence[Work]) -> None:
        for work in works:
            work.wait()
        if works:
            self._collectives.wait_for_readers()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """A context at whose end the tensors are updated; inside, gradients are on their way.

        The masters are not guarded. Whatever an optimizer raises, this rank takes part in all exchanges before.
        """
        parts = self._parts
        arrivals = [one.collect(self._gradients.units[one.unit.index].held) for one in self._units]
        returning: list[Work] = []
        try:
            yield
            turns = {part: Turns(part.optimizer) for part in parts}
            for part in parts:
                # Slices of groups that the class updates element by element; at least once, as what a class counts
                # must be alike on all ranks.
                tensors = [tensor for group in part.optimizer.param_groups for tensor in group["params"]]
                turns[part].take({tensor: tensor.grad for tensor in tensors if tensor.grad is not None})
            for one, (work, gradients) in zip(self._units, arrivals, strict=True):
                work.wait()
                one.unit.complete()  # the parameters of a unit that this rank has not used since the last step
                skipped = self._gradients.units[one.unit.index].skipped
                for part in parts:
                    # Each by itself: a class that stacks equal shapes rounds differently with their number.
                    for master in one.unit.owned:
                        if master.group in part.groups and master.whole.position not in skipped:
                            gradient = gradients.pop(master).to(master.tensor.dtype)
                            turns[part].take({master.tensor: gradient})
                gradients.clear()
                returning.append(one.spread(_values, one.unit.kept))
        finally:
            returning += [one.spread(_values, one.unit.kept) for one in self._units[len(returning) :]]
            self._finish(returning)


def _values(master: Master) -> Tensor:
    return master.values.tensor


class _UnitWholes:
    """The tensors of one unit, and what moves between this rank and others."""

    def __init__(self, unit: UnitState, owners: Owners, collectives: Collectives) -> None:
        self.unit, self._owners, self._collectives = unit, owners, collectives
        placement, mesh = unit.placement, collectives.mesh
        self._cut, self._own = owners.cut(unit.unit), unit.owner
        moves = list(owners.moves(unit.index))
        self._leaving = [move for move in moves if move.piece == self._own]
        self._arriving = [move for move in moves if move.tensor.owner == self._own]
        self._moves = bool(moves)
        inner = len(self._cut) < mesh.world
        self._route = collectives.routes[Axis.INNER] if inner else collectives.between_all
        self._peer = {
            owner: owner if inner else placement.rank_of(owner, collectives.position)
            for owner in range(len(self._cut))
        }
        self._crossings = owners.crossings(unit.index)

    def collect(self, held: Shards) -> tuple[Work, dict[WholeMaster, Tensor]]:
        """Start to bring the gradients of what this rank owns together from what ranks hold of them."""
        mine = Shards(self.unit.unit, held.at(self.unit.updated), self.unit.updated)
        memory = self._room(held.dtype)
        gradients = {}
        for master in self.unit.owned:
            flat = memory[master.whole.start : master.whole.start + master.whole.interval.numel]
            Shards(self.unit.unit, flat, master.interval).copy(mine)
            gradients[master] = flat.view(master.whole.shape)
        first = mine.interval.start
        sends = [(self._peer[move.tensor.owner], move.interval.shifted(-first)) for move in self._leaving]
        receives = [
            (
                self._peer[move.piece],
                move.interval.start - self._cut.piece(move.piece).start,
                _in_owners(move, memory),
            )
            for move in self._arriving
        ]
        return self._exchange(Kind.TO_OWNERS, Parcels(mine.tensor, sends, receives)), gradients

    def spread(self, values_of: ValuesOf, into: Shards, *, counted: bool = True) -> Work:
        """Start to write the values of the owners' masters to this rank's piece of them, `into`."""
        memory = self._room(into.dtype)
        for master in self.unit.owned:
            flat = memory[master.whole.start : master.whole.start + master.whole.interval.numel]
            flat.copy_(values_of(master))
            piece = Shards(self.unit.unit, into.at(self.unit.updated), self.unit.updated)
            piece.copy(Shards(self.unit.unit, flat, master.interval))
        sends = [(self._peer[move.piece], _place(move)) for move in self._arriving]
        receives = [
            (self._peer[move.tensor.owner], _place(move).start, into.at(move.interval))
            for move in self._leaving
        ]
        return self._exchange(Kind.FROM_OWNERS, Parcels(memory, sends, receives), counted=counted)

    def _room(self, dtype: torch.dtype) -> Tensor:
        numel = self._owners.owned_numel(self.unit.index, self._own)
        return torch.empty(numel, dtype=dtype, device=self.unit.device)

    def _exchange(self, kind: Kind, parcels: Parcels, *, counted: bool = True) -> Work:
        if not self._moves:
            return DONE
        counts = list(self._counts(kind, parcels)) if counted else []
        return self._collectives.exchange(self._route, kind, self.unit.index, parcels, counts)

    def _counts(self, kind: Kind, parcels: Parcels) -> Iterator[Count]:
        width = parcels.memory.element_size()
        received = sum(into.numel() for _, _, into in parcels.receives) * width
        for axis, elements in self._crossings.items():
            name = operation_name(kind.name.lower(), axis, self._collectives.mesh)
            moved = Operation(1, elements, elements * width)
            yield self._collectives.counter(name, kind, self.unit.index, moved, received)
            received = 0  # once


def _place(move: Move) -> Interval:
    """Where an owner has these elements among all that it owns of the unit."""
    return move.interval.shifted(move.tensor.start - move.tensor.interval.start)


def _in_owners(move: Move, memory: Tensor) -> Tensor:
    place = _place(move)
    return memory[place.start : place.stop]
