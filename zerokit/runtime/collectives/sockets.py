"""gloo: point-to-point messages, in place; and collectives of hosts that follow each other.

gloo's all-gather copies through scratch memory and its reduce-scatter is an all-reduce plus a slice; sending each piece
straight to its owner takes a half to a third of their time, and sums can go in rank order, so that results do not
depend on how the line is bucketed. The tag of a message names the unit and how often it has gone: ranks that disagree
time out, they cannot swap contents.

[Note: nobody waits for itself] A rank that waits must go on with whatever others may wait for: pieces that it has not
read yet, and second hops that can begin because the first have arrived. All of that is in `Progress.pending`, and every
wait attempts it.
"""

from __future__ import annotations

import datetime
import queue
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.placement import Mesh
from zerokit.runtime.collectives.base import Collectives, Hop, Route, Work
from zerokit.runtime.collectives.node import Kind
from zerokit.runtime.collectives.stalls import StallReporter

T = TypeVar("T")

_TURNS = 1 << 15
_UNITS = 1 << 14
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3


class HostWork(Protocol):
    """A collective of hosts in flight."""

    kind: Kind

    @property
    def name(self) -> str: ...

    def attempt(self) -> bool:
        """Go on without waiting. Returns whether the result is there."""

    def require_alive(self) -> None:
        """Raise `RuntimeError` where it cannot arrive, because a rank has ended."""

    def wait(self) -> None: ...


class Progress:
    """What this rank must go on with while it waits; see [Note: nobody waits for itself]."""

    def __init__(self, timeout_s: float) -> None:
        self.pending: list[HostWork] = []
        self.timeout_s = timeout_s

    def attempt_all(self) -> None:
        for work in list(self.pending):
            work.attempt()

    def until(
        self,
        condition: Callable[[], bool],
        require_alive: Callable[[], None],
        pause_for: Callable[[float], object] = time.sleep,
    ) -> None:
        """Wait for `condition`, and meanwhile go on with all that is pending.

        `pause_for` returns after so many seconds, or sooner. Raises `RuntimeError` after the time-out, and what
        `require_alive` raises: only of ranks that must still act, for others may be done and gone.
        """
        start, pause = time.monotonic(), _FIRST_PAUSE_S
        while not condition():
            self.attempt_all()
            if pause >= _LONGEST_PAUSE_S:
                try:
                    require_alive()
                except RuntimeError:
                    if condition():  # it did its part and left
                        return
                    raise
            if time.monotonic() - start > self.timeout_s:
                raise RuntimeError(f"timed out after {self.timeout_s:g} s")
            pause_for(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)


class HostCollectives(Collectives):
    """Hosts: gloo carries control values; CUDA tensors travel through host memory."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        mesh: Mesh,
        routes: Sequence[Route],
        device: torch.device,
        reporter: StallReporter,
        timeout: datetime.timedelta,
        progress: Progress,
    ) -> None:
        super().__init__(group, mesh, routes, device, reporter, timeout)
        self._progress = progress

    def wait_at_most(self, seconds: float) -> None:
        self._progress.timeout_s = min(self._progress.timeout_s, seconds)

    def wait_for_readers(self) -> None:
        # A unit that this rank did not use is still to be read, so that the others may go on.
        for work in list(self._progress.pending):
            if work.kind is Kind.GATHER:
                with self.reporter.waiting(work.name):
                    self._progress.until(work.attempt, work.require_alive)
        super().wait_for_readers()

    def _before_reduction(self) -> None:
        if self._progress.pending:
            with self.reporter.waiting("other ranks' pieces"):
                self._progress.attempt_all()

    def _run(self, hops: Sequence[Hop], after: Work | None) -> Work:
        if after is not None:
            after.wait()
        if len(hops) < 2:
            return super()._run(hops, None)
        return Chain(self.reporter, self._progress, hops)


class Chain:
    """Collectives that follow each other: each begins when the one before it has brought its result."""

    def __init__(self, reporter: StallReporter, progress: Progress, hops: Sequence[Hop]) -> None:
        self._reporter, self._progress = reporter, progress
        self._started: list[Any] = [hops[0](None)]
        self._next = list(hops[1:])
        self.kind: Kind = self._started[0].kind
        progress.pending.append(self)

    @property
    def name(self) -> str:
        name: str = self._started[-1].name
        return name

    def attempt(self) -> bool:
        while self._started[-1].attempt():
            if not self._next:
                if self in self._progress.pending:
                    self._progress.pending.remove(self)
                return True
            self._started.append(self._next.pop(0)(None))
        return False

    def require_alive(self) -> None:
        self._started[-1].require_alive()

    def wait(self) -> None:
        with self._reporter.waiting(lambda: self.name):
            self._progress.until(self.attempt, self.require_alive)
        for work in self._started:
            work.wait()


class HostRoute(Route):
    """What routes of hosts share."""

    def __init__(self, group: dist.ProcessGroup, reporter: StallReporter, progress: Progress) -> None:
        super().__init__(group, reporter)
        self.progress = progress

    def all_gather(self, whole: Tensor, unit: int, own: Tensor | None, after: Work | None) -> Work:
        if own is not None and not self.in_place(own, whole):
            whole.view(self.size, -1)[self.rank].copy_(own)
        host = whole
        if whole.device.type != "cpu":
            host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
            host.view(self.size, -1)[self.rank].copy_(whole.view(self.size, -1)[self.rank])

        def take_others() -> None:
            if host is not whole:
                piece = whole.numel() // self.size
                for others in (slice(0, self.rank * piece), slice((self.rank + 1) * piece, None)):
                    whole[others].copy_(host[others], non_blocking=True)

        return self._gather(host.view(self.size, -1), unit, take_others)

    def reduce_scatter(
        self, bucket: Tensor, out: Tensor, unit: int, *, add: bool, wire: torch.dtype, after: Work | None
    ) -> Work:
        return self._reduce(bucket, bucket.to("cpu", wire).view(self.size, -1), out, unit, add=add)

    def _gather(self, pieces: Tensor, unit: int, finish: Callable[[], None]) -> Work:
        """Fill `pieces` [size × piece] on the host, of which this rank's is there, and then `finish`."""
        raise NotImplementedError

    def _reduce(self, bucket: Tensor, pieces: Tensor, out: Tensor, unit: int, *, add: bool) -> Work:
        """Sum the ranks' `pieces` [size × piece] on the host, made of `bucket`, into `out`."""
        raise NotImplementedError


class SocketRoute(HostRoute):
    """Point-to-point messages in place."""

    name = "sockets"

    def __init__(self, group: dist.ProcessGroup, reporter: StallReporter, progress: Progress) -> None:
        super().__init__(group, reporter, progress)
        # Counted by unit: ranks may interleave gathers and reductions differently, and begin second hops in any order.
        self._turns: defaultdict[tuple[Kind, int], int] = defaultdict(int)
        self._poster = _Worker()
        self._waiters = [_Worker(), _Worker()]
        self._peers = [rank for rank in range(self.size) if rank != self.rank]

    def _gather(self, pieces: Tensor, unit: int, finish: Callable[[], None]) -> Work:
        return self._exchange(
            Kind.GATHER, unit, pieces, lambda peer: pieces[peer], lambda peer: pieces[self.rank], finish
        )

    def _reduce(self, bucket: Tensor, pieces: Tensor, out: Tensor, unit: int, *, add: bool) -> Work:
        own, widens = pieces[self.rank], pieces.dtype != out.dtype
        # The first two pieces may be added in either order, so one of them, the first peer's, arrives directly
        # in the memory of the sum: with two ranks nothing else is allocated.
        direct = not add and pieces.data_ptr() == bucket.data_ptr() and out.data_ptr() != own.data_ptr()
        arrived = {peer: torch.empty_like(own) for peer in self._peers}
        if direct and self._peers:
            arrived[self._peers[0]] = out

        def finish() -> None:
            arrived[self.rank] = own
            total = arrived[0].to(out.dtype)
            if not widens and self.size > 1:
                # Never into a piece that is still to be added.
                if direct or (self.rank < 2 and out.data_ptr() == own.data_ptr()):
                    total = out
                torch.add(arrived[0], arrived[1], out=total)
            for rank in range(1 if widens else 2, self.size):
                total.add_(arrived[rank])
            if add:
                out.add_(total)
            elif total.data_ptr() != out.data_ptr():
                out.copy_(total)

        return self._exchange(
            Kind.REDUCE, unit, pieces, lambda peer: arrived[peer], lambda peer: pieces[peer], finish
        )

    def _exchange(
        self,
        kind: Kind,
        unit: int,
        keep: Tensor,
        arrives: Callable[[int], Tensor],
        leaves: Callable[[int], Tensor],
        finish: Callable[[], None],
    ) -> Work:
        self._turns[kind, unit] = turn = (self._turns[kind, unit] + 1) % _TURNS
        tag = (turn * _UNITS + unit % _UNITS) * 2 + kind
        name = f"{'all-gather' if kind is Kind.GATHER else 'reduce-scatter'} of unit {unit}"
        targets = [(peer, arrives(peer), leaves(peer)) for peer in self._peers]

        def post() -> list[dist.Work]:
            receives = [self.group.recv([into], peer, tag) for peer, into, _ in targets]
            return receives + [self.group.send([out], peer, tag) for peer, _, out in targets]

        return _Messages(self, kind, name, self._poster.begin(post), finish, keep)

    def begin(self, kind: Kind, wait: Callable[[], None]) -> _Task[None]:
        """Wait for messages in a thread."""
        return self._waiters[kind].begin(wait)


class _Messages:
    """Point-to-point messages of one collective, and what is to be done when all have arrived."""

    def __init__(
        self,
        route: SocketRoute,
        kind: Kind,
        name: str,
        posted: _Task[list[dist.Work]],
        finish: Callable[[], None],
        keep: Tensor,
    ) -> None:
        self._route, self.kind, self.name, self._posted, self._keep = route, kind, name, posted, keep
        self._finish: Callable[[], None] | None = finish
        self._arrival: _Task[None] | None = None

    def attempt(self) -> bool:
        if self._finish is None:
            return True
        if self._arrival is None:
            self._arrival = self._route.begin(self.kind, self._wait_for_messages)
        if not self._arrival.done.is_set():
            return False
        self._arrival.result()
        self._end()
        return True

    def require_alive(self) -> None:
        pass  # gloo notices

    def wait(self) -> None:
        if self._finish is None:
            return
        progress = self._route.progress
        with self._route.reporter.waiting(self.name):
            if progress.pending:
                self._arrival = self._arrival or self._route.begin(self.kind, self._wait_for_messages)
                progress.until(self.attempt, self.require_alive, self._arrival.done.wait)
                return
            self._wait_for_messages()
        self._end()

    def _wait_for_messages(self) -> None:
        for work in self._posted.result():
            work.wait()

    def _end(self) -> None:
        assert self._finish is not None
        finish, self._finish = self._finish, None
        finish()


class _Task(Generic[T]):
    """What a thread does for this rank."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self.done = threading.Event()
        self._value: T | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        assert self._function is not None
        try:
            self._value = self._function()
        except Exception as error:  # raised again by the rank that waits
            self._error = error
        self._function = None
        self.done.set()

    def result(self) -> T:
        """Wait for it. Returns what the function returned, or raises what it raised."""
        self.done.wait()
        if self._error is not None:
            raise self._error
        return cast(T, self._value)


class _Worker:
    """A thread that works off tasks in their order.

    One posts messages: gloo holds a connection's lock while it moves data, and who computes must not wait for that. One
    waits for messages of each kind, for gloo offers no way to poll for their arrival; they were posted before
    anybody waits for them, so the order of waiting holds nobody up.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, function: Callable[[], T]) -> _Task[T]:
        if self._thread is None:
            self._thread = threading.Thread(target=_work_off, args=(self._tasks,), daemon=True)
            self._thread.start()
            weakref.finalize(self, self._tasks.put, None)
        task = _Task(function)
        self._tasks.put(task)
        return task


def _work_off(tasks: queue.SimpleQueue[_Task[Any] | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task
