"""The route over sockets: gloo's point-to-point messages, in place.

Sending each piece straight to its owner takes a half to a third of gloo's own collectives' time, and sums go in rank
order, so that results do not depend on buckets. The tag of a message names the unit and how often it has gone: ranks
that disagree time out, they cannot swap contents.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.runtime.collectives.host.progress import HostHop, HostRoute, Progress
from zerokit.runtime.collectives.route import Kind, Parcels, Wire

T = TypeVar("T")

_INLINE_BYTES = 1 << 20
"""Up to here the system takes a message at once, and a thread that posts it costs more than posting does (0.2 ms)."""
_TURNS = 1 << 14
_UNITS = 1 << 14


class SocketRoute(HostRoute):
    """An axis that sends point-to-point messages, in place."""

    name = "sockets"

    def __init__(self, group: dist.ProcessGroup, progress: Progress) -> None:
        super().__init__(group, progress)
        # Counted by unit: ranks may interleave gathers and reductions differently, and begin second hops in any order.
        self._turns: defaultdict[tuple[Kind, int], int] = defaultdict(int)
        self._poster = _Thread()
        self._waiters = [_Thread() for _ in Kind]

    def _gather(self, pieces: Sequence[Tensor], unit: int, finish: Callable[[], None]) -> _Messages:
        arriving = [(peer, pieces[peer]) for peer in self.peers]
        leaving = [(peer, pieces[self.rank]) for peer in self.peers]
        return self._send(Kind.ALL_GATHER, unit, arriving, leaving, finish)

    def _exchange(self, kind: Kind, unit: int, parcels: Parcels, finish: Callable[[], None]) -> _Messages:
        arriving = [(peer, into) for peer, _, into in parcels.receives]
        return self._send(kind, unit, arriving, parcels.outgoing(), finish)

    def _reduce(self, pieces: Sequence[Tensor], out: Tensor, unit: int, wire: Wire) -> _Messages:
        own = pieces[self.rank]
        total = out if out.device == own.device else torch.empty_like(out, device="cpu")
        widens, in_place = own.dtype != out.dtype, total.data_ptr() == own.data_ptr()
        terms = [torch.empty_like(own) if rank != self.rank else own for rank in range(self.size)]
        if self.peers and not (widens or in_place):
            # The first two pieces may be added in either order, so one of them, the first peer's, arrives directly
            # in the memory of the sum: with two ranks nothing else is allocated.
            terms[self.peers[0]] = total

        def finish() -> None:
            if widens:
                for rank, term in enumerate(terms):
                    wire.unpack(term, total, add=rank > 0)
            elif self.size == 1:
                total.copy_(own)
            else:
                # Never into a piece that is still to be added.
                into = terms[0] if in_place and self.rank > 1 else total
                torch.add(terms[0], terms[1], out=into)
                for term in terms[2:]:
                    into.add_(term)
                if into is not total:
                    total.copy_(into)
            if total is not out:
                out.copy_(total)

        arriving = [(peer, terms[peer]) for peer in self.peers]
        leaving = [(peer, pieces[peer]) for peer in self.peers]
        return self._send(Kind.REDUCE_SCATTER, unit, arriving, leaving, finish)

    def _send(
        self,
        kind: Kind,
        unit: int,
        arriving: Sequence[tuple[int, Tensor]],
        leaving: Sequence[tuple[int, Tensor]],
        finish: Callable[[], None],
    ) -> _Messages:
        """Messages from and to peers; several between two ranks arrive in their order."""
        self._turns[kind, unit] = turn = (self._turns[kind, unit] + 1) % _TURNS
        tag = (turn * _UNITS + unit % _UNITS) * len(Kind) + kind

        def post() -> list[dist.Work]:
            receives = [self.group.recv([into], peer, tag) for peer, into in arriving if into.numel()]
            return receives + [self.group.send([out], peer, tag) for peer, out in leaving if out.numel()]

        small = sum(sent.nbytes for _, sent in leaving) <= _INLINE_BYTES
        posted = _carry_out(post) if small else self._poster.begin(post)
        return _Messages(kind.of(unit), posted, self._waiters[kind], finish)


class _Messages(HostHop):
    """Point-to-point messages of one collective, and what is to be done when all have arrived."""

    def __init__(
        self,
        name: str,
        posted: Future[list[dist.Work]],
        waiter: _Thread,
        finish: Callable[[], None],
    ) -> None:
        """`posted` has the messages once they are posted."""
        self.name, self._posted, self._waiter = name, posted, waiter
        self._finish: Callable[[], None] | None = finish
        self._arrival: Future[None] | None = None

    def attempt(self) -> bool:
        if self._finish is not None:
            self._arrival = self._arrival or self._waiter.begin(self._wait_for_messages)
            if not self._arrival.done():
                return False
            self._arrival.result()
            self._end()
        return True

    def pause(self, seconds: float) -> None:
        if self._arrival is not None:
            wait([self._arrival], seconds)

    def arrive(self) -> None:
        if self._arrival is not None:
            wait([self._arrival])
        elif self._finish is not None:
            self._wait_for_messages()
            self._end()

    def _wait_for_messages(self) -> None:
        for work in self._posted.result():
            work.wait()

    def _end(self) -> None:
        assert self._finish is not None
        finish, self._finish = self._finish, None
        finish()


class _Thread:
    """A daemon that works off tasks in their order.

    One posts messages, because gloo holds a connection's lock while it moves data. One waits for messages of each kind,
    because gloo cannot be asked whether they have arrived; all were posted before, so nobody is held up.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work_off, args=(self._tasks,), daemon=True)
        weakref.finalize(self, self._tasks.put, None)

    def begin(self, function: Callable[[], T]) -> Future[T]:
        if (
            self._thread.ident is None
        ):  # asked of the thread: an interrupt may have come just before its start
            self._thread.start()
        future: Future[T] = Future()
        self._tasks.put(lambda: _carry_out(function, future))
        return future


def _carry_out(function: Callable[[], T], future: Future[T] | None = None) -> Future[T]:
    """Call a function whose error is raised again where its result is waited for, and explained there."""
    future = future or Future()
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
    return future


def _work_off(tasks: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (task := tasks.get()) is not None:
        task()
        del task
