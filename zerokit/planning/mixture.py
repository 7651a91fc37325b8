"""Plans cells on different devices: batches in proportion to speed, and shares to the memory that then stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from zerokit.cuts import reduced
from zerokit.planning.cells import Cell, PlannedCell, Question
from zerokit.planning.estimates import Estimates, Setup, division_of, knows_way, node_room
from zerokit.planning.hardware import Cluster
from zerokit.planning.kinds import Kind, by_rank, deal, paces_of, shares_of
from zerokit.planning.memory import PlannedMemory
from zerokit.planning.mixed import Equal, Mixed, Part, tightest

_T = TypeVar("_T")


class Mixture:
    """Plans cells of a question whose ranks have several kinds of devices."""

    def __init__(self, estimates: Estimates, question: Question) -> None:
        self._estimates, self._question = estimates, question
        self._kinds, self._numbers = question.kinds, by_rank(question.kinds)

    def plan(self, cell: Cell) -> PlannedCell:
        """The shares and batches of a cell, its memory by kind, and its time where it fits."""
        equal_setup, mean = self._estimates.setup(cell), [cell.micro_batch] * len(self._kinds)
        equal = self._parts(cell, equal_setup, mean)
        paces = self._paces(cell, equal_setup)
        pace = self._of_ranks(paces)
        batches = deal(cell.micro_batch * self._question.world, pace)
        most = [max(batches[rank] for rank in kind.ranks) for kind in self._kinds]
        shares = reduced(self._question.world, self._of_ranks(self._shares(cell, equal_setup, most)))
        setup = self._estimates.setup(cell, shares)
        parts = self._timed(cell, setup, self._parts(cell, setup, most, shares))
        tight = tightest(parts)
        beside = Equal(
            _lacking(equal),
            _lacking(self._parts(cell, equal_setup, most)),
            self._longer(self._timed(cell, equal_setup, equal), parts, paces),
        )
        along = shares[: cell.mesh.inner] if cell.mesh.outer > 1 else shares
        planned = PlannedCell(
            cell,
            tight.memory,
            tight.room_bytes,
            division=division_of(setup),
            away_room_bytes=tight.away_room_bytes,
            mixed=Mixed(along, pace, batches, tuple(parts), beside),
        )
        slowest = max((part.time for part in parts if part.time), key=lambda time: time.total_s, default=None)
        return planned if slowest is None else self._estimates.timed(planned, slowest)

    def _of_ranks(self, values: Sequence[_T]) -> tuple[_T, ...]:
        """The values of kinds, by rank."""
        return tuple(values[number] for number in self._numbers)

    def _cluster(self, kind: Kind) -> Cluster:
        """The links are those of all, the way to the host is that of the kind."""
        return replace(self._question.cluster, device=kind.device)

    # ---- speeds

    def _paces(self, cell: Cell, setup: Setup) -> tuple[float, ...]:
        """The speeds of kinds at computing, or their peaks where a speed is not known; equal if these are not."""
        speeds = [kind.efficiencies.get(cell.precision) for kind in self._kinds]
        peaks = [kind.device.flops.get(cell.precision, 0.0) for kind in self._kinds]
        if all(speeds):
            computed = [
                self._estimates.time(cell, setup, self._cluster(kind), speed, kind.ranks).compute_s
                for kind, speed in zip(self._kinds, speeds, strict=True)
                if speed is not None
            ]
            peaks = [1 / seconds for seconds in computed]
        return paces_of(peaks) if all(peaks) else (1.0,) * len(peaks)

    def _timed(self, cell: Cell, setup: Setup, parts: Sequence[Part]) -> list[Part]:
        """The parts with the times of their steps, where all fit and all speeds are known."""
        timed = []
        for part in parts:
            speed, cluster = part.kind.efficiencies.get(cell.precision), self._cluster(part.kind)
            if part.missing_bytes or speed is None or not knows_way(cluster, cell.states):
                return list(parts)
            time = self._estimates.time(cell, setup, cluster, speed, part.kind.ranks, part.samples)
            timed.append(replace(part, time=time))
        return timed

    def _longer(self, equal: Sequence[Part], parts: Sequence[Part], paces: Sequence[float]) -> float | None:
        """How many times as long equal ranks take; None where one of both does not fit."""
        if any(part.missing_bytes for part in (*equal, *parts)):
            return None
        return _seconds(equal, paces) / _seconds(parts, paces)

    # ---- memory

    def _parts(
        self, cell: Cell, setup: Setup, samples: Sequence[int], shares: Sequence[int] = ()
    ) -> list[Part]:
        parts = [
            Part(
                kind,
                shares[kind.ranks[0]] if shares else 1,
                count,
                self._estimates.memory(cell, setup, kind.ranks, count),
            )
            for kind, count in zip(self._kinds, samples, strict=True)
        ]
        rooms = self._away_rooms(cell, [part.memory for part in parts])
        return [replace(part, away_room_bytes=room) for part, room in zip(parts, rooms, strict=True)]

    def _shares(self, cell: Cell, equal: Setup, samples: Sequence[int]) -> tuple[int, ...]:
        """Shares in proportion to what stays of each device beside its samples and all that is not sharded."""
        if not any(len(equal.placement.of_unit(u.index).owners(u)) > 1 for u in equal.layout.units):
            return (1,) * len(self._kinds)
        spare = []
        for number, (kind, count) in enumerate(zip(self._kinds, samples, strict=True)):
            without = self._of_ranks([int(other != number) for other in range(len(self._kinds))])
            setup = self._estimates.setup(cell, without)
            spare.append(
                kind.device.memory_bytes - self._estimates.memory(cell, setup, kind.ranks, count).needed
            )
        return shares_of(spare)

    def _away_rooms(self, cell: Cell, memories: Sequence[PlannedMemory]) -> list[int | None]:
        """Each kind's part of the room on a node's host or disk, in proportion to what it keeps there."""
        room, per_node = node_room(self._question.cluster, cell.states), self._question.cluster.ranks_per_node
        if room is None:
            return [None] * len(memories)
        away = [memories[number].away for number in self._numbers]
        nodes = [sum(away[at : at + per_node]) for at in range(0, len(away), per_node)]
        fullest = [max(nodes[rank // per_node] for rank in kind.ranks) for kind in self._kinds]
        return [
            room * memory.away // total if total else room
            for memory, total in zip(memories, fullest, strict=True)
        ]


def _lacking(parts: Sequence[Part]) -> Part | None:
    tight = tightest(parts)
    return tight if tight.missing_bytes else None


def _seconds(parts: Sequence[Part], paces: Sequence[float]) -> float:
    """The time of a step, or what it takes to compute by these paces where no times are known."""
    return max(
        part.samples / pace if part.time is None else part.time.total_s
        for part, pace in zip(parts, paces, strict=True)
    )
