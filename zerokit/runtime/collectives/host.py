"""All ranks of an axis on one node: each reads the pieces that the others offer.

No other thread reads for this rank while it computes: it reads where it would wait, and where it starts the next
reduction. What others may still read must not change: a reduction's `wait` returns when its bucket has been taken, and
gathered pieces are free to change after `wait_for_readers`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.runtime.collectives.base import Work
from zerokit.runtime.collectives.node import Kind, Neighbours
from zerokit.runtime.collectives.sockets import HostRoute, Progress
from zerokit.runtime.collectives.stalls import StallReporter

_CHUNK_BYTES = 1 << 19
"""What is read and added at a time: small enough to stay in a core's cache in between."""


class MemoryRoute(HostRoute):
    """Pieces are read where the others offer them; sums are formed on the way."""

    name = "memory"

    def __init__(
        self, group: dist.ProcessGroup, reporter: StallReporter, progress: Progress, neighbours: Neighbours
    ) -> None:
        super().__init__(group, reporter, progress)
        self.neighbours = neighbours
        self._offered: dict[int, tuple[int, Tensor]] = {}
        """Gathers that others may still be reading from: the number of the offer, and what is offered."""

    def wait_for_readers(self, unit: int | None = None) -> None:
        units = [each for each in self._offered if unit in (None, each)]
        if units:
            with self.reporter.waiting("end of the all-gathers"):
                for each in units:
                    count = self._offered[each][0] if each in self._offered else 0
                    self.until(partial(self.neighbours.taken, Kind.GATHER, each, count))
                    self._offered.pop(each, None)  # or it was seen where a second hop began meanwhile

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something that ranks of this axis do."""
        self.progress.until(condition, self.neighbours.require_alive)

    def _gather(self, pieces: Tensor, unit: int, finish: Callable[[], None]) -> Work:
        while self._offered:  # in order, so that those that were taken are seen at once
            earlier, (count, _) = next(iter(self._offered.items()))
            if not self.neighbours.taken(Kind.GATHER, earlier, count):
                break
            del self._offered[earlier]

        def read(addresses: Mapping[int, int]) -> None:
            for peer, address in addresses.items():
                self.neighbours.read(peer, address, pieces[peer])
            finish()

        work = _Reading(self, Kind.GATHER, unit, pieces[self.rank], read)
        self._offered[unit] = work.count, pieces
        return work

    def _reduce(self, bucket: Tensor, pieces: Tensor, out: Tensor, unit: int, *, add: bool) -> Work:
        def read(addresses: Mapping[int, int]) -> None:
            own = pieces[self.rank]
            if out.device == own.device:
                self._sum(own, out, addresses, add=add)
            else:
                total = own if own.dtype == out.dtype else torch.empty(own.shape, dtype=out.dtype)
                self._sum(own, total, addresses, add=False)
                out.add_(total.to(out.device)) if add else out.copy_(total)

        return _Reading(self, Kind.REDUCE, unit, pieces, read)

    def _sum(self, own: Tensor, out: Tensor, addresses: Mapping[int, int], *, add: bool) -> None:
        """Sum `own` and the same elements of the others' buckets, in rank order, into `out`.

        Sums have `out`'s dtype, which may be wider than that of what is added.
        """
        widens = own.dtype != out.dtype
        chunk = _CHUNK_BYTES // out.element_size()
        totals, arrivals = (torch.empty(min(chunk, own.numel()), dtype=t.dtype) for t in (out, own))
        offset = self.rank * own.numel() * own.element_size()
        for mine, target in zip(own.split(chunk), out.split(chunk), strict=True):
            total, arrived = totals[: mine.numel()], arrivals[: mine.numel()]
            running: Tensor | None = None
            for rank in range(self.size):
                term = mine
                if rank != self.rank:
                    term = total if running is None and not widens else arrived
                    self.neighbours.read(rank, addresses[rank] + offset, term)
                if running is None:
                    running = total.copy_(term) if widens else term
                    continue
                last = rank == self.size - 1 and not add
                running = torch.add(running, term, out=target if last else total)
            if add:
                assert running is not None
                target.add_(running)
            offset += mine.numel() * mine.element_size()


class _Reading:
    """What this rank reads of one collective, at the latest when it waits."""

    def __init__(
        self,
        route: MemoryRoute,
        kind: Kind,
        unit: int,
        offered: Tensor,
        read: Callable[[Mapping[int, int]], None],
    ) -> None:
        self._route, self.kind, self._unit = route, kind, unit
        self._offered = offered  # kept for the others
        self._read: Callable[[Mapping[int, int]], None] | None = read
        self.name = f"{'all-gather' if kind is Kind.GATHER else 'reduce-scatter'} of unit {unit}"
        self.count = route.neighbours.offer(kind, unit, offered)
        route.progress.pending.append(self)

    def attempt(self) -> bool:
        """Read, if all ranks have offered. Returns whether it has been read."""
        if self._read is None:
            return True
        addresses = self._route.neighbours.offered(self.kind, self._unit, self.count)
        if addresses is None:
            return False
        self._read(addresses)
        self._read = None
        self._route.neighbours.take(self.kind, self._unit, self.count)
        self._route.progress.pending.remove(self)
        return True

    def require_alive(self) -> None:
        self._route.neighbours.require_alive()

    def wait(self) -> None:
        with self._route.reporter.waiting(self.name):
            self._route.until(self.attempt)
            if self.kind is Kind.REDUCE:
                self._route.until(partial(self._route.neighbours.taken, self.kind, self._unit, self.count))
