"""Several nodes: pieces of the same node's ranks are read where they lie, those of other nodes travel through sockets.

Both happen in one collective. What a rank of the same node offers is read as soon as all of that node have offered,
into the whole unit or, in a reduction, into scratch memory; so others never wait for messages from elsewhere.
Sums are formed when everything is there, in rank order: the same bits as by any other route.
"""

from __future__ import annotations

import datetime
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.runtime.collectives.base import Work
from zerokit.runtime.collectives.board import Kind
from zerokit.runtime.collectives.host import HostCollectives, Reading
from zerokit.runtime.collectives.neighbours import Neighbours
from zerokit.runtime.watch import Watch


class NodesCollectives(HostCollectives):
    """Ranks on several nodes, some of which have more than one rank."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        watch: Watch,
        neighbours: Neighbours,
        timeout: datetime.timedelta,
    ) -> None:
        super().__init__(group, device, watch, neighbours, timeout)
        self.route = f"{neighbours.route} and sockets"
        self._far = [peer for peer in self._peers if peer not in neighbours.peers]
        self._waiter = _Waiter()

    def await_messages(self, works: Sequence[dist.Work]) -> None:
        """Wait for messages, and read meanwhile what ranks of this node wait to have read."""
        arrival = self._waiter.begin(works)
        self.until(arrival.done.is_set, arrival.done.wait, from_node=False)
        if arrival.error is not None:
            raise arrival.error

    def _all_gather(self, whole: Tensor, unit: int) -> Work:
        host = self.own_on_host(whole)
        pieces = host.view(self.world, -1)
        name = f"all-gather of unit {unit}"
        messages = self._post(Kind.GATHER, unit, name, pieces, dict.fromkeys(self._far, pieces[self.rank]))

        def read(numbers: Mapping[int, int]) -> None:
            for peer, number in numbers.items():
                self._neighbours.read(peer, number, pieces[peer])

        finish = partial(self.take_others, host, whole)
        return _Joined(self, name, self._offer_gather(unit, host, read), messages, finish)

    def _reduce_scatter(self, bucket: Tensor, out: Tensor, unit: int, add: bool, wire: torch.dtype) -> Work:
        host = bucket.to("cpu", wire)
        pieces = host.view(self.world, -1)
        own = pieces[self.rank]
        arrived = torch.empty_like(pieces)
        name = f"reduce-scatter of unit {unit}"
        messages = self._post(Kind.REDUCE, unit, name, arrived, {peer: pieces[peer] for peer in self._far})

        def read(numbers: Mapping[int, int]) -> None:
            offset = self.rank * own.numel() * own.element_size()
            for peer, number in numbers.items():
                self._neighbours.read(peer, number + offset, arrived[peer])

        def finish() -> None:
            arrived[self.rank].copy_(own)
            total = arrived[0].to(out.dtype)
            for piece in arrived[1:]:
                total.add_(piece)
            out.add_(total) if add else out.copy_(total)

        return _Joined(self, name, self._start_reduction(unit, host, read), messages, finish)

    def _post(
        self, kind: Kind, unit: int, name: str, into: Tensor, outgoing: Mapping[int, Tensor]
    ) -> list[dist.Work]:
        """Start the messages of one collective: row r of `into` is where those of rank r arrive."""
        tag = self._tag(kind, unit)
        with self.watch.waiting(name):
            receives = [self.group.recv([into[peer]], peer, tag) for peer in self._far]
            sends = [self.group.send([outgoing[peer]], peer, tag) for peer in self._far]
        return [*receives, *sends]


class _Joined:
    """One collective by both ways, and what is to be done when everything is there."""

    def __init__(
        self,
        collectives: NodesCollectives,
        name: str,
        reading: Reading,
        messages: Sequence[dist.Work],
        finish: Callable[[], None],
    ) -> None:
        self._collectives, self._name, self.reading = collectives, name, reading
        self._messages, self._finish = messages, finish

    def wait(self) -> None:
        self.reading.wait()
        with self._collectives.watch.waiting(self._name):
            self._collectives.await_messages(self._messages)
        self._finish()


class _Arrival:
    """Messages that the waiter waits for."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.works = works
        self.done = threading.Event()
        self.error: Exception | None = None


class _Waiter:
    """A thread that waits for gloo's messages, which offer no way to poll for their arrival.

    It waits only while this rank does, too, so nothing is left in a call to gloo when the program ends.
    """

    def __init__(self) -> None:
        self._orders: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, works: Sequence[dist.Work]) -> _Arrival:
        if self._thread is None:
            self._thread = threading.Thread(target=_wait_for_each, args=(self._orders,), daemon=True)
            self._thread.start()
            weakref.finalize(self, self._orders.put, None)
        arrival = _Arrival(works)
        self._orders.put(arrival)
        return arrival


def _wait_for_each(orders: queue.SimpleQueue[_Arrival | None]) -> None:
    while (arrival := orders.get()) is not None:
        try:
            for work in arrival.works:
                work.wait()
        except Exception as error:  # raised again by the rank that waits
            arrival.error = error
        arrival.done.set()
        del arrival
