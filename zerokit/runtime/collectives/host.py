"""All ranks on one node: each reads the pieces that the others offer; gloo carries control values."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.runtime.collectives.base import Work
from zerokit.runtime.collectives.board import Kind
from zerokit.runtime.collectives.gloo import GlooCollectives
from zerokit.runtime.collectives.neighbours import Neighbours
from zerokit.runtime.watch import Watch

_CHUNK_BYTES = 1 << 19
"""What is read and added at a time: small enough to stay in a core's cache in between."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3


class HostCollectives(GlooCollectives):
    """All ranks on one node: pieces are read where the others offer them, sums are formed on the way.

    No other thread reads for this rank while it computes: it reads where it would wait, and where it starts the next
    reduction. What others may still read must not change: a reduction's `wait` returns when its bucket has been
    taken, and gathered pieces are free to change after `wait_for_readers`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        watch: Watch,
        neighbours: Neighbours,
        timeout: datetime.timedelta,
    ) -> None:
        super().__init__(group, device, watch, timeout)
        self._neighbours = neighbours
        self.route = neighbours.route
        self._unread: list[Reading] = []
        self._offered: dict[int, tuple[int, Tensor]] = {}
        """Gathers that others may still be reading from: the number of the offer, and what is offered."""

    def wait_for_readers(self) -> None:
        if self._offered:
            with self.watch.waiting("end of the all-gathers"):
                # A unit that this rank did not use is still to be read, so that the others may go on.
                for reading in list(self._unread):
                    if reading.kind is Kind.GATHER:
                        self.until(reading.attempt)
                for unit, (count, _) in self._offered.items():
                    self.until(partial(self._neighbours.taken, Kind.GATHER, unit, count))
            self._offered.clear()
        self._neighbours.trim()

    def until(
        self,
        condition: Callable[[], bool],
        pause_for: Callable[[float], object] = time.sleep,
        *,
        from_node: bool = True,
    ) -> None:
        """Wait for `condition`, and meanwhile read pending offers of the others, who may wait for just that.

        `pause_for` returns after so many seconds, or sooner. Raises `RuntimeError` after the time-out, or when a rank
        of this node has ended, unless what is waited for comes from other nodes: a rank may be done and gone.
        """
        start, pause = time.monotonic(), _FIRST_PAUSE_S
        while not condition():
            for reading in list(self._unread):
                reading.attempt()
            if pause >= _LONGEST_PAUSE_S and from_node:
                try:
                    self._neighbours.require_alive()
                except RuntimeError:
                    if condition():  # it did its part and left
                        return
                    raise
            if time.monotonic() - start > self._timeout_s:
                raise RuntimeError(f"timed out after {self._timeout_s:g} s")
            pause_for(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)

    def _all_gather(self, whole: Tensor, unit: int) -> Work:
        host = self.own_on_host(whole)
        pieces = host.view(self.world, -1)

        def read(numbers: Mapping[int, int]) -> None:
            for peer, number in numbers.items():
                self._neighbours.read(peer, number, pieces[peer])
            self.take_others(host, whole)

        return self._offer_gather(unit, host, read)

    def _offer_gather(self, unit: int, host: Tensor, read: Callable[[Mapping[int, int]], None]) -> Reading:
        """Offer this rank's piece of `host`; `read` takes the others' when they have offered theirs."""
        while self._offered:  # in order, so that those that were taken are seen at once
            earlier, (count, _) = next(iter(self._offered.items()))
            if not self._neighbours.taken(Kind.GATHER, earlier, count):
                break
            del self._offered[earlier]
        count = self._neighbours.offer_piece(unit, host.view(self.world, -1)[self.rank])
        self._offered[unit] = count, host
        return self._start(Kind.GATHER, unit, count, host, read)

    def _reduce_scatter(self, bucket: Tensor, out: Tensor, unit: int, add: bool, wire: torch.dtype) -> Work:
        host = bucket.to("cpu", wire)

        def read(numbers: Mapping[int, int]) -> None:
            own = host.view(self.world, -1)[self.rank]
            if out.device == host.device:
                self._sum(own, out, numbers, add=add)
            else:
                total = own if wire == out.dtype else torch.empty(own.shape, dtype=out.dtype)
                self._sum(own, total, numbers, add=False)
                out.add_(total.to(out.device)) if add else out.copy_(total)

        return self._start_reduction(unit, host, read)

    def _start_reduction(self, unit: int, host: Tensor, read: Callable[[Mapping[int, int]], None]) -> Reading:
        """Offer the bucket `host`; `read` takes this rank's piece of the others' when they have offered theirs."""
        if self._unread:
            with self.watch.waiting("other ranks' pieces"):
                for reading in list(self._unread):
                    reading.attempt()
        count = self._neighbours.offer_bucket(unit, host.view(self.world, -1))
        return self._start(Kind.REDUCE, unit, count, host, read)

    def _start(
        self,
        kind: Kind,
        unit: int,
        count: int,
        offered: Tensor,
        read: Callable[[Mapping[int, int]], None],
    ) -> Reading:
        reading = Reading(self, self._neighbours, (kind, unit, count), offered, read)
        self._unread.append(reading)
        return reading

    def drop(self, reading: Reading) -> None:
        self._unread.remove(reading)

    def _sum(self, own: Tensor, out: Tensor, numbers: Mapping[int, int], *, add: bool) -> None:
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
            for rank in range(self.world):
                term = mine
                if rank != self.rank:
                    scratch = total if running is None and not widens else arrived
                    term = self._neighbours.look_at(rank, numbers[rank] + offset, scratch)
                if running is None:
                    running = total.copy_(term) if widens else term
                    continue
                last = rank == self.world - 1 and not add
                running = torch.add(running, term, out=target if last else total)
            if add:
                assert running is not None
                target.add_(running)
            offset += mine.numel() * mine.element_size()


class Reading:
    """What this rank reads of one collective, at the latest when it waits."""

    def __init__(
        self,
        collectives: HostCollectives,
        neighbours: Neighbours,
        offer: tuple[Kind, int, int],
        offered: Tensor,
        read: Callable[[Mapping[int, int]], None],
    ) -> None:
        self._collectives, self._neighbours = collectives, neighbours
        self.kind = offer[0]
        self._offer = offer
        self._offered = offered  # kept for the others
        self._read: Callable[[Mapping[int, int]], None] | None = read

    def attempt(self) -> bool:
        """Read, if all ranks have offered. Returns whether it has been read."""
        if self._read is None:
            return True
        numbers = self._neighbours.offered(*self._offer)
        if numbers is None:
            return False
        self._read(numbers)
        self._read = None
        self._neighbours.take(*self._offer)
        self._collectives.drop(self)
        return True

    def wait(self) -> None:
        name = f"{'all-gather' if self.kind is Kind.GATHER else 'reduce-scatter'} of unit {self._offer[1]}"
        with self._collectives.watch.waiting(name):
            self._collectives.until(self.attempt)
            if self.kind is Kind.REDUCE:
                self._collectives.until(partial(self._neighbours.taken, *self._offer))
