"""Updates of whole tensors: pieces of gradients go to owners, and updated pieces come back (`zerokit.owners`).

All gradients leave at the beginning, so that each owner has the next tensor's while it updates one. A unit's updated
pieces leave as soon as its last tensor is updated, and every rank waits for them at the end. So a rank computes what it
owns without waiting for another rank's computation. It takes part in every exchange, whether it owns something or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerokit.errors import ScheduleError
from zerokit.formulas import Operation, operation_name
from zerokit.layout import Interval
from zerokit.owners import Move, Owners
from zerokit.placement import Axis
from zerokit.runtime.collectives import DONE, Collectives, Kind, Parcels, Work
from zerokit.runtime.collectives.legs import Count
from zerokit.runtime.gradients import Gradients
from zerokit.runtime.inner import Part
from zerokit.runtime.masters import Master, WholeMaster
from zerokit.runtime.shards import Shards, same_place
from zerokit.runtime.turns import Turns
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
        self._gradients, self._parts = gradients, [part for part in parts if part.whole]
        self._collectives = collectives
        self._units: list[_UnitWholes] = []
        self.take_owners(units, owners)
        self.most = 0
        """Bytes that gradients and updated values took at most in the last step, on their way to owners and back."""

    def take_owners(self, units: Sequence[UnitState], owners: Owners) -> None:
        """Have these owners from now on."""
        self._units[:] = [_UnitWholes(units[index], owners, self._collectives) for index in owners.units]

    def spread(self, unit: UnitState, values_of: ValuesOf, into: Shards, *, counted: bool = True) -> Work:
        """Start to write what owners have of a unit's tensors to this rank's piece of them, `into`. Collective.

        `values_of` gives the values of an owner's master [its elements]. `counted`: as traffic of a step.
        """
        own = next((one for one in self._units if one.unit is unit), None)
        return DONE if own is None else own.spread(values_of, into, counted=counted)

    def publish(self, units: Sequence[UnitState]) -> None:
        """Write the masters of units, which are here, to what every rank keeps of the parameters. Collective."""
        present = set(units)
        self._finish([one.spread(_values, one.unit.kept) for one in self._units if one.unit in present])

    def _finish(self, works: Sequence[Work]) -> None:
        for work in works:
            work.wait()
        if works:
            self._collectives.wait_for_readers()

    @contextmanager
    def updating(self, turns: Mapping[Optimizer, Turns]) -> Iterator[Callable[[Sequence[UnitState]], None]]:
        """A context in which gradients are on their way, and whose function updates the tensors of units that are here.

        The masters are not guarded. Whatever an optimizer raises, this rank takes part in all exchanges.
        """
        arriving = {one: one.collect(self._gradients) for one in self._units if one.moves}
        returning: list[Work] = []
        held = sum(memory.nbytes for _, memory in arriving.values())
        self.most, gone = held, False

        def update(units: Sequence[UnitState]) -> None:
            nonlocal held
            present = set(units)
            for one in (one for one in self._units if one.unit in present):
                if one not in arriving:
                    arriving[one] = one.collect(self._gradients)
                    held += arriving[one][1].nbytes
                    self.most = max(self.most, held)
                self._update(one, *arriving[one], turns)
                held += one.sent_numel * one.unit.dtype.itemsize - arriving.pop(one)[1].nbytes
                self.most = max(self.most, held)
                returning.append(one.spread(_values, one.unit.kept))

        try:
            yield update
        except ScheduleError:
            gone = True  # ranks that are waited for: each further wait would take the time-out again
            raise
        finally:
            if not gone:
                rest = self._units[len(returning) :]
                returning += [work for work, _ in arriving.values()]
                self._finish([*returning, *(one.spread(_values, one.unit.kept) for one in rest)])

    def _update(self, one: _UnitWholes, work: Work, memory: Tensor, turns: Mapping[Optimizer, Turns]) -> None:
        """Step a unit's tensors once their gradients have come to `memory`."""
        work.wait()
        one.unit.complete()  # the parameters of a unit that this rank has not used since the last step
        skipped = self._gradients.units[one.unit.index].skipped
        for part in self._parts:
            # Each by itself: a class that stacks equal shapes rounds differently with their number.
            for master, gradient in one.places(memory):
                if master.group in part.groups and master.whole.position not in skipped:
                    turns[part.optimizer].take(
                        {master.tensor: gradient.to(master.tensor.dtype).view(master.whole.shape)}
                    )


def _values(master: Master) -> Tensor:
    return master.values.tensor


class _UnitWholes:
    """The tensors of one unit, and what moves between this rank and others."""

    def __init__(self, unit: UnitState, owners: Owners, collectives: Collectives) -> None:
        self.unit, self._collectives = unit, collectives
        placement, mesh = unit.placement, collectives.mesh
        self._cut, own = owners.cut(unit.unit), unit.owner
        moves = list(owners.moves(unit.index))
        self._leaving = [move for move in moves if move.piece == own]
        self._arriving = [move for move in moves if move.tensor.owner == own]
        self.moves = bool(moves)
        """Whether anything moves between ranks: else each has all of the tensors that it updates."""
        self._numel = owners.owned_numel(unit.index, own)
        self.sent_numel = self._numel if moves else 0
        """Elements of the memory from which an owner's values are sent."""
        inner = len(self._cut) < mesh.world
        self._route = collectives.routes[Axis.INNER] if inner else collectives.between_all
        self._peer = {
            owner: owner if inner else placement.rank_of(owner, collectives.position)
            for owner in range(len(self._cut))
        }
        self._crossings = owners.crossings(unit.index)

    def places(self, memory: Tensor) -> Iterator[tuple[WholeMaster, Tensor]]:
        """The masters of what this rank owns, each with its elements in `memory`, flat."""
        for master in self.unit.owned:
            start = master.whole.start
            yield master, memory[start : start + master.whole.interval.numel]

    def collect(self, gradients: Gradients) -> tuple[Work, Tensor]:
        """Start to bring the gradients of what this rank owns together, in memory of their own, as a class may write
        to them.
        """
        held = gradients.units[self.unit.index].held
        mine = Shards(self.unit.unit, held.at(self.unit.updated), self.unit.updated)
        memory = torch.empty(self._numel, dtype=held.dtype, device=held.device)
        for master, place in self.places(memory):
            master.like(place).copy(mine)
        sends = [
            (self._peer[move.tensor.owner], move.interval.shifted(-mine.interval.start))
            for move in self._leaving
        ]
        receives = [
            (
                self._peer[move.piece],
                move.interval.start - self._cut.piece(move.piece).start,
                _in_owners(move, memory),
            )
            for move in self._arriving
        ]
        return self._exchange(Kind.TO_OWNERS, Parcels(mine.tensor, sends, receives)), memory

    def spread(self, values_of: ValuesOf, into: Shards, *, counted: bool = True) -> Work:
        """Start to write the values of the owners' masters to this rank's piece of them, `into`."""
        memory = torch.empty(self.sent_numel, dtype=into.dtype, device=into.device)
        piece = Shards(self.unit.unit, into.at(self.unit.updated), self.unit.updated)
        for master, place in self.places(memory):
            values = master.like(values_of(master))
            here, there = piece.at(values.interval), values.at(piece.interval)
            if not same_place(here, there):
                here.copy_(there)
            if self.moves:
                place.copy_(values.tensor)
        sends = [(self._peer[move.piece], _place(move)) for move in self._arriving]
        receives = [
            (self._peer[move.tensor.owner], _place(move).start, into.at(move.interval))
            for move in self._leaving
        ]
        return self._exchange(Kind.FROM_OWNERS, Parcels(memory, sends, receives), counted=counted)

    def _exchange(self, kind: Kind, parcels: Parcels, *, counted: bool = True) -> Work:
        if not self.moves:
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
