"""Collectives over a mesh: the hops of a unit, the count of every byte, and small control messages.

Units are gathered and reduced over the axes of the mesh, inner before outer in a reduction, outer before inner in a
gather. An axis is a `Route` between its ranks.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.errors import ScheduleError
from zerokit.formulas import Operation, TrafficReport, operation_name
from zerokit.layout import Cut, Unit
from zerokit.placement import BOTH, Axis, Mesh
from zerokit.runtime.collectives.groups import clone, note_user
from zerokit.runtime.collectives.legs import Count, Leg
from zerokit.runtime.collectives.observer import Flight, Observer
from zerokit.runtime.collectives.route import DONE, Hop, Kind, Parcels, Route, Wire, Work
from zerokit.runtime.collectives.stalls import StallReporter
from zerokit.runtime.shards import Shards, same_place

T = TypeVar("T")

_HASH_FACTOR, _HASH_MODULUS = 1_000_003, (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Sums:
    """Numbers that are being summed over ranks: `read` waits for them, and `at` gives one to what is computed next."""

    values: Tensor
    work: Work
    read: Callable[[], list[float]]

    def at(self, index: int) -> Tensor:
        """One of them, 0-d, which the device waits for and the host does not."""
        self.work.wait()
        return self.values[index]


class Exchange:
    """A collective on a unit over the axes of the mesh, prepared once."""

    __slots__ = ("_collectives", "_kind", "_legs", "_unit")

    def __init__(self, collectives: Collectives, kind: Kind, unit: Unit, legs: Sequence[Leg]) -> None:
        self._collectives, self._kind, self._unit, self._legs = collectives, kind, unit.index, legs

    def start(self) -> Work:
        """Start it, and count it."""
        return self._collectives.start(self._kind, self._unit, self._legs)


class Collectives:
    """The ranks of a mesh: `group` joins all, for control values, `routes` those of each axis, the inner one last."""

    runs_ahead = False
    """Whether the host issues what a device does later: then no step may read a result on the host."""
    averages = False  # whether a reduction divides by the number of ranks
    others_answer = False
    """Whether there are processes behind the other ranks; else these agree with this one, which serves predictions."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        mesh: Mesh,
        routes: Sequence[Route],
        device: torch.device,
        reporter: StallReporter,
        timeout: datetime.timedelta,
        between_all: Route | None = None,
    ) -> None:
        self.group, self.mesh, self.device, self.reporter = group, mesh, device, reporter
        self.rank, self.world = group.rank(), group.size()
        self.position = mesh.position(self.rank)
        self._traffic = TrafficReport()
        self.routes = dict(zip(mesh.axes, routes, strict=True))
        self.between_all = between_all or self.routes[Axis.INNER]
        """The route between all ranks, which are one axis unless a route of their own is given; for `exchange`."""
        self._counts: dict[tuple[object, ...], Count] = {}
        self._schedule = [0] * len(Kind)
        self._own_groups: dict[str, dist.ProcessGroup] = {}  # groups that nobody else uses, by their purpose
        self.around_waits: list[Callable[[Callable[[], None]], None]] = []
        """Called with each wait of a device's computation, which they make: clocks leave it out."""
        self._observers: list[Observer] = []
        self._asks = self.others_answer and self.world > 1
        self._timeout = timeout

    @property
    def route(self) -> str:
        return " and ".join(dict.fromkeys(route.name for route in reversed(self.routes.values())))

    @property
    def schedule(self) -> int:
        """A rolling hash of the collectives so far; gathers and reductions may interleave differently."""
        total = 0
        for number in self._schedule:
            total = (total * _HASH_FACTOR + number) % _HASH_MODULUS
        return total

    @property
    def traffic(self) -> TrafficReport:
        """The traffic since it was last taken."""
        for count in self._counts.values():
            count.take(self._traffic)
        return self._traffic

    def take_traffic(self) -> TrafficReport:
        """The traffic since this was last called, which a new count follows."""
        taken, self._traffic = self.traffic, TrafficReport()
        for observer in self._observers:
            observer.taken()
        return taken

    @contextmanager
    def observed(self, observer: Observer) -> Iterator[None]:
        """A context in which `observer` learns of collectives and waits."""
        told: list[tuple[list[Any], Any]] = [
            (self._observers, observer),
            (self.reporter.watchers, observer.waits),
            (self.around_waits, observer.around),
        ]
        for those, one in told:
            those.append(one)
        try:
            yield
        finally:
            for those, one in told:
                those.remove(one)

    def forget_counts(self) -> None:
        """Forget what counts collectives that were prepared for units before they were cut anew."""
        _ = self.traffic
        self._counts.clear()

    @contextmanager
    def counting(self, report: TrafficReport) -> Iterator[None]:
        """A context in which traffic is counted in `report`, and not as a step's."""
        before, self._traffic = self.traffic, report
        try:
            yield
        finally:
            _ = self.traffic
            self._traffic = before

    def note_path(self, number: int) -> None:
        """Let ranks' agreement before the next step show whether all have noted the same."""
        self._schedule[0] = (self._schedule[0] * _HASH_FACTOR + number) % _HASH_MODULUS

    def wait_at_most(self, seconds: float) -> None:
        """Use a shorter time-out from now on where the host waits."""

    # ---- units

    def gather(self, memory: Shards, *, axes: Sequence[Axis] = BOTH, own: Shards | None = None) -> Exchange:
        """What gathers the other ranks' pieces over `axes` into `memory`, the whole unit or this rank's inner piece.

        This rank's piece is in `own`, or there already.
        """
        return Exchange(self, Kind.ALL_GATHER, memory.unit, self._gather(memory, axes, own))

    def _gather(self, memory: Shards, axes: Sequence[Axis], own: Shards | None = None) -> list[Leg]:
        legs: list[Leg] = []
        arrived = False
        for axis in (axis for axis in self.mesh.axes if axis in axes):
            route, cut = self.routes[axis], self.mesh.cut(axis, memory.unit, self.rank)
            hop = None
            if cut.whole.numel:
                mine = cut.piece(route.rank)
                elsewhere = own if own is not None and not arrived else memory
                source, place = elsewhere.at(mine), memory.at(mine)
                hop, arrived = route.gather(memory, cut, None if same_place(source, place) else source), True
            legs.append(Leg(hop, [self._count(Kind.ALL_GATHER, axis, memory.unit, cut, Wire(memory.dtype))]))
        return legs

    def reduction(
        self,
        bucket: Shards,
        out: Shards,
        *,
        wire: Wire | None = None,
        axes: Sequence[Axis] = BOTH,
        back: Sequence[Axis] = (),
    ) -> Exchange:
        """What writes the ranks' sum of this rank's shard of `bucket`, the whole unit, over `axes` to `out`.

        Where the route `averages`, it is their mean. With a `wire` every rank's piece is rounded to its form, this
        rank's too, and they are added in `out`'s dtype and in rank order. One rank rounds nothing. `out` may be
        `bucket`. On a mesh of two axes sums over the inner one arrive in `out` if it has room for them, else in the
        bucket. What else is in the bucket is lost. At last the sums of all ranks of the axes `back` are gathered in
        `out`.
        """
        legs: list[Leg] = []
        source, exact = bucket, Wire(bucket.dtype)
        for axis in (axis for axis in reversed(self.mesh.axes) if axis in axes):
            route, cut = self.routes[axis], self.mesh.cut(axis, bucket.unit, self.rank)
            last = axis is self.mesh.axes[0]
            narrows = wire is not None and route.size > 1 and (last or wire.every_hop)
            chosen = wire if wire is not None and narrows else exact
            mine = cut.piece(route.rank)
            target = out if out.covers(mine) else source
            hop = route.reduction(source, cut, target.at(mine), chosen) if cut.whole.numel else None
            legs.append(Leg(hop, [self._count(Kind.REDUCE_SCATTER, axis, bucket.unit, cut, chosen)]))
            source = target
        return Exchange(self, Kind.REDUCE_SCATTER, bucket.unit, [*legs, *self._gather(out, back)])

    def counter(self, name: str, kind: Kind, unit: int, moved: Operation, received: int) -> Count:
        """What counts an exchange, of so much over all ranks; so many bytes arrive at this one."""
        return self._counts.setdefault((name, kind, unit, moved, received), Count(name, moved, received))

    def exchange(
        self, route: Route, kind: Kind, unit: int, parcels: Parcels, counts: Sequence[Count]
    ) -> Work:
        """Start to move pieces of a unit between ranks. What is sent may change after `wait_for_readers`."""
        return self.start(kind, unit, [Leg(route.exchange(kind, unit, parcels), counts)])

    def start(self, kind: Kind, unit: int, legs: Sequence[Leg]) -> Work:
        """Start a unit's hops one behind the other, and count them; for `Exchange`."""
        for leg in legs:
            for count in leg.counts:
                count.start()
        self._schedule[kind] = (self._schedule[kind] * _HASH_FACTOR + unit + 1) % _HASH_MODULUS
        for observer in self._observers:
            legs = [self._watch_leg(leg, observer.flies(kind, unit, leg.counts)) for leg in legs]
        return self._chain(kind, [leg.hop for leg in legs if leg.hop is not None])

    def _watch_leg(self, leg: Leg, flight: Flight) -> Leg:
        if leg.hop is not None:
            return replace(leg, hop=self._watch_hop(leg.hop, flight))
        flight.begin()
        flight.end()
        return leg

    def _watch_hop(self, hop: Hop, flight: Flight) -> Hop:
        """The hop, which tells `flight` when it begins and has its result."""

        def start(after: Work | None) -> Any:
            flight.begin()
            work = hop(after)
            flight.end()
            return work

        return start

    def wait_for_readers(self) -> None:
        """Wait until this rank's pieces of gathered units and buckets may be changed or dropped."""
        for route in dict.fromkeys((*self.routes.values(), self.between_all)):
            route.wait_for_readers()

    def wait_to_free(self, unit: Unit) -> None:
        """Wait until the inner axis has read what the outer one has brought of a gathered unit."""
        if len(self.routes) > 1:
            self.routes[Axis.INNER].wait_for_readers(unit.index)

    def _chain(self, kind: Kind, hops: Sequence[Hop]) -> Work:
        work: Work | None = None
        for hop in hops:
            work = hop(work)
        return work or DONE

    def _count(self, kind: Kind, axis: Axis, unit: Unit, cut: Cut, wire: Wire) -> Count:
        key = kind, axis, unit.index, cut, wire.dtype, wire.block
        if key not in self._counts:
            # In both operations each element of payload arrives at, or comes from, every rank of the axis but one.
            copies = self.mesh.copies(axis)
            moved = Operation(1, copies * unit.payload_numel, copies * wire.nbytes(unit))
            own = cut.piece(self.routes[axis].rank).numel
            # Everything else of the cut, or this rank's piece from every other rank.
            gathers = kind is Kind.ALL_GATHER
            arriving = cut.whole.numel - own if gathers else (len(cut) - 1) * wire.packed_numel(own)
            name = operation_name(kind.name.lower(), axis, self.mesh)
            self._counts[key] = Count(name, moved, arriving * wire.dtype.itemsize)
        return self._counts[key]

    # ---- control values

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """Sum a few control values over ranks, in place."""
        self._on_group(values, "all_reduce of control values", lambda v: dist.all_reduce(v, op, self.group))

    def broadcast(self, values: Tensor, source: int = 0) -> None:
        """Broadcast rank `source`'s `values` in place; never in a step."""
        with as_bytes(values) as sent:
            self._on_group(sent, "broadcast", lambda v: dist.broadcast(v, group=self.group, group_src=source))

    def _on_group(self, values: Tensor, what: str, call: Callable[[Tensor], object]) -> None:
        self._traffic.count_control(values.numel() * values.element_size() * (self.world - 1))
        if self._asks:
            here = values if self.runs_ahead else values.cpu()
            with self.reporter.waiting(what):
                call(here)
            if here is not values:
                values.copy_(here)

    def sum_soon(self, values: Sequence[float | Tensor]) -> Sums:
        """Start to sum each of `values` (numbers or 0-d tensors) over ranks."""
        control = torch.tensor([float(value) for value in values], dtype=torch.float64)
        self.all_reduce(control, dist.ReduceOp.SUM)
        if not self._asks:
            control.mul_(self.world)
        return Sums(control, DONE, control.tolist)

    def any(self, condition: bool, place: str) -> bool:
        """Whether it holds on any rank, as `all_gather_objects`."""
        return any(self.all_gather_objects(condition, place))

    def all_gather_objects(self, value: T, place: str) -> list[T]:
        """Every rank's `value`, in rank order; never in a step, where the route runs ahead.

        `place` names the call that all ranks make. Raises `ScheduleError`, on every rank, where some make another one.
        """
        gathered = [(place, value)] * self.world
        if self._asks:
            with self.reporter.waiting(place):
                dist.all_gather_object(gathered, (place, value), group=self.group)
        places = [theirs for theirs, _ in gathered]
        if len(set(places)) > 1:
            named = ", ".join(f"rank {rank}: {theirs}" for rank, theirs in enumerate(places))
            raise ScheduleError(
                f"ranks have come to different calls, and must make the same in one order: {named}"
            )
        return [theirs for _, theirs in gathered]

    def own(self, groups: Sequence[dist.ProcessGroup], like: dist.ProcessGroup) -> None:
        """Take gloo groups, which all ranks of `like` have made, for nobody else's."""
        self._own_groups |= {str(number): group for number, group in enumerate(groups)}
        note_user(like, self, self._own_groups)

    def side_group(self, purpose: str) -> dist.ProcessGroup:
        """A gloo group over the same ranks for control messages; created by all ranks at its first use.

        Raises `ScheduleError`, naming the ranks that do not come, when they have not within the time-out.
        """
        group = self._own_groups.get(purpose)
        if group is not None and self.reporter.noted(f"dropped/{group.group_name}"):
            # By a rank for which this one did not come in time.
            self.drop_side_group(purpose)
        if purpose not in self._own_groups:
            with self.reporter.waiting(f"group for {purpose}"):
                self._own_groups[purpose] = clone(self.group, "gloo", self._timeout)
        return self._own_groups[purpose]

    def drop_side_group(self, purpose: str) -> None:
        """Drop a failed group, because gloo's groups never recover. The next use creates another on all ranks."""
        group = self._own_groups.pop(purpose, None)
        if group is not None:
            self.reporter.note(f"dropped/{group.group_name}")
            with suppress(RuntimeError, ValueError):
                dist.destroy_process_group(group)


@contextmanager
def as_bytes(values: Tensor) -> Iterator[Tensor]:
    """A context in which `values` are contiguous bytes, whose changes they take over: gloo knows few dtypes, and writes
    beyond the memory of a tensor that repeats its elements (`expand`).
    """
    for dim, stride in enumerate(values.stride()):
        if stride == 0 and values.shape[dim] > 1:
            values = values.narrow(dim, 0, 1)
    contiguous = values.contiguous()
    # A lone element may still have a stride of 0, which `view` refuses.
    yield contiguous.as_strided((contiguous.numel(),), (1,)).view(torch.uint8)
    if contiguous is not values:
        values.copy_(contiguous)
