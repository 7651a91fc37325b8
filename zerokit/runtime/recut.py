"""Shares that change between steps: masters, states and kept parameters move to another cut, unit by unit.

    before    |------- rank 0 -------|--- rank 1 ---|-- rank 2 --|
    after     |-- rank 0 --|------- rank 1 -------|--- rank 2 ---|
    moves                  |---------| to rank 1  |-| to rank 2

Each unit makes one exchange: what leaves a rank lies behind each other in bytes, and arrives where it will stay. So a
rank has a unit's old elements and its new ones at once, and everything else once. Nothing is computed, so all bits stay
as they are.

A rank that cannot read a unit, or has no memory for it, says so before the unit changes, and then all ranks bring back
those that have moved already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerokit.errors import StorageError, ZerokitError
from zerokit.formulas import Operation, Pool, TrafficReport, operation_name
from zerokit.layout import Interval, Layout, Unit
from zerokit.owners import Owners
from zerokit.runtime.build import Runtime
from zerokit.runtime.collectives import Kind, Parcels
from zerokit.runtime.forms import (
    Record,
    flat,
    flat_one,
    forms_in,
    made_of,
    merged,
    moving,
    record_of,
    strided,
)
from zerokit.runtime.masters import Master, MasterSlice, WholeMaster
from zerokit.runtime.measure import predicted_memory
from zerokit.runtime.memory import Heap
from zerokit.runtime.shards import Shards
from zerokit.runtime.unit import UnitState

RECUT = "recut()"

Moves = Sequence[tuple[int, int, Interval]]
"""From which rank, to which rank, and which elements."""


class StatesLost(StorageError):
    """Masters or states are gone on some rank; units and ranks have one cut all the same."""


class HalfCut(StorageError):
    """Some units have one cut, and some the other."""


# ---- what moves


@dataclass(frozen=True, slots=True)
class _Line:
    """Elements that move alike, of `width` bytes each: what this rank had of them, and where it has them now.

    A tensor that is updated whole moves as elements 0 to n of no unit.
    """

    moves: Moves
    width: int
    had: Sequence[Shards]
    has: Sequence[Shards]
    unit: Unit | None

    def payload(self, interval: Interval) -> int:
        """Elements without padding."""
        return interval.numel if self.unit is None else self.unit.payload_within(interval)


def _bytes_at(shards: Sequence[Shards], interval: Interval) -> Tensor:
    holder = next(one for one in shards if one.covers(interval))
    return holder.at(interval).contiguous().view(torch.uint8)


class _Moving:
    """One unit on its way to another cut."""

    def __init__(self, runtime: Runtime, unit: UnitState, after: Unit, owners: Owners) -> None:
        self._runtime, self._unit, self._after, self._owners = runtime, unit, after, owners
        self._before, self._owned_before = unit.unit, unit.owners.of_unit(unit.index)
        self._optimizer_moves = list(unit.placement.moves("optimizer", self._before, after))
        self._states: dict[Tensor, Any] = runtime.inner.state

    def move(self, problem: str, *, summed: bool, lossy: bool) -> str:
        """Move it; `summed` if gradients are held, `lossy` if what cannot be read is to be moved as it shows.

        Returns what went wrong on this rank after all elements had moved. Raises `StorageError` on all ranks, before
        anything has changed, where one had a `problem` before, cannot read the unit or has no memory for it.
        """
        runtime, unit = self._runtime, self._unit
        lost = ""
        with ExitStack() as visit:
            failed = _problem_of(lambda: visit.enter_context(runtime.home.visiting(unit, writes=False)))
            if lossy:
                lost = problem or failed
            else:
                problem = problem or failed
            record = record_of(unit, self._states)
            forms = merged(_agreed(runtime, "" if lossy else problem, record))
            made: list[tuple[Master, Any]] = []
            parts: list[_Part] = []
            problem = _problem_of(lambda: parts.extend(self._allocated(forms)))
            _agreed(runtime, problem, None)
            before = unit.masters
            self._exchange(self._become(parts, made, summed=summed))
            for master in before:
                self._states.pop(master.tensor, None)
            unit.take_masters(master for master, _ in made)
            self._states.update((master.tensor, state) for master, state in made if state)
            if unit.unit.trainable:
                unit.guard_masters()
            parts.clear()
            del before
        if unit.unit.trainable:
            room = runtime.room(self._after, self._owners)
            lost = lost or _problem_of(lambda: runtime.home.move_in(unit, room))
        return lost

    def _stretches(self, forms: Record) -> Iterator[tuple[int, Interval, Any]]:
        """The stretches of the unit whose elements have one master a rank: group, elements and form of states."""
        for group, stretch in self._after.groups_within(self._after.cut.whole):
            if group in self._owners.groups:
                continue
            members = [
                (position, part.offset)
                for position, part in enumerate(self._after.slices)
                if part.parameter.group == group and part.interval.numel
            ]
            each = [forms.slices[position] for position, _ in members]
            if not each:
                continue
            if not forms.divided and all(one == each[0] for one in each):
                yield group, stretch, each[0]
                continue
            starts = [stretch.start, *(offset for _, offset in members[1:])]
            pieces = map(Interval, starts, [*starts[1:], stretch.stop])
            yield from zip([group] * len(each), pieces, each, strict=True)

    def _allocated(self, forms: Record) -> Iterator[_Part]:
        """Memory for what this rank has from now on, and all that has moves."""
        unit, device = self._unit, self._unit.device
        if not unit.unit.trainable:
            return
        master = self._runtime.precision.master

        own = unit.placement.updated(self._after, unit.collectives.position)
        for group, stretch, form in self._stretches(forms):
            numel = stretch.intersection(own).numel
            exact = torch.empty(numel, dtype=master, device=device) if unit.separate and numel else None
            state = made_of(form, partial(flat_one, numel, device), device) if numel else None
            yield _Part(group, stretch.intersection(own), stretch, form, exact, state)
        for whole in self._owners.of_unit(unit.index):
            form, numel = forms.wholes[whole.interval], whole.interval.numel
            mine = whole.owner == unit.owner
            dtype = master if unit.separate else unit.dtype
            exact = torch.empty(numel, dtype=dtype, device=device) if mine and unit.apart else None
            state = made_of(form, partial(strided, device), device) if mine else None
            yield _Part(whole.group, whole.interval, whole.interval, form, exact, state, whole)

    def _become(self, parts: Sequence[_Part], made: list[tuple[Master, Any]], *, summed: bool) -> list[_Line]:
        """Let the unit and its gradients be those of the other cut, with masters `made` for them, all to be filled."""
        unit, before, after = self._unit, self._before, self._after
        kept, slices, owned = unit.kept, list(unit.slices), list(unit.owned)
        gradients = self._runtime.gradients.units.get(unit.index)
        summed = summed and gradients is not None
        sums = [Shards(before, gradients.held.at(unit.updated), unit.updated)] if gradients and summed else []
        unit.take_cut(after, self._owners)
        moves = list(unit.placement.moves("parameters", before, after))
        lines = [_Line(moves, unit.dtype.itemsize, [kept], [unit.kept], after)]
        if gradients is not None:
            gradients.take_cut(summed=summed)
        if gradients is not None and summed:
            has = [Shards(after, gradients.held.at(unit.updated), unit.updated)]
            lines.append(_Line(self._optimizer_moves, gradients.dtype.itemsize, sums, has, after))
        for part in parts:
            if part.whole is None:
                lines += self._slice_lines(part, slices, made)
            else:
                lines += self._whole_lines(part, owned, made)
        return lines

    def _slice_lines(
        self, part: _Part, slices: Sequence[MasterSlice], made: list[tuple[Master, Any]]
    ) -> Iterator[_Line]:
        unit = self._unit
        had = [m for m in slices if m.group == part.group and m.interval.intersection(part.stretch).numel]
        has = []
        if part.interval.numel:
            has.append(MasterSlice(unit.kept, part.group, part.interval, part.exact))
            made.append((has[0], part.state))
        within = [(a, b, piece.intersection(part.stretch)) for a, b, piece in self._optimizer_moves]
        moves = [(a, b, piece) for a, b, piece in within if piece.numel]

        def line(width: int, of_had: Sequence[Tensor], of_has: Sequence[Tensor]) -> _Line:
            old = [m.like(tensor) for m, tensor in zip(had, of_had, strict=True)]
            new = [m.like(tensor) for m, tensor in zip(has, of_has, strict=True)]
            return _Line(moves, width, old, new, self._after)

        if unit.separate:
            width = self._runtime.precision.master.itemsize
            yield line(width, [m.values.tensor for m in had], [m.values.tensor for m in has])
        before = [moving(m, self._states.get(m.tensor, {})) for m in had]
        after = [moving(m, part.state) for m in has]
        for at, form in enumerate(forms_in(part.form)):
            yield line(form.dtype.itemsize, [one[at] for one in before], [one[at] for one in after])

    def _whole_lines(
        self, part: _Part, owned: Sequence[WholeMaster], made: list[tuple[Master, Any]]
    ) -> Iterator[_Line]:
        unit, whole = self._unit, part.whole
        assert whole is not None
        earlier = next(one for one in self._owned_before if one.interval == whole.interval)
        had = [master for master in owned if master.whole.interval == whole.interval]
        has = []
        if whole.owner == unit.owner:
            has.append(WholeMaster(unit.whole, whole, part.exact))
            made.append((has[0], part.state))
        passes = list(unit.placement.passes(earlier.owner, whole.owner))

        def line(numel: int, width: int, of_had: Sequence[Tensor], of_has: Sequence[Tensor]) -> _Line:
            every = Interval(0, numel)
            old = [Shards(self._before, flat(tensor), every) for tensor in of_had]
            new = [Shards(self._after, flat(tensor), every) for tensor in of_has]
            return _Line([(a, b, every) for a, b in passes], width, old, new, None)

        if unit.apart:
            width = self._runtime.precision.master.itemsize if unit.separate else unit.dtype.itemsize
            values = [m.values.tensor for m in had], [m.values.tensor for m in has]
            yield line(whole.interval.numel, width, *values)
        before = [moving(m, self._states.get(m.tensor, {})) for m in had]
        after = [moving(m, part.state) for m in has]
        for at, form in enumerate(forms_in(part.form)):
            numel = torch.Size(form.shape).numel()
            yield line(numel, form.dtype.itemsize, [one[at] for one in before], [one[at] for one in after])

    def _exchange(self, lines: Sequence[_Line]) -> None:
        """Bring elements to where they are from now on, from this rank and from others."""
        collectives, index = self._runtime.collectives, self._unit.index
        leaving: list[Tensor] = []
        sends: list[tuple[int, Interval]] = []
        receives: list[tuple[int, int, Tensor]] = []
        ends: dict[int, int] = {}  # of what each rank sends so far, in bytes
        moved: dict[str, Operation] = {}
        for line in lines:
            for new in line.has:
                for old in line.had:
                    new.copy(old)
            for source, target, interval in line.moves:
                start = ends.get(source, 0)
                ends[source] = start + interval.numel * line.width
                if source == collectives.rank:
                    leaving.append(_bytes_at(line.had, interval))
                    sends.append((target, Interval(start, ends[source])))
                if target == collectives.rank:
                    receives.append((source, start, _bytes_at(line.has, interval)))
                name = operation_name("recut", collectives.mesh.between(source, target), collectives.mesh)
                count = line.payload(interval)
                moved[name] = moved.get(name, Operation(1)) + Operation(0, count, count * line.width)
        if not ends:
            return
        nothing = torch.empty(0, dtype=torch.uint8, device=self._unit.device)
        parcels = Parcels(torch.cat(leaving) if leaving else nothing, sends, receives)
        received = sum(into.numel() for _, _, into in receives)
        counts = []
        for name, operation in moved.items():
            counts.append(collectives.counter(name, Kind.RECUT, index, operation, received))
            received = 0  # once
        collectives.exchange(collectives.between_all, Kind.RECUT, index, parcels, counts).wait()
        collectives.wait_for_readers()


@dataclass(frozen=True, slots=True)
class _Part:
    """Elements with one master: the `stretch` of them all, and this rank's `interval` of it with its memory.

    The master's own memory is `exact`, if it has some; a whole tensor's is its owner's alone.
    """

    group: int
    interval: Interval
    stretch: Interval
    form: Any
    exact: Tensor | None
    state: Any
    whole: Any = None


def _problem_of(act: Callable[[], object]) -> str:
    """What went wrong; "" if nothing did."""
    try:
        act()
    except (ZerokitError, RuntimeError, MemoryError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _agreed(runtime: Runtime, problem: str, value: Any) -> list[Any]:
    """Every rank's `value`. Raises `StorageError` on all of them where one has a problem."""
    everyone = runtime.collectives.all_gather_objects((problem, value), RECUT)
    failed = [f"rank {rank}: {theirs}" for rank, (theirs, _) in enumerate(everyone) if theirs]
    if failed:
        raise StorageError(f"{RECUT} could not move masters and states: {'; '.join(failed)}")
    return [theirs for _, theirs in everyone]


# ---- all units


@torch.no_grad()
def recut(runtime: Runtime, layout: Layout, *, summed: bool, averaged: bool) -> TrafficReport:
    """Move all that `runtime` holds to the cuts of `layout`. Collective, between steps.

    `summed` if gradients are held, `averaged` if there is an average of the weights.

    Raises `StorageError` on all ranks where one of them cannot, and everything is as it was; or `StatesLost`, where
    masters or states could not be brought back, or `HalfCut`, where units could not.
    """
    report = TrafficReport()
    runtime.settle()
    before = runtime.layout, runtime.owners
    # Most units need memory again to come back, so one that has none must know before the first has moved.
    most = _bytes_more(runtime, layout, averaged=averaged)
    _agreed(
        runtime,
        _problem_of(lambda: torch.empty(most, dtype=torch.uint8, device=runtime.collectives.device)),
        None,
    )
    with runtime.collectives.counting(report):
        moved: list[UnitState] = []
        try:
            _move_units(runtime, layout, runtime.owners.under(layout), moved, summed=summed, lossy=False)
        except StorageError as error:
            runtime.home.renew()
            returned: list[UnitState] = []
            try:
                _move_units(runtime, *before, returned, units=moved, summed=summed, lossy=True)
            except StorageError as again:
                kind = StatesLost if len(returned) == len(moved) else HalfCut
                raise kind(f"{error}. Nor could those that had moved be brought back") from again
            raise
    runtime.collectives.forget_counts()
    return report


def _bytes_more(runtime: Runtime, layout: Layout, *, averaged: bool) -> int:
    """Bytes that this rank needs for other cuts: what it holds more then, and the largest unit meanwhile."""
    precision = runtime.precision
    more = predicted_memory(runtime, averaged=averaged, layout=layout).total
    more -= predicted_memory(runtime, averaged=averaged).total
    states = max(each.element_bytes for each in runtime.states)
    width = precision.compute.itemsize + precision.reduce.itemsize + precision.master.itemsize + states
    return max(more, 0) + width * max(unit.numel for unit in layout.units)


def _move_units(
    runtime: Runtime,
    layout: Layout,
    owners: Owners,
    moved: list[UnitState],
    *,
    units: Sequence[UnitState] | None = None,
    summed: bool,
    lossy: bool,
) -> None:
    """Move units, by default all, one after the other, and note in `moved` which have."""
    heap = Heap(runtime.collectives.device, settles=True)
    numel = Pool.of(layout, runtime.placement).numel
    problem = _problem_of(lambda: runtime.gradients.pool.resize(numel))
    for unit in runtime.units if units is None else units:
        moving = _Moving(runtime, unit, layout.units[unit.index], owners)
        problem = moving.move(problem, summed=summed, lossy=lossy)
        moved.append(unit)
        heap.return_freed_memory()
    runtime.take_cut(layout, owners)
    _agreed(runtime, problem, None)
