"""What every route shares: the group, the count of every byte, and the small control messages.

Tensors are whole units or gradients of them: `world` equal pieces, piece r belonging to rank r.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Sequence
from contextlib import suppress
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
class Tally:
    """One kind of collective: calls, and what was received, summed over all ranks."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Counters:
    """What was received, summed over all ranks (each takes part in each collective): elements and bytes of payload.

    `received_bytes` is what arrived at this rank alone, padding included; `control_*` are the small messages beside.
    """

    by_operation: dict[str, Tally] = field(default_factory=dict)
    received_bytes: int = 0
    control_calls: int = 0
    control_bytes: int = 0


class Reading(Protocol):
    """Numbers on their way to the host."""

    def get(self) -> list[float]:
        """The numbers; waits for the device where they are not there yet."""

    def arrived(self) -> bool:
        """Whether `get` would not wait."""


class Collectives:
    """What the routes share: the group, the count, and the small control messages."""

    route = "nowhere"
    """How tensors travel."""
    runs_ahead = False
    """Whether the host issues what a device does later. Then no step may read a result on the host, small operations
    cost their launch, and what is in flight needs no memory beyond the buckets."""
    averages = False
    """Whether a reduction divides by the number of ranks."""

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
        self._side_groups: dict[str, dist.ProcessGroup] = {}
        self._timeout = timeout
        self._timeout_s = timeout.total_seconds()

    @property
    def schedule(self) -> int:
        """A rolling hash of the collectives so far. Gathers and reductions may interleave in different ways."""
        gathers, reductions = self._schedule
        return (gathers * _HASH_FACTOR + reductions) % _HASH_MODULUS

    def all_gather(
        self,
        whole: Tensor,
        unit: int,
        payload: int,
        *,
        own: Tensor | None = None,
        after: Work | None = None,
    ) -> Work:
        """Fill `whole` [world × shard]: the others' pieces arrive.

        This rank's piece is `own` [shard], or there already. `payload` is the number of elements without padding, for
        the count. The gather begins `after` a collective that nothing else waits for, if one is given.
        """
        self._count("all_gather", whole, payload, whole.dtype)
        self._schedule[0] = (self._schedule[0] * _HASH_FACTOR + unit + 1) % _HASH_MODULUS
        if not whole.numel():
            return after or Done()
        return self._gather_piece(whole, unit, own, after)

    def reduce_scatter(
        self,
        bucket: Tensor,
        out: Tensor,
        unit: int,
        payload: int,
        *,
        add: bool,
        wire: torch.dtype | None = None,
    ) -> Work:
        """Write (or add) the ranks' sum of this rank's piece of `bucket` [world × shard] to `out` [shard].

        Where the route `averages`, it is their mean: every piece counts 1 / world times. With a `wire` every rank's
        piece is rounded to that dtype, this rank's too, and they are added in `out`'s dtype, in rank order, by any
        route. One rank rounds nothing.

        `out` may be that piece of `bucket` itself, unless `add`. The other pieces are lost, their padding aside.
        """
        if wire is None or self.world == 1:
            wire = bucket.dtype
        self._count("reduce_scatter", bucket, payload, wire)
        self._schedule[1] = (self._schedule[1] * _HASH_FACTOR + unit + 1) % _HASH_MODULUS
        if not bucket.numel():
            return Done()
        return self._reduce_scatter(bucket, out, unit, add, wire)

    def expect_exchanges(self) -> None:
        """Prepare now, and not in a step, for reductions with a `wire`. All ranks call it."""

    def wait_for_readers(self) -> None:
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

    def agree_soon(self, values: Sequence[float], flag: Tensor | None = None) -> Reading:
        """The ranks' greatest of each of `values`, and of a 0-d tensor on the device."""
        control = torch.tensor([*values, 0.0 if flag is None else float(flag)], dtype=torch.float64)
        self.all_reduce(control, dist.ReduceOp.MAX)
        return Numbers(control)

    def read(self, values: Tensor) -> list[float]:
        """A few values on the host, now: never in a step, where the route runs ahead."""
        numbers: list[float] = values.flatten().tolist()
        return numbers

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
        values = torch.zeros(int(self.read(length)[0]), dtype=torch.int64, device=self.device)
        if self.rank == 0:
            values.copy_(torch.tensor(list(numbers), dtype=torch.int64))
        self.broadcast(values)
        return [int(number) for number in self.read(values)]

    def side_group(self, purpose: str) -> dist.ProcessGroup:
        """A gloo group over the same ranks, for messages beside the training; made at its first use, by all.

        Raises `ScheduleError`, naming the ranks that do not come, when they have not within the time-out.
        """
        group = self._side_groups.get(purpose)
        if group is not None and self.watch.noted(f"dropped/{group.group_name}"):
            # By a rank for which this one did not come in time.
            self.drop_side_group(purpose)
        if purpose not in self._side_groups:
            self.watch.agree(f"makes the group for {purpose}", self._timeout_s)
            with self.watch.waiting(f"group for {purpose}"):
                self._side_groups[purpose] = clone(self.group, "gloo", self._timeout)
        return self._side_groups[purpose]

    def drop_side_group(self, purpose: str) -> None:
        """Forget a group that failed: gloo's never recover. The next use makes another, on all ranks."""
        group = self._side_groups.pop(purpose, None)
        if group is not None:
            self.watch.note(f"dropped/{group.group_name}")
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)

    def _count(self, operation: str, whole: Tensor, payload: int, wire: torch.dtype) -> None:
        """In both operations each element of payload arrives at, or comes from, every rank but one."""
        others, size = self.world - 1, wire.itemsize
        tally = self.counters.by_operation.setdefault(operation, Tally())
        tally.calls += 1
        tally.elements += others * payload
        tally.bytes += others * payload * size
        self.counters.received_bytes += others * (whole.numel() // self.world) * size
        self.watch.issued += 1

    def _count_control(self, values: Tensor) -> None:
        self.watch.issued += 1
        self.counters.control_calls += 1
        self.counters.control_bytes += values.numel() * values.element_size() * (self.world - 1)

    def _gather_piece(self, whole: Tensor, unit: int, own: Tensor | None, after: Work | None) -> Work:
        if after is not None:
            after.wait()
        if own is not None and not self._in_place(own, whole):
            whole.view(self.world, -1)[self.rank].copy_(own)
        return self._all_gather(whole, unit)

    def _in_place(self, own: Tensor, whole: Tensor) -> bool:
        """Whether `own` [shard] is this rank's piece of `whole`."""
        return own.data_ptr() == whole.data_ptr() + self.rank * own.numel() * own.element_size()

    def _all_gather(self, whole: Tensor, unit: int) -> Work:
        raise NotImplementedError(f"{type(self).__name__} defines no all-gather")

    def _reduce_scatter(self, bucket: Tensor, out: Tensor, unit: int, add: bool, wire: torch.dtype) -> Work:
        """The route's; `wire` is `bucket`'s dtype where nothing is rounded."""
        raise NotImplementedError(f"{type(self).__name__} defines no reduce-scatter")


class Done:
    """Nothing to wait for."""

    def wait(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Numbers:
    """A `Reading` of what is on the host already."""

    values: Tensor

    def arrived(self) -> bool:
        return True

    def get(self) -> list[float]:
        numbers: list[float] = self.values.tolist()
        return numbers


_clones: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many communicators have been made like a group; its ranks make them together."""


def clone(
    group: dist.ProcessGroup,
    backend: str,
    timeout: datetime.timedelta | None,
    device: torch.device | None = None,
) -> dist.ProcessGroup:
    """A communicator of our own over the same ranks, so that no other messages interfere.

    It is made at once for `device`, if one is given, and not at its first use.
    """
    ranks = dist.get_process_group_ranks(group)
    whole_world = len(ranks) == dist.get_world_size()
    default = dist.distributed_c10d._get_default_group()
    bound, default.bound_device_id = default.bound_device_id, None
    # torch names a group of some ranks after how many groups this rank knows of, which ranks of a pipeline do not agree
    # on: they would wait for each other under different names.
    number = _clones[group] = _clones.get(group, 0) + 1
    name = f"zerokit/{dist.distributed_c10d._world.pg_names.get(group, '')}/{number}"
    naming = dist.distributed_c10d._hash_ranks_to_str
    dist.distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        # A bound default group would be split, in which all of its ranks must take part: those of a subset would
        # wait for ever.
        clone = dist.new_group(
            ranks,
            backend=backend,
            timeout=timeout,
            use_local_synchronization=not whole_world,
            device_id=device,
        )
    finally:
        default.bound_device_id = bound
        dist.distributed_c10d._hash_ranks_to_str = naming
    assert isinstance(clone, dist.ProcessGroup)
    return clone
