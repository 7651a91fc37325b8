"""A traced micro-batch at one stage: which units are gathered and which gradients are whole at each of its events.

The plans of `schedule` say what is gathered, freed and reduced at each event, and the runtime's own `Reductions` when a
reduction is issued. Buckets are lent and returned as in `runtime.gradients` and `runtime.buckets`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from zerokit.formulas import Pool, whole_units
from zerokit.layout import Layout, Unit
from zerokit.placement import AnyPlacement
from zerokit.planning.recording import Event, ModelTrace, Moment
from zerokit.runtime.buckets import Phase
from zerokit.runtime.gradients import MOST_IN_FLIGHT
from zerokit.runtime.passes import ForwardPass, Passes
from zerokit.runtime.reductions import Reductions
from zerokit.schedule import Cursor, Kind, Operation, Order, Plan, Stop
from zerokit.sizes import BlockFormat, ElementBytes, stored_bytes


@dataclass(frozen=True, slots=True)
class Step:
    """The setup of a replay: a layout on a mesh, bytes per element, and the route between ranks.

    Attributes:
        layout: for the placement's world.
        placement: the mesh and its stages, of all units or of each.
        sizes: bytes an element.
        on_cuda: whether the host runs ahead of a device, whose shards have memory of their own.
        nodes: of the ranks.
        ranks: those of which the fullest one is looked at; empty stands for all.
    """

    layout: Layout
    placement: AnyPlacement
    sizes: ElementBytes
    on_cuda: bool
    nodes: int = 1
    ranks: tuple[int, ...] = ()

    @property
    def arriving(self) -> int:
        """Ranks of the widest axis that sockets join; what they send has memory while it arrives.

        0 on devices and where ranks read each other's memory.
        """
        mesh = self.placement.mesh
        return 0 if self.on_cuda or self.nodes == 1 else mesh.outer if mesh.outer > 1 else mesh.inner


@dataclass(frozen=True, slots=True)
class Reading:
    """The bytes held from an event until the next one, or with `momentary` only during the event.

    `held` is by kind (`MEMORY_KINDS`), in addition to what is held between steps and to the model's activations; in
    the place of these are gradients that wait for the others of their unit, and copies on their way between ranks.
    """

    event: int
    momentary: bool
    held: tuple[int, ...]


@dataclass(slots=True)
class _Totals:
    """Bytes held now: by gathered units, units' own buckets (which keep gradients or not), and what is on its way."""

    gathered: int = 0
    kept: int = 0
    own: int = 0
    temporary: int = 0


def order_of(trace: ModelTrace, placement: AnyPlacement) -> Order:
    """The order that the runtime records in the first step of this trace."""
    cut = placement.cuts_parameters
    whole = whole_units(trace.layout, placement) if cut else frozenset()
    line = Order.of_line(trace.layout.units, 1 if cut else None, whole)
    active: dict[int, int] = {}
    stops: list[Stop] = []
    for event in trace.events:
        if event.moment is Moment.ENTER:
            around = [unit for unit, modules in active.items() if modules]
            if not set(around).issuperset(event.units):
                stops.append(tuple(sorted({*around, *event.units})))
        for unit in event.units if event.moment in (Moment.ENTER, Moment.LEAVE) else ():
            active[unit] = active.get(unit, 0) + (1 if event.moment is Moment.ENTER else -1)
    order = line.recorded(stops, line.kept, sorted(line.kept - trace.kept_lazily))
    arrived = [event.units[0] for event in trace.events if event.moment is Moment.GRADIENT]
    last = {unit: at for at, unit in enumerate(arrived)}
    return order.reducing([*sorted(last, key=last.__getitem__), *(u for u in order.reduced if u not in last)])


@dataclass(slots=True)
class _Gradients:
    """One unit's gradients in one backward pass."""

    unit: Unit
    own_bytes: int
    """Bytes of a bucket of its own, where that is not held all the time."""
    crossing_bytes: int
    """Bytes of copies while it is reduced."""
    lone: bool
    pooled: bool
    totals: _Totals
    cut: bool
    arrived: int = 0
    waiting: int = 0
    reduced: bool = False
    filled: bool = False
    lent: bool = False
    own: bool = False

    @property
    def complete(self) -> bool:
        return self.arrived == len(self.unit.parameters)

    @property
    def phase(self) -> Phase:
        return Phase.REDUCING if self.reduced else Phase.COMPLETE if self.complete else Phase.OPEN

    def wait(self, size: int) -> None:
        """Add bytes that wait to be copied into the bucket; a negative number was copied."""
        self.waiting += size
        self.totals.temporary += size

    def take_own(self, own: bool) -> None:
        """Set whether the unit has a bucket of its own."""
        if own != self.own:
            self.own = own
            change = self.own_bytes if own else -self.own_bytes
            if self.cut:
                self.totals.own += change
            else:
                self.totals.kept += change


def _crossing_bytes(numel: int, sizes: ElementBytes, ranks: int) -> int:
    """Copies of a unit while it is reduced: rounded ones to send, and what arrives from `ranks` over sockets."""
    wire = sizes.wire
    rounded = 0 if wire is None else wire.nbytes(numel) if isinstance(wire, BlockFormat) else numel * wire
    arriving = (rounded or numel * sizes.reduce) * (ranks - 1) // ranks if ranks > 2 else 0
    return rounded + arriving


class Replay:
    """The passes of one step; call `run` for each of its micro-batches, in order."""

    def __init__(self, trace: ModelTrace, step: Step) -> None:
        self._trace, self._step = trace, step
        sizes, placement = step.sizes, step.placement
        self._sharded = placement.cuts_parameters
        position = placement.mesh.position(step.ranks[0] if step.ranks else 0)
        self._totals = _Totals()
        self._whole_bytes = [
            (
                unit.numel
                - (0 if step.on_cuda else placement.of_unit(unit.index).parameters(unit, position).numel)
            )
            * stored_bytes(unit, sizes.compute)
            for unit in step.layout.units
        ]
        pool = Pool.of(step.layout, placement)
        trainable = [unit for unit in step.layout.units if unit.trainable]
        self._in_flight_most = pool.most or (len(trainable) if step.on_cuda else MOST_IN_FLIGHT)
        cut = {unit.index for unit in trainable if placement.of_unit(unit.index).cuts_gradients}
        self.units = {
            unit.index: _Gradients(
                unit,
                unit.numel * sizes.reduce if unit.index in cut or self.is_lone(unit) else 0,
                _crossing_bytes(unit.numel, sizes, step.arriving),
                lone=self.is_lone(unit),
                pooled=unit.numel <= pool.numel,
                totals=self._totals,
                cut=unit.index in cut,
            )
            for unit in trainable
        }
        self._order = order_of(trace, placement)
        self._passes = Passes()
        self._reductions = Reductions(self, self._passes)
        self._cursor = Cursor(Plan())
        self._active: Counter[int] = Counter()
        self._present: set[int] = set()
        self._held: set[int] = set()
        """Gathered units that stay until backward ends."""
        self.accumulating = False
        """Whether gradients stay on this rank for now, as in `Gradients`."""
        self._begun = False
        self._queue: deque[_Gradients] = deque()
        self._free_buckets = pool.buckets
        self._readings: list[Reading] = []
        self._event = 0

    def is_lone(self, unit: Unit) -> bool:
        """Whether autograd's own tensor serves as the unit's bucket (see `UnitGradients`)."""
        sizes = self._step.sizes
        return (
            len(unit.parameters) == 1
            and unit.payload_numel == unit.numel
            and sizes.compute == sizes.reduce
            and not self._step.on_cuda
        )

    def run(self, *, accumulating: bool) -> list[Reading]:
        """One micro-batch; with `accumulating` its gradients stay on this rank, as inside `accumulate()`."""
        self._readings = []
        self.accumulating, self._begun = accumulating, False
        for one in self.units.values():
            one.arrived, one.reduced = 0, False
        self._passes.begin(training=True)
        self._reductions = Reductions(self, self._passes)
        self._cursor = Cursor(self._order.forward)
        for index in sorted(self._order.kept - self._trace.kept_lazily):
            self._come_to(index)
        for number, event in enumerate(self._trace.events):
            self._event = number
            self._take(event, self._passes.current)
            self._read()
        return self._readings

    def _take(self, event: Event, current: ForwardPass) -> None:
        match event.moment:
            case Moment.ENTER:
                for index in event.units:
                    current.use(index)
                    self._come_to(index)
                self._active.update(event.units)
            case Moment.LEAVE:
                self._active.subtract(event.units)
                for index in event.units:
                    if event.watched:
                        current.watched.add(index)
                    elif not self._active[index]:
                        self._passes.unwatched.add(index)
                        self._held.add(index)
            case Moment.END_FORWARD:
                self._perform(self._cursor.finish())
                self._free(self._present - self._held - self._order.kept.union(self._order.last))
            case Moment.BACKWARD:
                self._begin_backward()
                current.consume(True)
                self._reductions.note_output(current, None)
                for index in event.units:
                    self._come_to(index)
            case Moment.RECOMPUTE:
                self._begin_backward()
                for index in event.units:
                    self._come_to(index, leaves=False)
            case Moment.GRADIENT:
                self._begin_backward()
                self._accept(self.units[event.units[0]], event.gradient_bytes)
            case Moment.END:
                self._reductions.note_last_gradient()
                self._perform(self._cursor.finish())
                self._reductions.end(self._order.backward.units(Kind.REDUCE))
                self._held.clear()
                self._free(set(self._present))
                self._passes.clear()

    # ---- whole units

    def _come_to(self, index: int, *, leaves: bool = True) -> None:
        if not self._sharded:
            return
        use = self._cursor.find(index)
        if use is not None:
            self._perform(self._cursor.come_to(use, leaves=leaves))
            self._perform(self._cursor.go_ahead())
        elif index not in self._present and index not in self._order.whole:  # out of the plan
            self._held.add(index)
            self._gather(index)

    def _perform(self, operations: Iterable[Operation]) -> None:
        for kind, index in operations:
            if kind is Kind.REDUCE:
                self._reductions.add(index)
            elif kind is Kind.GATHER:
                self._reductions.issue(due=True)
                self._gather(index)
            elif index not in self._held:
                self._free({index})
        self._reductions.issue(due=False)

    def _gather(self, index: int) -> None:
        if index not in self._present:
            self._present.add(index)
            self._totals.gathered += self._whole_bytes[index]

    def _free(self, units: set[int]) -> None:
        for index in units & self._present:
            self._present.remove(index)
            self._totals.gathered -= self._whole_bytes[index]

    # ---- gradients

    def _begin_backward(self) -> None:
        if not self._begun:
            self._begun = True
            self._reductions = Reductions(self, self._passes, accumulates=True)
            self._cursor = Cursor(self._order.backward)
            if not self._sharded:
                self._perform(self._cursor.finish())

    def _accept(self, one: _Gradients, size: int) -> None:
        one.arrived += 1
        one.wait(size)
        if one.complete and self.accumulating:
            self._fill(one)
        elif one.complete:
            self._reductions.note_complete(one.unit.index)

    def _fill(self, one: _Gradients) -> None:
        """Copy what waits into the unit's bucket."""
        if not one.waiting:
            return
        if one.lone and not self.accumulating and not one.own:
            one.take_own(True)
            one.wait(-one.waiting)
            self._read(momentary=True)  # beside all reductions in flight: its own waits for one of them
            return
        self._prepare(one)
        # Added to what is there, in its dtype.
        sizes = self._step.sizes
        wide = (
            one.waiting * sizes.reduce // sizes.compute if one.filled and sizes.compute != sizes.reduce else 0
        )
        self._read(momentary=True, more=wide)
        one.wait(-one.waiting)
        one.filled = one.filled or one.complete

    def _prepare(self, one: _Gradients) -> None:
        if self.accumulating and one.cut:
            one.take_own(True)
        if one.own or one.lent or not one.cut:
            one.take_own(one.own or one.lone)
            return
        if not one.pooled:
            while len(self._queue) >= self._in_flight_most:
                self._finish_oldest()
        while one.pooled and not self._free_buckets:
            if not self._queue:
                one.take_own(True)
                return
            self._finish_oldest()
        if one.pooled:
            self._free_buckets, one.lent = self._free_buckets - 1, True
        else:
            one.take_own(True)

    def reduce(self, index: int) -> None:
        """Start the reduction of a unit, like `Gradients`."""
        one = self.units[index]
        self._fill(one)
        while len(self._queue) >= self._in_flight_most:
            self._finish_oldest()
        self._totals.temporary += one.crossing_bytes
        one.reduced = True
        self._queue.append(one)

    def _finish_oldest(self) -> None:
        one = self._queue.popleft()
        self._totals.temporary -= one.crossing_bytes
        one.filled = False
        if one.lent:
            one.lent, self._free_buckets = False, self._free_buckets + 1
        if one.cut:
            one.take_own(False)

    def end_backward(self) -> None:
        """Wait for all reductions; gradients that stay on this rank go into their buckets."""
        if self.accumulating:
            for one in self.units.values():
                self._fill(one)
            return
        self._read(momentary=True)
        while self._queue:
            self._finish_oldest()

    # ---- what is held

    def _read(self, *, momentary: bool = False, more: int = 0) -> None:
        now = self._totals
        held = (now.gathered, now.kept, 0, now.own, now.temporary + more)
        self._readings.append(Reading(self._event, momentary, held))
