"""A route without other ranks: it keeps a record of what is issued, and brings results when they are waited for.

Until then what a collective writes is nan, and what a reduction reads must not change: a missing wait is seen.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerokit.layout import Parameter, Unit, build_layout
from zerokit.placement import Mesh, Placement
from zerokit.runtime.collectives import Collectives, Work
from zerokit.runtime.collectives.base import Route
from zerokit.runtime.collectives.stalls import StallReporter
from zerokit.runtime.modules import Anatomy, UnitRule, take_apart
from zerokit.runtime.storage import FlatUnit

Event = tuple[str, int]
"""What happened to which unit: gather, chain (a gather behind its reduction) or reduce; gathered or reduced, once
they have been waited for."""


class Group(dist.ProcessGroup):
    """A process group that knows its rank and its size."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)  # type: ignore[call-arg]  # the annotation knows one of two constructors

    @property
    def group_name(self) -> Any:
        return "recorded"


class RecordingRoute(Collectives):
    """One rank of `world`; the others gather what `wholes` holds and reduce the same gradients as this one."""

    def __init__(
        self, rank: int = 0, world: int = 2, *, runs_ahead: bool = False, averages: bool = False
    ) -> None:
        reporter, place = StallReporter(Group(0, 1)), Group(rank, world)
        routes = [_Recorder(self, place, reporter)]
        patience = datetime.timedelta(seconds=1)
        super().__init__(place, Mesh(1, world), routes, torch.device("cpu"), reporter, patience)
        self.runs_ahead, self.averages = runs_ahead, averages
        self.events: list[Event] = []
        self.wholes: dict[int, Tensor] = {}
        """What a gather of a unit brings; where nothing is given, this rank's piece again and again."""
        self.agreements: list[str] = []
        self.at_gather: Callable[[int], None] = lambda unit: None
        """Called when the gather of a unit is issued, which has its memory by then."""
        self.joined = 0
        """How often somebody waited for readers."""

    def take(self, *kinds: str) -> list[Event]:
        """The events since the last call; only those of these kinds, if any are named."""
        events, self.events = self.events, []
        return [event for event in events if not kinds or event[0] in kinds]

    @property
    def in_flight(self) -> int:
        """Reductions that have been issued and not waited for."""
        kinds = [kind for kind, _ in self.events]
        return kinds.count("reduce") - kinds.count("reduced")

    def wait_for_readers(self) -> None:
        self.joined += 1

    def agree(self, what: str) -> None:
        self.agreements.append(what)

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        self.controlled(values)

    def broadcast(self, values: Tensor) -> None:
        self.controlled(values)

    def controlled(self, values: Tensor) -> None:
        self.counters.control_calls += 1
        self.counters.control_bytes += values.nbytes * (self.world - 1)


class _Recorder(Route):
    name = "recorded"

    def __init__(self, record: RecordingRoute, group: dist.ProcessGroup, reporter: StallReporter) -> None:
        super().__init__(group, reporter)
        self._record = record

    def all_gather(self, whole: Tensor, unit: int, own: Tensor | None, after: Work | None) -> Work:
        record = self._record
        if record.runs_ahead and after is not None:
            record.events.append(("chain", unit))
            return _Gather(record, whole, unit, after)
        if after is not None:
            after.wait()
        if own is not None and not self.in_place(own, whole):
            whole.view(self.size, -1)[self.rank].copy_(own)
        record.events.append(("gather", unit))
        record.at_gather(unit)
        return _Gather(record, whole, unit, None)

    def reduce_scatter(
        self, bucket: Tensor, out: Tensor, unit: int, *, add: bool, wire: torch.dtype, after: Work | None
    ) -> Work:
        self._record.events.append(("reduce", unit))
        return _Reduction(self._record, bucket, out, unit, add=add, wire=wire)


class _Recorded:
    """A collective in flight, to be waited for once."""

    def __init__(self, route: RecordingRoute, event: Event) -> None:
        self._route, self._event = route, event
        self.done = False

    def wait(self) -> None:
        assert not self.done, f"{self._event} was waited for twice"
        self.done = True
        self._route.events.append(self._event)
        self._arrive()

    def _arrive(self) -> None:
        raise NotImplementedError


class _Gather(_Recorded):
    def __init__(self, route: RecordingRoute, whole: Tensor, unit: int, after: Work | None) -> None:
        super().__init__(route, ("gathered", unit))
        self._whole, self._unit, self._after = whole, unit, after
        if after is None:
            _spoil(_others(whole, route))

    def _arrive(self) -> None:
        assert self._after is None or (isinstance(self._after, _Recorded) and self._after.done)
        pieces, rank = self._whole.view(self._route.world, -1), self._route.rank
        brought = self._route.wholes.get(self._unit)
        for peer, piece in enumerate(pieces):
            if peer != rank:
                piece.copy_(pieces[rank] if brought is None else brought.view_as(pieces)[peer])


class _Reduction(_Recorded):
    def __init__(
        self, route: RecordingRoute, bucket: Tensor, out: Tensor, unit: int, *, add: bool, wire: torch.dtype
    ) -> None:
        super().__init__(route, ("reduced", unit))
        own = bucket.view(route.world, -1)[route.rank]
        averages = route.averages and wire == bucket.dtype
        self._sum = own.clone() if averages else own.to(wire).to(out.dtype) * route.world
        self._bucket, self._out, self._add = bucket, out, add
        if not add:
            _spoil([out])
        self._state = bucket.clone()

    def _arrive(self) -> None:
        assert torch.equal(self._bucket.nan_to_num(), self._state.nan_to_num()), (
            "a bucket in flight was changed"
        )
        for piece in _others(self._bucket, self._route):
            piece.mul_(-7.0)  # what was sent is lost; padding stays zero
        self._out.copy_(self._out + self._sum if self._add else self._sum)


def _others(whole: Tensor, route: Collectives) -> list[Tensor]:
    return [piece for peer, piece in enumerate(whole.view(route.world, -1)) if peer != route.rank]


def _spoil(tensors: Sequence[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.dtype.is_floating_point else -1)


def plain_unit(index: int, numel: int, world: int) -> Unit:
    """A unit of one parameter, for collectives over tensors of any size."""
    return Unit(index, (), (Parameter(f"unit{index}", (numel,)),), world)


def flat_units(
    route: Collectives,
    stage: int,
    shapes: Sequence[Sequence[tuple[int, ...]]],
    *,
    rest: Collection[int] = (),
    frozen: Collection[int] = (),
    dtype: torch.dtype = torch.float32,
    master: torch.dtype = torch.float32,
) -> list[FlatUnit]:
    """A unit for each list of shapes. Units numbered in `rest` have no modules, those in `frozen` no gradients.

    Every rank's parameters hold 1, 2, 3, … in line order; a `RecordingRoute` knows them.
    """
    made, first = [], 1
    for index, members in enumerate(shapes):
        layouts = tuple(
            Parameter(f"unit{index}.{place}", shape, trainable=index not in frozen)
            for place, shape in enumerate(members)
        )
        scopes = () if index in rest else (f"unit{index}",)
        unit = Unit(index, scopes, layouts, route.world)
        parameters = []
        for layout in layouts:
            values = torch.arange(first, first + layout.numel, dtype=master).view(layout.shape)
            parameters.append(nn.Parameter(values, requires_grad=layout.trainable))
            first += layout.numel
        made.append(_flat_unit(unit, parameters, route, dtype, master, stage))
    return made


def units_of_model(
    model: nn.Module, route: Collectives, stage: int, rule: UnitRule | None = None
) -> tuple[Anatomy, list[FlatUnit]]:
    """A model taken apart, a unit for each unit module, in fp32."""
    anatomy = take_apart(model, rule, {})
    layout = build_layout(anatomy.segments, world=route.world, bucket_bytes=0)
    storages = []
    for unit in layout.units:
        parameters = [anatomy.named[parameter.name] for parameter in unit.parameters]
        storages.append(_flat_unit(unit, parameters, route, torch.float32, torch.float32, stage))
    return anatomy, storages


def _flat_unit(
    unit: Unit,
    parameters: Sequence[nn.Parameter],
    route: Collectives,
    dtype: torch.dtype,
    master: torch.dtype,
    stage: int,
) -> FlatUnit:
    storage = FlatUnit(unit, parameters, route, dtype, Placement.of(stage, route.mesh))
    exact = storage.adopt({}, master)
    if isinstance(route, RecordingRoute):
        route.wholes[unit.index] = exact.to(dtype, copy=True)
    storage.take_initial(exact)
    return storage
