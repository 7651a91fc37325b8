"""Collectives on hosts: their order, and how a waiting rank continues to serve the others.

[Note: nobody waits for itself] A rank that waits must go on with whatever others may wait for: pieces that it has not
read yet, and second hops whose first ones have arrived. That is `Progress.pending`, and every wait attempts it.
"""

from __future__ import annotations

import atexit
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.layout import Cut
from zerokit.patience import Patience
from zerokit.runtime.collectives.base import Collectives
from zerokit.runtime.collectives.observer import Flight
from zerokit.runtime.collectives.route import DONE, Hop, Kind, Parcels, Route, Wire, Work
from zerokit.runtime.collectives.stalls import StallReporter
from zerokit.runtime.shards import Shards

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3


class HostHop:
    """One hop in flight: a collective over one axis."""

    name: str
    attended = False
    """Whether it arrives only where `attempt` is called, so that others wait for this rank."""

    def attempt(self) -> bool:
        """Make progress without waiting. Returns whether the result has arrived."""
        raise NotImplementedError

    def released(self) -> bool:
        """Whether no other rank still reads this rank's memory for it, once the result has arrived."""
        return True

    def pause(self, seconds: float) -> None:
        """Return after so many seconds, or sooner where something may have arrived."""
        time.sleep(seconds)

    def arrive(self) -> None:
        """Wait for the result where this rank has nothing else to go on with; may return before."""

    def require_alive(self) -> None:
        """Raise `RuntimeError` if it cannot arrive because a rank has ended. By default the route notices."""


class WatchedHop(HostHop):
    """A hop that tells a `flight` of its result."""

    def __init__(self, hop: HostHop, flight: Flight) -> None:
        self.name, self.attended, self._hop, self._flight = hop.name, hop.attended, hop, flight

    def attempt(self) -> bool:
        arrived = self._hop.attempt()
        if arrived:
            self._flight.end()
        return arrived

    def released(self) -> bool:
        return self._hop.released()

    def pause(self, seconds: float) -> None:
        self._hop.pause(seconds)

    def arrive(self) -> None:
        self._hop.arrive()

    def require_alive(self) -> None:
        self._hop.require_alive()


class Progress:
    """The collectives on which this rank must make progress while it waits; see [Note: nobody waits for itself]."""

    def __init__(self, timeout_s: float, reporter: StallReporter) -> None:
        self.pending: list[HostWork] = []
        self.timeout_s, self.reporter = timeout_s, reporter

    def wait_at_most(self, seconds: float) -> None:
        self.timeout_s = min(self.timeout_s, seconds)

    def attempt_all(self) -> None:
        for work in list(self.pending):
            work.attempt()

    def until(self, condition: Callable[[], bool], hop: HostHop) -> None:
        """Wait for `condition`, which `hop` brings about, and meanwhile go on with all that is pending.

        Raises `RuntimeError` after the time-out, or where a rank that must still act has ended.
        """
        patience, pause = Patience(self.timeout_s), _FIRST_PAUSE_S
        while not condition():
            self.attempt_all()
            if pause >= _LONGEST_PAUSE_S:
                try:
                    hop.require_alive()
                except RuntimeError:
                    if condition():  # it did its part and left
                        return
                    raise
            if patience.over:
                raise RuntimeError(f"timed out after {self.timeout_s:g} s")
            hop.pause(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)


class HostWork(HostHop):
    """A collective on hosts: a chain of hops, each of which starts when the previous one has its result."""

    def __init__(self, progress: Progress, kind: Kind, hops: Sequence[Hop]) -> None:
        self._progress, self._reporter, self.kind = progress, progress.reporter, kind
        self._started: list[HostHop] = [hops[0](None)]
        self._next = list(hops[1:])
        if self._next or self._hop.attended:
            progress.pending.append(self)

    @property
    def _hop(self) -> HostHop:
        return self._started[-1]

    def attempt(self) -> bool:
        while self._hop.attempt():
            if not self._next:
                if self in self._progress.pending:
                    self._progress.pending.remove(self)
                return True
            self._started.append(self._next.pop(0)(None))
        return False

    def finish(self) -> None:
        """Wait for the result; others may still read this rank's memory."""
        with self._reporter.waiting(lambda: self._hop.name):
            if not self._progress.pending:
                self._hop.arrive()
            self._progress.until(self.attempt, self)

    def require_alive(self) -> None:
        self._hop.require_alive()

    def pause(self, seconds: float) -> None:
        self._hop.pause(seconds)

    def wait(self) -> None:
        self.finish()
        for hop in self._started:
            if not hop.released():
                with self._reporter.waiting(hop.name):
                    self._progress.until(hop.released, hop)


class HostCollectives(Collectives):
    """Collectives on hosts: gloo carries control values, and CUDA tensors pass through host memory."""

    others_answer = True

    def __init__(self, *arguments: Any, progress: Progress) -> None:
        super().__init__(*arguments)
        self._progress = progress
        _pause_at_exit()

    def wait_at_most(self, seconds: float) -> None:
        self._progress.wait_at_most(seconds)

    def wait_for_readers(self) -> None:
        # A unit that this rank did not use is still to be read, so that the others may go on.
        for work in list(self._progress.pending):
            if work.kind is not Kind.REDUCE_SCATTER:
                work.finish()
        super().wait_for_readers()

    def _watch_hop(self, hop: Hop, flight: Flight) -> Hop:
        def start(after: Work | None) -> HostHop:
            flight.begin()
            return WatchedHop(hop(after), flight)

        return start

    def _chain(self, kind: Kind, hops: Sequence[Hop]) -> Work:
        if kind is Kind.REDUCE_SCATTER and self._progress.pending:
            with self.reporter.waiting("other ranks' pieces"):
                self._progress.attempt_all()
        return HostWork(self._progress, kind, hops) if hops else DONE


class HostRoute(Route, ABC):
    """The base of routes on hosts: tensors of a device are copied to the host and back."""

    def __init__(self, group: dist.ProcessGroup, progress: Progress) -> None:
        super().__init__(group, progress.reporter)
        self.progress = progress
        self.peers = [rank for rank in range(self.size) if rank != self.rank]

    def gather(self, whole: Shards, cut: Cut, own: Tensor | None) -> Hop:
        unit, place, pieces = whole.unit.index, self.placing(whole, cut, own), whole.pieces(cut)

        def start(after: Work | None) -> HostHop:
            place()
            return self._gather(pieces, unit, DONE.wait)

        def start_by_host(after: Work | None) -> HostHop:
            place()
            memory = torch.empty(cut.whole.numel, dtype=whole.dtype, pin_memory=True)
            arriving = memory.split([piece.numel() for piece in pieces])
            arriving[self.rank].copy_(pieces[self.rank])

            def take_others() -> None:
                for rank in self.peers:
                    pieces[rank].copy_(arriving[rank], non_blocking=True)

            return self._gather(arriving, unit, take_others)

        return start if whole.device.type == "cpu" else start_by_host

    def reduction(self, bucket: Shards, cut: Cut, out: Tensor, wire: Wire) -> Hop:
        unit = bucket.unit.index
        if wire.dtype == bucket.dtype and bucket.device.type == "cpu":
            pieces = bucket.pieces(cut)
            return lambda after: self._reduce(pieces, out, unit, wire)

        def start(after: Work | None) -> HostHop:
            packed, sizes = wire.pack_cut(bucket, cut)
            return self._reduce(packed.cpu().split(sizes), out, unit, wire)

        return start

    def exchange(self, kind: Kind, unit: int, parcels: Parcels) -> Hop:
        if parcels.memory.device.type == "cpu":
            return lambda after: self._exchange(kind, unit, parcels, DONE.wait)
        arriving = [
            (peer, start, torch.empty_like(into, device="cpu")) for peer, start, into in parcels.receives
        ]

        def take() -> None:
            for (_, _, arrived), (_, _, into) in zip(arriving, parcels.receives, strict=True):
                into.copy_(arrived, non_blocking=True)

        return lambda after: self._exchange(
            kind, unit, Parcels(parcels.memory.cpu(), parcels.sends, arriving), take
        )

    @abstractmethod
    def _exchange(self, kind: Kind, unit: int, parcels: Parcels, finish: Callable[[], None]) -> HostHop:
        """Move pieces that lie on the host, and then `finish`."""

    @abstractmethod
    def _gather(self, pieces: Sequence[Tensor], unit: int, finish: Callable[[], None]) -> HostHop:
        """Fill the ranks' `pieces` on the host, of which this rank's is there, and then `finish`."""

    @abstractmethod
    def _reduce(self, pieces: Sequence[Tensor], out: Tensor, unit: int, wire: Wire) -> HostHop:
        """Sum what the ranks' packed `pieces`, one behind the other on the host, stand for into `out`."""


@functools.cache
def _pause_at_exit() -> None:
    """Let gloo's threads drop the tensors of the last collectives before Python shuts down.

    They take Python's lock for it. From its shutdown on Python ends the threads that ask, which aborts the process
    (seen with torch 2.13 in 2 of 10 runs on a busy machine, also under DDP).
    """
    atexit.register(time.sleep, 0.05)
