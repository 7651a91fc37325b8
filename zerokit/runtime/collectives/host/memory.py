"""The route within a node: each rank reads the pieces that the others offer.

It reads where it would wait, and where it starts the next reduction. A reduction's `wait` returns when its bucket has
been taken; gathered pieces are free to change after `wait_for_readers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.runtime.collectives.host.node import Neighbours
from zerokit.runtime.collectives.host.progress import HostHop, HostRoute, Progress
from zerokit.runtime.collectives.route import Kind, Parcels, Wire

_Read: TypeAlias = Callable[[Mapping[int, int]], None]
_CHUNK_BYTES = 1 << 19
"""What is read and added at a time: small enough to stay in a core's cache in between."""


class MemoryRoute(HostRoute):
    """An axis whose ranks read each other's memory, and sum while they read."""

    name = "memory"

    def __init__(self, group: dist.ProcessGroup, progress: Progress, neighbours: Neighbours) -> None:
        super().__init__(group, progress)
        self.neighbours = neighbours
        self._offered: dict[tuple[Kind, int], _Reading] = {}
        """What others may still be reading from, reductions apart: these are waited for where they end."""

    def wait_for_readers(self, unit: int | None = None) -> None:
        for each in list(self._offered) if unit is None else [(Kind.ALL_GATHER, unit)]:
            self._wait_for_readers(each)

    def _wait_for_readers(self, each: tuple[Kind, int]) -> None:
        reading = self._offered.get(each)
        if reading is not None and not reading.taken():
            with self.reporter.waiting(f"end of the {each[0].of(each[1])}"):
                self.progress.until(reading.taken, reading)
        # A second hop that began meanwhile may have made another offer.
        if self._offered.get(each) is reading:
            self._offered.pop(each, None)

    def _gather(self, pieces: Sequence[Tensor], unit: int, finish: Callable[[], None]) -> _Reading:
        def read(addresses: Mapping[int, int]) -> None:
            for peer, address in addresses.items():
                self.neighbours.read(peer, address, pieces[peer])
            finish()

        return self._offer(Kind.ALL_GATHER, unit, pieces[self.rank], read)

    def _exchange(self, kind: Kind, unit: int, parcels: Parcels, finish: Callable[[], None]) -> _Reading:
        def read(addresses: Mapping[int, int]) -> None:
            for peer, start, into in parcels.receives:
                self.neighbours.read(peer, addresses[peer] + start * into.element_size(), into)
            finish()

        return self._offer(kind, unit, parcels.memory, read)

    def _offer(self, kind: Kind, unit: int, offered: Tensor, read: _Read) -> _Reading:
        # The board has one address a kind and unit: others would read this offer for the last.
        self._wait_for_readers((kind, unit))
        reading = self._offered[kind, unit] = _Reading(self.neighbours, kind, unit, offered, read)
        return reading

    def _reduce(self, pieces: Sequence[Tensor], out: Tensor, unit: int, wire: Wire) -> _Reading:
        own = pieces[self.rank]
        # Where every rank has its part of what this one sums.
        offset = sum(piece.nbytes for piece in pieces[: self.rank])
        first = next((piece for piece in pieces if piece.numel()), own)  # an empty one has no address

        def read(offers: Mapping[int, int]) -> None:
            addresses = {peer: address + offset for peer, address in offers.items()}
            if out.device == own.device:
                self._sum(own, out, addresses, wire)
            else:
                total = own if own.dtype == out.dtype else torch.empty(out.shape, dtype=out.dtype)
                self._sum(own, total, addresses, wire)
                out.copy_(total)

        return _Reading(self.neighbours, Kind.REDUCE_SCATTER, unit, first, read)

    def _sum(self, own: Tensor, out: Tensor, addresses: Mapping[int, int], wire: Wire) -> None:
        """Sum `own` and the others' terms at `addresses`, in rank order, into `out`, which may be wider."""
        widens = own.dtype != out.dtype
        chunk = _CHUNK_BYTES // out.element_size() // wire.block * wire.block
        totals = torch.empty(min(chunk, out.numel()), dtype=out.dtype)
        arrivals = torch.empty(wire.packed_numel(totals.numel()), dtype=own.dtype)
        for start in range(0, out.numel(), chunk):
            target = out[start : start + chunk]
            total = target if widens else totals[: target.numel()]
            begin = wire.packed_numel(start)
            mine = own[begin : begin + wire.packed_numel(target.numel())]
            running = mine
            for rank in range(self.size):
                term = mine
                if rank != self.rank:
                    term = arrivals[: mine.numel()] if widens or rank else total
                    self.neighbours.read(rank, addresses[rank] + begin * own.element_size(), term)
                if widens:
                    wire.unpack(term, total, add=rank > 0)
                elif not rank:
                    running = term
                else:
                    running = torch.add(running, term, out=target if rank == self.size - 1 else total)


class _Reading(HostHop):
    """One collective: this rank's offer to the others, and what it reads of theirs, at the latest when it waits."""

    attended = True

    def __init__(self, neighbours: Neighbours, kind: Kind, unit: int, offered: Tensor, read: _Read) -> None:
        self._neighbours, self._kind, self.unit, self.name = neighbours, kind, unit, kind.of(unit)
        self._offered = offered  # kept for the others
        self._read: _Read | None = read
        self._cells, self._own = neighbours.cells, neighbours.cell(neighbours.rank, kind, unit)
        self._theirs = {peer: neighbours.cell(peer, kind, unit) for peer in neighbours.peers}
        self._count = self._cells[self._own] + 1
        self._cells[self._own + 1] = offered.data_ptr()
        self._cells[self._own] = self._count  # last: who sees it sees the address (x86 keeps stores in order)

    def taken(self) -> bool:
        """Whether all others have read what this rank has offered."""
        return all(self._cells[cell + 2] >= self._count for cell in self._theirs.values())

    def require_alive(self) -> None:
        self._neighbours.require_alive()

    def attempt(self) -> bool:
        if self._read is not None:
            if any(self._cells[cell] < self._count for cell in self._theirs.values()):
                return False
            self._read({peer: self._cells[cell + 1] for peer, cell in self._theirs.items()})
            self._read = None
            self._cells[self._own + 2] = self._count
        return True

    def released(self) -> bool:
        return self._kind is not Kind.REDUCE_SCATTER or self.taken()
