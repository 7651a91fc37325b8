"""Every byte that the runtime sends: which algorithm serves on which backend, and the count of it.

Tensors are whole units or gradients of them: `world` equal pieces, piece r belonging to rank r.

* NCCL: its own in-place all-gather and reduce-scatter, on a stream and a communicator each.
* gloo: point-to-point, in place. gloo's all-gather copies through scratch memory and its reduce-scatter is an
  all-reduce plus a slice; sending each piece straight to its owner takes a half to a third of their time, and
  sums can go in rank order, so that results do not depend on how the line is bucketed. The tag of a message names
  the unit and its turn: ranks that disagree time out, they cannot swap contents.
* fake: nothing moves; for predictions at any world size in one process.
"""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.errors import UsageError
from zerokit.runtime.watch import Watch

_TURNS = 1 << 15
_UNITS = 1 << 14
_HASH_FACTOR, _HASH_MODULUS = 1_000_003, (1 << 31) - 1


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Return when the result may be used by work issued after this call. Call it once."""


@dataclass(slots=True)
class Counters:
    """What was received, summed over all ranks (each takes part in each collective): elements and bytes of payload.

    `received_bytes` is what arrived at this rank alone, padding included; `control_*` are the small messages beside.
    """

    calls: Counter[str] = field(default_factory=Counter)
    elements: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    received_bytes: int = 0
    control_calls: int = 0
    control_bytes: int = 0


class Collectives:
    """What the backends share: the group, the count, and the small control messages."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, watch: Watch) -> None:
        self.group = group
        self.device = device
        self.watch = watch
        self.rank = group.rank()
        self.world = group.size()
        self.counters = Counters()
        self._schedule = [0, 0]
        self._side_group: dist.ProcessGroup | None = None

    @property
    def schedule(self) -> int:
        """A rolling hash of the collectives so far. Gathers and reductions may interleave in different ways."""
        return sum(self._schedule)

    def all_gather(self, whole: Tensor, unit: int, payload: Sequence[int]) -> Work:
        """Fill `whole` [world × shard] in place: this rank's piece is there, the others' pieces arrive.

        `payload` gives each rank's elements without padding, for the count.
        """
        self._count("all_gather", whole, payload)
        self._schedule[0] = (self._schedule[0] * _HASH_FACTOR + unit + 1) % _HASH_MODULUS
        if not whole.numel():
            return _Done()
        return self._all_gather(whole, unit)

    def reduce_scatter(
        self, bucket: Tensor, out: Tensor, unit: int, payload: Sequence[int], *, add: bool
    ) -> Work:
        """Write (or add) the ranks' sum of this rank's piece of `bucket` [world × shard] to `out` [shard].

        `out` may be that piece of `bucket` itself, unless `add`. The bucket's contents are lost.
        """
        self._count("reduce_scatter", bucket, payload)
        self._schedule[1] = (self._schedule[1] * _HASH_FACTOR + unit + 1) % _HASH_MODULUS
        if not bucket.numel():
            return _Done()
        return self._reduce_scatter(bucket, out, unit, add)

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce a few control values in place."""
        self._count_control(values)
        if self.world > 1:
            with self.watch.waiting("all_reduce of control values"):
                dist.all_reduce(values, op=op, group=self.group)

    def broadcast(self, values: Tensor) -> None:
        """Send rank 0's `values` to all, in place; at construction, loading and recording only."""
        self._count_control(values)
        if self.world > 1:
            with self.watch.waiting("broadcast"):
                dist.broadcast(values, group=self.group, group_src=0)

    def all_gather_objects(self, value: object) -> list[object]:
        """Every rank's `value`, in rank order; for error messages, never while training."""
        gathered: list[object] = [None] * self.world
        with self.watch.waiting("all_gather_objects"):
            dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def broadcast_list(self, numbers: Sequence[int]) -> list[int]:
        """Rank 0's list; the ranks' lists may differ in length."""
        length = torch.tensor([len(numbers)], device=self.device)
        self.broadcast(length)
        values = torch.zeros(int(length.item()), dtype=torch.int64, device=self.device)
        if self.rank == 0:
            values.copy_(torch.tensor(list(numbers), dtype=torch.int64))
        self.broadcast(values)
        return [int(number) for number in values.tolist()]

    def side_group(self) -> dist.ProcessGroup:
        """A gloo group over the same ranks, for what is said beside the training; made at its first use, by all."""
        if self._side_group is None:
            with self.watch.waiting("creation of a communicator"):
                self._side_group = _clone(self.group, "gloo", None)
        return self._side_group

    def _count(self, operation: str, whole: Tensor, payload: Sequence[int]) -> None:
        """In both operations each element of payload arrives at, or comes from, every rank but one."""
        elements = (self.world - 1) * sum(payload)
        self.counters.calls[operation] += 1
        self.counters.elements[operation] += elements
        self.counters.bytes[operation] += elements * whole.element_size()
        self.counters.received_bytes += (
            (self.world - 1) * (whole.numel() // self.world) * whole.element_size()
        )

    def _count_control(self, values: Tensor) -> None:
        self.counters.control_calls += 1
        self.counters.control_bytes += values.numel() * values.element_size() * (self.world - 1)

    def _all_gather(self, whole: Tensor, unit: int) -> Work:
        raise NotImplementedError(f"{type(self).__name__} defines no all-gather")

    def _reduce_scatter(self, bucket: Tensor, out: Tensor, unit: int, add: bool) -> Work:
        raise NotImplementedError(f"{type(self).__name__} defines no reduce-scatter")


def make_collectives(
    group: dist.ProcessGroup, device: torch.device, timeout: datetime.timedelta | None
) -> Collectives:
    """The collectives that serve `device` over communicators of their own, made like `group`."""
    backend = _backend_of(group, device)
    watch = Watch(group)
    if timeout is None and backend != "fake":
        # A new group would wait for the backend's default time, however short the given group's is.
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
    if backend == "fake":
        return FakeCollectives(group, device, watch)
    if backend == "gloo":
        with watch.waiting("creation of a communicator"):
            clone = _clone(group, "gloo", timeout)
        return GlooCollectives(clone, device, watch)
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


def _clone(group: dist.ProcessGroup, backend: str, timeout: datetime.timedelta | None) -> dist.ProcessGroup:
    """A communicator of our own over the same ranks: nobody else's messages can get in between."""
    ranks = dist.get_process_group_ranks(group)
    whole_world = len(ranks) == dist.get_world_size()
    clone = dist.new_group(ranks, backend=backend, timeout=timeout, use_local_synchronization=not whole_world)
    assert isinstance(clone, dist.ProcessGroup)
    return clone


class _Done:
    def wait(self) -> None:
        pass


class FakeCollectives(Collectives):
    """One rank of any world size in one process: results are whatever the memory holds."""

    def _all_gather(self, whole: Tensor, unit: int) -> Work:
        return _Done()

    def _reduce_scatter(self, bucket: Tensor, out: Tensor, unit: int, add: bool) -> Work:
        own = bucket.view(self.world, -1)[self.rank]
        if add:
            out.add_(own)
        elif out.data_ptr() != own.data_ptr():
            out.copy_(own)
        return _Done()

    def all_gather_objects(self, value: object) -> list[object]:
        return [value] * self.world

    def broadcast_list(self, numbers: Sequence[int]) -> list[int]:
        return list(numbers)


class GlooCollectives(Collectives):
    """Point-to-point messages in place; CUDA tensors travel through host memory."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, watch: Watch) -> None:
        super().__init__(group, device, watch)
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


class NcclCollectives(Collectives):
    """NCCL on two streams, gathers on one and reductions on the other, ordered by events alone."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, watch: Watch, timeout: datetime.timedelta | None
    ) -> None:
        super().__init__(_clone(group, "nccl", timeout), device, watch)
        self._gather_group = _clone(group, "nccl", timeout)
        self._reduce_group = _clone(group, "nccl", timeout)
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
