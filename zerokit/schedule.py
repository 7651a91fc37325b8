"""The order of a micro-batch as data: what is gathered, used, freed and reduced, and when. Standard library only.

    forward     G a · [a] · G b │ F a · [b] · G c │ F b · [c] · G d │ F c · [d]
    backward    [d] · G c · R d │ F d · [c] · G b · R c │ F c · [b] · G a · R b │ F b · [a] · R a

`G` is the gather of a unit, `F` frees it, `R` reduces its gradients, and `[a]` is a *stop*: the pass enters a module
that uses unit a. A pass that comes to a stop performs what stands before it, waits for the gather, and goes on to the
next bar: so the next unit's gather is in flight before this one's work begins. The runtime executes plans, the formulas
and the planner add up over them.

[Note: one order] Collectives match by the order in which ranks issue them, so that order must not depend on what one
rank happens to do. A rank that leaves a stop out still performs what stands around it, in order, with zeros for
gradients that never came. So the rank that is furthest behind can always go on, and no rank hangs as long as all make
equal passes.

Invariants, for any stops and any part of them that a rank makes: a unit is gathered before its stop, freed when the
pass has left it, and reduced once; the units of a stop, and of so many stops ahead as `prefetch` says, are held
together with the kept ones, and no others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple, TypeAlias

from zerokit.layout import Unit

Stop: TypeAlias = tuple[int, ...]
"""The units that a module uses when a pass enters it, and those around it whose modules are at work."""


class Kind(Enum):
    """What an operation does to a unit."""

    GATHER = "G"
    USE = "U"
    FREE = "F"
    REDUCE = "R"


class Operation(NamedTuple):
    """An entry of a plan. `number` is a unit's index or, of a use, the number of the stop."""

    kind: Kind
    number: int


class Segment(NamedTuple):
    """What a plan has around one use, from `start` to `end`: before it, and behind it until a unit is freed or used."""

    start: int
    before: tuple[Operation, ...]
    behind: tuple[Operation, ...]
    end: int


class Plan:
    """The operations of one direction of a micro-batch over `stops`, in the order in which they are issued.

    No operation frees the units `kept`.
    """

    def __init__(
        self,
        stops: Sequence[Stop] = (),
        operations: Sequence[Operation] = (),
        kept: frozenset[int] = frozenset(),
    ) -> None:
        self.stops, self.operations, self.kept = tuple(stops), tuple(operations), kept
        self.places: dict[int, list[int]] = {}
        """The operations that use each unit, ascending."""
        self.segments: dict[int, Segment] = {}
        """What stands around each use."""
        start = 0
        for at, (kind, number) in enumerate(self.operations):
            if kind is not Kind.USE:
                continue
            for unit in self.stops[number]:
                self.places.setdefault(unit, []).append(at)
            end = at + 1
            while end < len(self.operations) and self.operations[end].kind in (Kind.GATHER, Kind.REDUCE):
                end += 1
            self.segments[at] = Segment(start, self.operations[start:at], self.operations[at + 1 : end], end)
            start = end
        uses = sorted(self.segments)
        self.ends = frozenset(unit for at in (*uses[:1], *uses[-1:]) for unit in self._stop_at(at))
        """The units of the first and of the last stop."""

    def _stop_at(self, use: int) -> Stop:
        return self.stops[self.operations[use].number]

    def units(self, kind: Kind) -> list[int]:
        """The units of all operations of one kind, in order."""
        return [operation.number for operation in self.operations if operation.kind is kind]


class Cursor:
    """The position of a pass in a plan.

    `at` is the use that the pass came to last (-1 before). What stands before `_issued` has been performed, and of
    frees what stands before `_freed`.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.at = -1
        self._issued = self._freed = 0

    def find(self, unit: int) -> int | None:
        """The first use of `unit` from the position on."""
        places = self.plan.places.get(unit, ())
        found = bisect_left(places, self.at)
        return places[found] if found < len(places) else None

    def come_to(self, use: int, *, leaves: bool = True) -> Iterable[Operation]:
        """What is to be performed before this use; without the frees, if the pass `leaves` nothing behind it."""
        if leaves:
            self.at = use
            segment = self.plan.segments[use]
            if self._issued == self._freed == segment.start:
                self._issued = self._freed = use + 1
                return segment.before
        return self._until(use + 1, frees=leaves)

    def go_ahead(self) -> Sequence[Operation]:
        """What may be performed before anything else is used or freed."""
        segment = self.plan.segments.get(self._issued - 1)
        if segment is None:
            return ()
        if self._freed == self._issued:
            self._freed = segment.end
        self._issued = segment.end
        return segment.behind

    def finish(self) -> Iterable[Operation]:
        """All that is left."""
        return self._until(len(self.plan.operations), frees=True)

    def _until(self, stop: int, *, frees: bool) -> Iterator[Operation]:
        for at in range(self._freed if frees else self._issued, stop):
            operation = self.plan.operations[at]
            due = frees if operation.kind is Kind.FREE else at >= self._issued
            self._issued = max(self._issued, at + 1)
            if frees:
                self._freed = at + 1
            if due and operation.kind is not Kind.USE:
                yield operation


@dataclass(frozen=True)
class Order:
    """The order of all units in a micro-batch.

    Attributes:
        stops: of forward; each unit is in one at least.
        kept: units that stay gathered from their first use to the end of backward.
        reduced: units whose gradients are reduced, in an order that serves where plans gather nothing.
        prefetch: the stops whose units are gathered ahead of the one that computes; None where nothing is gathered.
        first: units that are gathered at the beginning of a pass.
        from_forward, from_backward: whether stops and `reduced` are what ranks have seen, and no guess.
        whole: units that are there all the time, and never gathered, where others come and go.
    """

    stops: tuple[Stop, ...]
    kept: frozenset[int]
    reduced: tuple[int, ...]
    prefetch: int | None = 1
    first: tuple[int, ...] = ()
    from_forward: bool = False
    from_backward: bool = False
    whole: frozenset[int] = frozenset()

    @classmethod
    def of_line(
        cls, units: Sequence[Unit], prefetch: int | None = 1, whole: frozenset[int] = frozenset()
    ) -> Order:
        """The order of the line, until a better one is known. Units without `scopes` come first and are kept."""
        rest = [unit.index for unit in units if not unit.scopes]
        scopes: dict[str, list[int]] = {}
        for unit in units:
            for scope in unit.scopes:
                scopes.setdefault(scope, []).append(unit.index)
        stops = dict.fromkeys([*((index,) for index in rest), *map(tuple, scopes.values())])
        reduced = [unit for stop in reversed(stops) for unit in reversed(stop) if units[unit].trainable]
        reduced_once = tuple(dict.fromkeys(reduced))
        return cls(tuple(stops), frozenset(rest), reduced_once, prefetch, tuple(rest), whole=whole)

    def recorded(self, trace: Sequence[Stop], kept: frozenset[int], first: Sequence[int]) -> Order:
        """The order of a pass that has made the stops `trace`, behind those of the units `first`.

        Kept units are in one stop only. A unit stays gathered between two uses with only kept ones in between. Units
        that the pass has left out follow their neighbours on the line, where other ranks meet them.
        """
        stops: list[Stop] = [(index,) for index in first]
        seen = set(first)
        last: Stop = ()
        for stop in trace:
            new = tuple(unit for unit in stop if unit not in kept or unit not in seen)
            moving = tuple(unit for unit in stop if unit not in kept)
            if new and (new != moving or moving != last):
                stops.append(new)
            seen.update(stop)
            last = moving or last
        for index in sorted({unit for stop in self.stops for unit in stop} - seen):
            before = max((at for at, stop in enumerate(stops) if index - 1 in stop), default=-1)
            stops.insert(before + 1, (index,))
        return replace(self, stops=tuple(stops), kept=kept, first=tuple(first), from_forward=True)

    def reducing(self, units: Sequence[int]) -> Order:
        """This order, with these units' gradients reduced in turn where nothing is gathered."""
        return replace(self, reduced=tuple(units), from_backward=True)

    @cached_property
    def units(self) -> tuple[int, ...]:
        """All units, each at its first use."""
        return tuple(dict.fromkeys(unit for stop in self.stops for unit in stop))

    @cached_property
    def last(self) -> Stop:
        """The units that backward begins with: forward leaves them in memory."""
        return next((moving for stop in reversed(self.stops) if (moving := self._moving(stop))), ())

    @cached_property
    def forward(self) -> Plan:
        """The plan of forward."""
        if self.prefetch is None:
            return Plan()
        return lay_out(self.stops, self.kept, self.prefetch, whole=self.whole)

    @cached_property
    def backward(self) -> Plan:
        """The plan of the backward pass that begins with what forward has left in memory."""
        return self._backward({*self.kept, *self.last})

    @cached_property
    def backward_afresh(self) -> Plan:
        """The plan of a backward pass that finds only kept units in memory."""
        return self._backward(self.kept)

    def _moving(self, stop: Stop) -> Stop:
        return tuple(unit for unit in stop if unit not in self.kept)

    def _backward(self, here: Collection[int]) -> Plan:
        if self.prefetch is None:
            return Plan((), [Operation(Kind.REDUCE, unit) for unit in self.reduced])
        last = {unit: at for at, stop in enumerate(reversed(self.stops)) for unit in stop}
        ready: list[list[int]] = [[] for _ in self.stops]
        for unit in sorted(self.reduced, reverse=True):
            ready[last[unit]].append(unit)
        stops = [self._moving(stop) for stop in reversed(self.stops)]
        return lay_out(stops, self.kept, self.prefetch, here, ready, self.whole)


def lay_out(
    stops: Sequence[Stop],
    kept: frozenset[int],
    prefetch: int,
    here: Collection[int] = (),
    reduced: Sequence[Sequence[int]] = (),
    whole: frozenset[int] = frozenset(),
) -> Plan:
    """The plan over `stops` that finds the units `here` in memory and reduces those of `reduced` behind each stop.

    Stops of kept units alone leave nothing behind them. Empty stops are places in `reduced`, and nothing else. Units
    that are `whole` are always there.
    """
    operations: list[Operation] = []
    stay = kept | whole
    # Units in memory, each with the last stop that it is there for.
    needed = dict.fromkeys([*here, *whole], 0)
    before, left = [], -1  # for each stop, the one before it that leaves others behind
    for number, stop in enumerate(stops):
        before.append(left)
        left = left if kept.issuperset(stop) else number

    def gather(number: int) -> None:
        operations.extend(Operation(Kind.GATHER, unit) for unit in stops[number] if unit not in needed)
        needed.update(dict.fromkeys(stops[number], number))

    ready: list[int] = []
    fetched: set[int] = set()  # stops that others before them gather for
    for number, stop in enumerate(stops):
        ready += reduced[number] if reduced else ()
        if not stop:
            continue
        if not kept.issuperset(stop):
            gone = {unit for unit, last in needed.items() if last < number} - stay.union(stop)
            operations += [Operation(Kind.FREE, unit) for unit in sorted(gone)]
            for unit in gone:
                del needed[unit]
        gather(number)
        operations.append(Operation(Kind.USE, number))
        ahead = 0
        for coming in range(number + 1, len(stops)):
            if coming in fetched:
                ahead += 1
                continue
            wanted = any(unit not in needed for unit in stops[coming])
            others = [unit for unit in stops[coming] if unit in needed and unit not in stay]
            # What is in use for an earlier stop, and is freed behind it, is gathered anew.
            if any(needed[unit] < before[coming] for unit in others) or (wanted and ahead == prefetch):
                break
            gather(coming)
            if wanted:
                fetched.add(coming)
                ahead += 1
        operations += [Operation(Kind.REDUCE, unit) for unit in ready]
        ready.clear()
    operations += [Operation(Kind.REDUCE, unit) for unit in ready]
    return Plan(stops, operations, kept)
