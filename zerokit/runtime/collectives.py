"""Every byte that the runtime sends, counted here; `backends` has the algorithms.

Tensors are whole units or gradients of them: `world` equal pieces, piece r belonging to rank r.
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

from zerokit.runtime.watch import Watch

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

    route = "nowhere"
    """How tensors travel."""

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, watch: Watch, timeout: datetime.timedelta
    ) -> None:
        self.group = group
        self.device = device
        self.watch = watch
        self.rank = group.rank()
        self.world = group.size()
        self.counters = Counters()
        self._schedule = [0, 0]
        self._side_group: dist.ProcessGroup | None = None
        self._timeout_s = timeout.total_seconds()

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
            return Done()
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
            return Done()
        return self._reduce_scatter(bucket, out, unit, add)

    def settle(self) -> None:
        """Return when this rank's pieces of gathered units, and of gathered buckets, may be changed or dropped."""

    def agree(self, what: str) -> None:
        """Return when all ranks are about to do the same, unforeseen thing; else raise `ScheduleError`, soon."""
        if self.world > 1:
            self.watch.agree(what, self._timeout_s)

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
                self._side_group = clone(self.group, "gloo", None)
        return self._side_group

    def _count(self, operation: str, whole: Tensor, payload: Sequence[int]) -> None:
        """In both operations each element of payload arrives at, or comes from, every rank but one."""
        elements = (self.world - 1) * sum(payload)
        self.watch.issued += 1
        self.counters.calls[operation] += 1
        self.counters.elements[operation] += elements
        self.counters.bytes[operation] += elements * whole.element_size()
        self.counters.received_bytes += (
            (self.world - 1) * (whole.numel() // self.world) * whole.element_size()
        )

    def _count_control(self, values: Tensor) -> None:
        self.watch.issued += 1
        self.counters.control_calls += 1
        self.counters.control_bytes += values.numel() * values.element_size() * (self.world - 1)

    def _all_gather(self, whole: Tensor, unit: int) -> Work:
        raise NotImplementedError(f"{type(self).__name__} defines no all-gather")

    def _reduce_scatter(self, bucket: Tensor, out: Tensor, unit: int, add: bool) -> Work:
        raise NotImplementedError(f"{type(self).__name__} defines no reduce-scatter")


class Done:
    """Nothing to wait for."""

    def wait(self) -> None:
        pass


def clone(group: dist.ProcessGroup, backend: str, timeout: datetime.timedelta | None) -> dist.ProcessGroup:
    """A communicator of our own over the same ranks: nobody else's messages can get in between."""
    ranks = dist.get_process_group_ranks(group)
    whole_world = len(ranks) == dist.get_world_size()
    clone = dist.new_group(ranks, backend=backend, timeout=timeout, use_local_synchronization=not whole_world)
    assert isinstance(clone, dist.ProcessGroup)
    return clone
