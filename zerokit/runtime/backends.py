"""Which algorithm serves on which backend.

* NCCL: its own in-place all-gather and reduce-scatter, on a stream and a communicator each.
* gloo: point-to-point, in place. gloo's all-gather copies through scratch memory and its reduce-scatter is an
  all-reduce plus a slice; sending each piece straight to its owner takes a half to a third of their time, and
  sums can go in rank order, so that results do not depend on how the line is bucketed. The tag of a message names
  the unit and its turn: ranks that disagree time out, they cannot swap contents.
* gloo, all ranks on one host: each rank reads the others' pieces out of their memory; gloo carries control values.
* fake: nothing moves; for predictions at any world size in one process.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.errors import UsageError
from zerokit.runtime.collectives import Collectives, Done, Work, clone
from zerokit.runtime.neighbours import Kind, Neighbours, meet
from zerokit.runtime.watch import Watch

_TURNS = 1 << 15
_UNITS = 1 << 14
_CHUNK_BYTES = 1 << 19
"""What is read and added at a time: small enough to stay in a core's cache in between."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 1e-3


def make_collectives(
    group: dist.ProcessGroup, device: torch.device, timeout: datetime.timedelta | None, *, units: int
) -> Collectives:
    """The collectives that serve `device` over communicators of their own, made like `group`, for `units` units."""
    backend = _backend_of(group, device)
    watch = Watch(group)
    if timeout is None and backend != "fake":
        # A new group would wait for the backend's default time, however short the given group's is.
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
    waits = timeout or dist.default_pg_timeout
    if backend == "fake":
        return FakeCollectives(group, device, watch, waits)
    if backend == "gloo":
        with watch.waiting("creation of a communicator"):
            own = clone(group, "gloo", timeout)
            neighbours = meet(own, units)
        if neighbours is None:
            return GlooCollectives(own, device, watch, waits)
        return HostCollectives(own, device, watch, neighbours, waits)
    if backend == "nccl":
        with watch.waiting("creation of communicators"):
            return NcclCollectives(group, device, watch, timeout)
    raise UsageError(
        f"zerokit has no collectives for backend {backend!r} on {device.type}: "
        "initialise the process group with 'nccl' (CUDA) or 'gloo'"
    )


def _backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that `group` uses for `device`: a group may hold "cpu:gloo,cuda:nccl"."""
    name = dist.get_backend_config(group)
    by_device = dict(part.split(":", 1) for part in name.split(",") if ":" in part)
    return by_device.get(device.type, name).lower()


class FakeCollectives(Collectives):
    """One rank of any world size in one process: results are whatever the memory holds."""

    def _all_gather(self, whole: Tensor, unit: int) -> Work:
        return Done()

    def _reduce_scatter(self, bucket: Tensor, out: Tensor, unit: int, add: bool) -> Work:
        own = bucket.view(self.world, -1)[self.rank]
        if add:
            out.add_(own)
        elif out.data_ptr() != own.data_ptr():
            out.copy_(own)
        return Done()

    def agree(self, what: str) -> None:
        pass

    def all_gather_objects(self, value: object) -> list[object]:
        return [value] * self.world

    def broadcast_list(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)


class GlooCollectives(Collectives):
    """Point-to-point messages in place; CUDA tensors travel through host memory."""

    route = "sockets"

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, watch: Watch, timeout: datetime.timedelta
    ) -> None:
        super().__init__(group, device, watch, timeout)
        # Ranks may interleave gathers and reductions differently; each kind keeps its own order.
        self._turns = [0, 0]
        self._peers = [rank for rank in range(self.world) if rank != self.rank]

    def _tag(self, kind: int, unit: int) -> int:
        self._turns[kind] = (self._turns[kind] + 1) % _TURNS
        return (self._turns[kind] * _UNITS + unit % _UNITS) * 2 + kind

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        host = values.cpu()
        super().all_reduce(host, op)
        if host is not values:
            values.copy_(host)

    def broadcast(self, values: Tensor) -> None:
        host = values.cpu()
        super().broadcast(host)
        if host is not values:
            values.copy_(host)

    def _all_gather(self, whole: Tensor, unit: int) -> Work:
        host = whole.cpu()  # the tensor itself where it is on the host already
        pieces = host.view(self.world, -1)
        tag = self._tag(0, unit)
        name = f"all-gather of unit {unit}"
        with self.watch.waiting(name):
            receives = [self.group.recv([pieces[peer]], peer, tag) for peer in self._peers]
            sends = [self.group.send([pieces[self.rank]], peer, tag) for peer in self._peers]

        def finish() -> None:
            if host is not whole:
                whole.copy_(host)

        return _Messages(self.watch, name, [*receives, *sends], finish, host)

    def _reduce_scatter(self, bucket: Tensor, out: Tensor, unit: int, add: bool) -> Work:
        host = bucket.cpu()
        pieces = host.view(self.world, -1)
        own = pieces[self.rank]
        tag = self._tag(1, unit)
        # The sum of the first two pieces does not care for their order, so that one of them, the first peer's,
        # may arrive where the sum is to stand: with two ranks nothing else is allocated.
        in_place = not add and host is bucket and out.data_ptr() != own.data_ptr()
        arrived = {peer: torch.empty_like(own) for peer in self._peers}
        if in_place and self._peers:
            arrived[self._peers[0]] = out
        name = f"reduce-scatter of unit {unit}"
        with self.watch.waiting(name):
            receives = [self.group.recv([arrived[peer]], peer, tag) for peer in self._peers]
            sends = [self.group.send([pieces[peer]], peer, tag) for peer in self._peers]

        def finish() -> None:
            arrived[self.rank] = own
            total = arrived[0]
            if self.world > 1:
                # Never into a piece that is still to be added.
                if in_place or (self.rank < 2 and out.data_ptr() == own.data_ptr()):
                    total = out
                torch.add(arrived[0], arrived[1], out=total)
                for rank in range(2, self.world):
                    total.add_(arrived[rank])
            if add:
                out.add_(total)
            elif total.data_ptr() != out.data_ptr():
                out.copy_(total)

        return _Messages(self.watch, name, [*receives, *sends], finish, host)


class _Messages:
    """Point-to-point messages of one collective, and what is to be done when all have arrived."""

    def __init__(
        self, watch: Watch, name: str, works: Sequence[dist.Work], finish: object, keep: Tensor
    ) -> None:
        self._watch, self._name, self._works, self._finish, self._keep = watch, name, works, finish, keep

    def wait(self) -> None:
        with self._watch.waiting(self._name):
            for work in self._works:
                work.wait()
        assert callable(self._finish)
        self._finish()


class HostCollectives(GlooCollectives):
    """All ranks on one host: pieces are read out of the others' memory, sums are formed on the way.

    Nobody works on this rank's behalf while it computes: it reads where it would wait, and where it starts the next
    reduction. What others may still read must not change: a reduction's `wait` returns when its bucket has been
    taken, and gathered pieces are free to change after `settle`.
    """

    route = "memory"

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
        self._unread: list[_Reading] = []
        self._offered: dict[int, tuple[int, Tensor]] = {}
        """Gathers that others may still be reading from: the number of the offer, and what is offered."""

    def settle(self) -> None:
        if not self._offered:
            return
        with self.watch.waiting("end of the all-gathers"):
            # A unit that this rank did not use is still to be read, so that the others may go on.
            for reading in list(self._unread):
                if reading.kind is Kind.GATHER:
                    self.until(reading.attempt)
            for unit, (count, _) in self._offered.items():
                self.until(partial(self._neighbours.taken, Kind.GATHER, unit, count))
        self._offered.clear()

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`, and read meanwhile what others wait to have read: they may wait for nothing else.

        Raises `RuntimeError` after the time-out, or when a rank has ended.
        """
        start, pause = time.monotonic(), _FIRST_PAUSE_S
        while not condition():
            for reading in list(self._unread):
                reading.attempt()
            if pause >= _LONGEST_PAUSE_S:
                try:
                    self._neighbours.require_alive()
                except RuntimeError:
                    if condition():  # it did its part and left
                        return
                    raise
            if time.monotonic() - start > self._timeout_s:
                raise RuntimeError(f"timed out after {self._timeout_s:g} s")
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)

    def _all_gather(self, whole: Tensor, unit: int) -> Work:
        host = whole.cpu()
        pieces = host.view(self.world, -1)

        def read(addresses: Mapping[int, int]) -> None:
            for peer, address in addresses.items():
                self._neighbours.read(peer, address, pieces[peer])
            if host is not whole:
                whole.copy_(host)

        count = self._neighbours.offer(Kind.GATHER, unit, pieces[self.rank])
        self._offered[unit] = count, host
        return self._start(Kind.GATHER, unit, count, host, read)

    def _reduce_scatter(self, bucket: Tensor, out: Tensor, unit: int, add: bool) -> Work:
        host = bucket.cpu()

        def read(addresses: Mapping[int, int]) -> None:
            own = host.view(self.world, -1)[self.rank]
            if out.device == host.device:
                self._sum(own, out, addresses, add=add)
            else:
                self._sum(own, own, addresses, add=False)
                out.add_(own.to(out.device)) if add else out.copy_(own)

        if self._unread:
            with self.watch.waiting("other ranks' pieces"):
                for reading in list(self._unread):
                    reading.attempt()
        count = self._neighbours.offer(Kind.REDUCE, unit, host)
        return self._start(Kind.REDUCE, unit, count, host, read)

    def _start(
        self,
        kind: Kind,
        unit: int,
        count: int,
        offered: Tensor,
        read: Callable[[Mapping[int, int]], None],
    ) -> _Reading:
        reading = _Reading(self, self._neighbours, (kind, unit, count), offered, read)
        self._unread.append(reading)
        return reading

    def drop(self, reading: _Reading) -> None:
        self._unread.remove(reading)

    def _sum(self, own: Tensor, out: Tensor, addresses: Mapping[int, int], *, add: bool) -> None:
        """Sum `own` and what stands at the same place of the others' buckets, in rank order, into `out`."""
        chunk = _CHUNK_BYTES // own.element_size()
        scratch = torch.empty(2, min(chunk, own.numel()), dtype=own.dtype)
        offset = self.rank * own.numel() * own.element_size()
        for mine, target in zip(own.split(chunk), out.split(chunk), strict=True):
            total, arrived = scratch[:, : mine.numel()]
            running: Tensor | None = None
            for rank in range(self.world):
                term = mine
                if rank != self.rank:
                    term = total if running is None else arrived
                    self._neighbours.read(rank, addresses[rank] + offset, term)
                if running is None:
                    running = term
                    continue
                last = rank == self.world - 1 and not add
                running = torch.add(running, term, out=target if last else total)
            if add:
                assert running is not None
                target.add_(running)
            offset += mine.numel() * mine.element_size()


class _Reading:
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
        """Read, if everybody has offered. Returns whether it has been read."""
        if self._read is None:
            return True
        addresses = self._neighbours.offered(*self._offer)
        if addresses is None:
            return False
        self._read(addresses)
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


class NcclCollectives(Collectives):
    """NCCL on two streams, gathers on one and reductions on the other, ordered by events alone."""

    route = "nccl"

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, watch: Watch, timeout: datetime.timedelta | None
    ) -> None:
        super().__init__(clone(group, "nccl", timeout), device, watch, timeout or dist.default_pg_timeout)
        self._gather_group = clone(group, "nccl", timeout)
        self._reduce_group = clone(group, "nccl", timeout)
        self._gather_stream = torch.cuda.Stream(device)
        self._reduce_stream = torch.cuda.Stream(device)
        # torch 2.13 renamed both and warns about the old names.
        self._all_gather_op = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        self._reduce_scatter_op = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def _all_gather(self, whole: Tensor, unit: int) -> Work:
        own = whole.view(self.world, -1)[self.rank]
        self._gather_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._gather_stream):
            self._all_gather_op(whole, own, group=self._gather_group)
            return _Event(self._gather_stream.record_event(), self.device)

    def _reduce_scatter(self, bucket: Tensor, out: Tensor, unit: int, add: bool) -> Work:
        self._reduce_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._reduce_stream):
            # Allocated and freed on this stream: the allocator cannot hand it to another one too early.
            result = torch.empty_like(out) if add else out
            self._reduce_scatter_op(result, bucket, group=self._reduce_group)
            if add:
                out.add_(result)
            return _Event(self._reduce_stream.record_event(), self.device)


class _Event:
    """Work on a side stream: waiting makes the current stream wait, not the host."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event, self._device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)
