"""What every route shares: the mesh, the count of every byte, and the small control messages.

`Collectives` is what the runtime sees: units are gathered and reduced over the axes of the mesh, inner before outer in
a reduction, outer before inner in a gather. Each axis is a `Route`: it moves tensors between the ranks of that axis,
which lie in memory as `size` equal pieces, piece r belonging to the axis's rank r.
"""

from __future__ import annotations

import datetime
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.layout import Unit
from zerokit.placement import BOTH, Axis, Mesh
from zerokit.runtime.collectives.stalls import StallReporter

_HASH_FACTOR, _HASH_MODULUS = 1_000_003, (1 << 31) - 1


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Return when the result may be used by work issued after this call. Call it once."""


class Done:
    """The work of a collective that moves nothing."""

    def attempt(self) -> bool:
        return True

    def wait(self) -> None:
        pass


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

    by_operation: dict[tuple[str, Axis], Tally] = field(default_factory=dict)
    received_bytes: int = 0
    control_calls: int = 0
    control_bytes: int = 0


class PendingNumbers(Protocol):
    """Numbers on their way to the host."""

    def get(self) -> list[float]:
        """The numbers; waits for the device where they are not there yet."""

    def arrived(self) -> bool:
        """Whether `get` would not wait."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """`PendingNumbers` that are on the host already."""

    values: Tensor

    def arrived(self) -> bool:
        return True

    def get(self) -> list[float]:
        numbers: list[float] = self.values.tolist()
        return numbers


class Route:
    """The ranks of one axis of the mesh, and how tensors travel between them."""

    name = "nowhere"
    """How tensors travel, in records."""

    def __init__(self, group: dist.ProcessGroup, reporter: StallReporter) -> None:
        self.group, self.reporter = group, reporter
        self.rank, self.size = group.rank(), group.size()

    def all_gather(self, whole: Tensor, unit: int, own: Tensor | None, after: Work | None) -> Work:
        """Fill `whole` [size × piece] behind `after`; this rank's piece is `own`, or there already."""
        raise NotImplementedError(f"{type(self).__name__} defines no all-gather")

    def reduce_scatter(
        self, bucket: Tensor, out: Tensor, unit: int, *, add: bool, wire: torch.dtype, after: Work | None
    ) -> Work:
        """Write (or add) the ranks' sum of this rank's piece of `bucket` [size × piece] to `out`, behind `after`.

        Pieces travel as `wire`. `out` may be that piece itself, unless `add`. The other pieces are lost.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no reduce-scatter")

    def wait_for_readers(self, unit: int | None = None) -> None:
        """Return when this rank's pieces of what was gathered, or of one unit, may be changed or dropped."""

    def rehearse_exchange(self, device: torch.device) -> None:
        """Prepare now, and not in a step, for reductions with a wire. All ranks call it."""

    def in_place(self, own: Tensor, whole: Tensor) -> bool:
        """Whether `own` is this rank's piece of `whole`."""
        return own.data_ptr() == whole.data_ptr() + self.rank * own.numel() * own.element_size()


Hop = Callable[[Work | None], Work]
"""Starts a collective behind another one."""


class Collectives:
    """The ranks of a mesh.

    Args:
        group: all of them, for control values.
        mesh: their shape.
        routes: the axes', the inner one last; a mesh of one axis has only that one.
        device: the tensors'.
        reporter: names what ranks wait for.
        timeout: of everything.
    """

    runs_ahead = False
    """Whether the host issues what a device does later. Then no step may read a result on the host, small operations
    cost their launch, and what is in flight needs no memory beyond the buckets."""
    averages = False
    """Whether a reduction divides by the number of ranks."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        mesh: Mesh,
        routes: Sequence[Route],
        device: torch.device,
        reporter: StallReporter,
        timeout: datetime.timedelta,
    ) -> None:
        self.group, self.mesh, self.device, self.reporter = group, mesh, device, reporter
        self.rank, self.world = group.rank(), group.size()
        self.position = mesh.position(self.rank)
        self.counters = Counters()
        self.routes = dict(zip(mesh.axes, routes, strict=True))
        self._schedule = [0, 0]
        self._side_groups: dict[str, dist.ProcessGroup] = {}
        self._timeout = timeout
        self._timeout_s = timeout.total_seconds()

    @property
    def route(self) -> str:
        """How tensors travel."""
        return " and ".join(dict.fromkeys(route.name for route in reversed(self.routes.values())))

    @property
    def schedule(self) -> int:
        """A rolling hash of the collectives so far. Gathers and reductions may interleave in different ways."""
        gathers, reductions = self._schedule
        return (gathers * _HASH_FACTOR + reductions) % _HASH_MODULUS

    def wait_at_most(self, seconds: float) -> None:
        """Give up earlier from now on."""
        self._timeout_s = min(self._timeout_s, seconds)

    # ---- units

    def all_gather(
        self,
        unit: Unit,
        memory: Tensor,
        *,
        axes: Sequence[Axis] = BOTH,
        own: Tensor | None = None,
        after: Work | None = None,
    ) -> Work:
        """Fill `memory`, the whole unit or this rank's inner piece of it, over `axes`: the others' pieces arrive.

        This rank's piece is `own`, or there already. The gather begins `after` a collective that nothing else waits
        for, if one is given.
        """
        self._note(0, unit)
        hops: list[Hop] = []
        for axis in (axis for axis in self.mesh.axes if axis in axes):
            region = self._region(memory, axis, unit)
            self._count("all_gather", axis, region, unit, memory.dtype)
            if region.numel():
                source = own if not hops else None
                hops.append(self._gather(axis, region, unit, source))
        return self._run(hops, after)

    def reduce_scatter(
        self,
        unit: Unit,
        bucket: Tensor,
        out: Tensor,
        *,
        between: Tensor | None = None,
        add: bool,
        wire: torch.dtype | None = None,
    ) -> Work:
        """Write (or add) the ranks' sum of this rank's shard of `bucket`, the whole unit, to `out`.

        Where the route `averages`, it is their mean. With a `wire` every rank's piece is rounded to that dtype, this
        rank's too, and they are added in `out`'s dtype, in rank order, by any route. One rank rounds nothing.

        `out` may be that shard of `bucket` itself, unless `add`. `between` is where sums over the inner axis arrive on
        a mesh of two, by default their place in the bucket. What else is in the bucket is lost.
        """
        self._before_reduction()
        self._note(1, unit)
        hops: list[Hop] = []
        source = bucket
        for axis in reversed(self.mesh.axes):
            last = axis is self.mesh.axes[0]
            size = self.mesh.size(axis)
            rounded = wire if wire is not None and size > 1 else bucket.dtype
            self._count("reduce_scatter", axis, source, unit, rounded)
            target = out if last else between
            if target is None:
                target = source.view(size, -1)[self.routes[axis].rank]
            if source.numel():
                hops.append(self._reduce(axis, source, target, unit, rounded, add=add and last))
            source = target
        return self._run(hops, None)

    def wait_for_readers(self) -> None:
        """Return when this rank's pieces of gathered units, and of gathered buckets, may be changed or dropped."""
        for route in self.routes.values():
            route.wait_for_readers()

    def wait_to_free(self, unit: Unit) -> None:
        """Return when all that others read of a gathered unit, which has arrived here, may be dropped.

        What the inner axis reads lies in memory that goes, where the outer axis has brought it first.
        """
        if len(self.routes) > 1:
            self.routes[Axis.INNER].wait_for_readers(unit.index)

    def expect_exchanges(self) -> None:
        """Prepare now, and not in a step, for reductions with a `wire`. All ranks call it."""
        for route in self.routes.values():
            route.rehearse_exchange(self.device)

    def _before_reduction(self) -> None:
        """Go on with what other ranks wait for."""

    def _gather(self, axis: Axis, region: Tensor, unit: Unit, own: Tensor | None) -> Hop:
        return lambda after: self.routes[axis].all_gather(region, unit.index, own, after)

    def _reduce(
        self, axis: Axis, source: Tensor, target: Tensor, unit: Unit, wire: torch.dtype, *, add: bool
    ) -> Hop:
        return lambda after: self.routes[axis].reduce_scatter(
            source, target, unit.index, add=add, wire=wire, after=after
        )

    def _region(self, memory: Tensor, axis: Axis, unit: Unit) -> Tensor:
        """What ranks of `axis` share of `memory`."""
        if axis is Axis.INNER or memory.numel() < unit.numel or self.mesh.outer == 1:
            return memory
        return memory.view(self.mesh.inner, -1)[self.routes[Axis.INNER].rank]

    def _run(self, hops: Sequence[Hop], after: Work | None) -> Work:
        """Start hops that follow each other, each as soon as what it sends is there."""
        work = after
        for hop in hops:
            work = hop(work)
        return work or Done()

    def _note(self, kind: int, unit: Unit) -> None:
        self._schedule[kind] = (self._schedule[kind] * _HASH_FACTOR + unit.index + 1) % _HASH_MODULUS

    def _count(self, operation: str, axis: Axis, region: Tensor, unit: Unit, wire: torch.dtype) -> None:
        """In both operations each element of payload arrives at, or comes from, every rank of the axis but one."""
        tally = self.counters.by_operation.setdefault((operation, axis), Tally())
        elements = self.mesh.copies(axis) * unit.payload_numel
        tally.calls += 1
        tally.elements += elements
        tally.bytes += elements * wire.itemsize
        size = self.mesh.size(axis)
        self.counters.received_bytes += (size - 1) * (region.numel() // size) * wire.itemsize
        self.reporter.issued += 1

    # ---- control values

    def agree(self, what: str) -> None:
        """Return when all ranks are about to do the same, unforeseen thing; else raise `ScheduleError`, soon."""
        if self.world > 1:
            self.reporter.agree(what, self._timeout_s)

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Reduce a few control values in place."""
        self._on_group(values, "all_reduce of control values", lambda v: dist.all_reduce(v, op, self.group))

    def broadcast(self, values: Tensor) -> None:
        """Send rank 0's `values` to all, in place; at construction, loading and recording only."""
        self._on_group(values, "broadcast", lambda v: dist.broadcast(v, group=self.group, group_src=0))

    def _on_group(self, values: Tensor, what: str, call: Callable[[Tensor], object]) -> None:
        self.reporter.issued += 1
        self.counters.control_calls += 1
        self.counters.control_bytes += values.numel() * values.element_size() * (self.world - 1)
        if self.world > 1:
            here = values if self.runs_ahead else values.cpu()
            with self.reporter.waiting(what):
                call(here)
            if here is not values:
                values.copy_(here)

    def agree_soon(self, values: Sequence[float], flag: Tensor | None = None) -> PendingNumbers:
        """The ranks' greatest of each of `values`, and of a 0-d tensor on the device."""
        control = torch.tensor([*values, 0.0 if flag is None else float(flag)], dtype=torch.float64)
        self.all_reduce(control, dist.ReduceOp.MAX)
        return Numbers(control)

    def read(self, values: Tensor) -> list[float]:
        """A few values on the host, now: never in a step, where the route runs ahead."""
        numbers: list[float] = values.flatten().tolist()
        return numbers

    def any(self, condition: bool) -> bool:
        """Whether it holds on some rank."""
        flag = torch.tensor([float(condition)], device=self.device)
        self.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(self.read(flag)[0])

    def all_gather_objects(self, value: object) -> list[object]:
        """Every rank's `value`, in rank order; for error messages, never while training."""
        gathered: list[object] = [None] * self.world
        with self.reporter.waiting("all_gather_objects"):
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
        if group is not None and self.reporter.noted(f"dropped/{group.group_name}"):
            # By a rank for which this one did not come in time.
            self.drop_side_group(purpose)
        if purpose not in self._side_groups:
            self.reporter.agree(f"makes the group for {purpose}", self._timeout_s)
            with self.reporter.waiting(f"group for {purpose}"):
                self._side_groups[purpose] = clone(self.group, "gloo", self._timeout)
        return self._side_groups[purpose]

    def drop_side_group(self, purpose: str) -> None:
        """Forget a group that failed: gloo's never recover. The next use makes another, on all ranks."""
        group = self._side_groups.pop(purpose, None)
        if group is not None:
            self.reporter.note(f"dropped/{group.group_name}")
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)


_clones: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""How many communicators have been made like a group; its ranks make them together."""


def clone(
    group: dist.ProcessGroup,
    backend: str,
    timeout: datetime.timedelta | None,
    device: torch.device | None = None,
    members: Sequence[int] | None = None,
) -> dist.ProcessGroup:
    """A communicator of our own over the same ranks, or `members` of them, so that no other messages interfere.

    Every rank of `group` calls it, with the members of its own communicator. It is made at once for `device`, if one is
    given, and not at its first use.
    """
    everyone = dist.get_process_group_ranks(group)
    ranks = everyone if members is None else [everyone[member] for member in members]
    whole_world = len(ranks) == dist.get_world_size()
    default = dist.distributed_c10d._get_default_group()
    bound, default.bound_device_id = default.bound_device_id, None
    # torch names a group of some ranks after how many groups this rank knows of, which ranks of a pipeline do not agree
    # on: they would wait for each other under different names.
    number = _clones[group] = _clones.get(group, 0) + 1
    part = "" if members is None else f"/{'-'.join(map(str, members))}"
    name = f"zerokit/{dist.distributed_c10d._world.pg_names.get(group, '')}/{number}{part}"
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
