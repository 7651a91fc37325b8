"""Homes whose states come to the device and leave it again: while one unit is updated, the next comes, the last leaves.

A unit's tensors lie one behind the other in a buffer while they visit, and at places of their own in the store. Buffers
and places begin at pages, as direct reads and writes need it.

    store    | unit 0: master, exp_avg, exp_avg_sq | unit 1: … | unit 2: … | what came later
    buffers                        unit 1 | unit 2
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from zerokit.errors import ScheduleError
from zerokit.runtime.homes.home import Elements, Home, states_of
from zerokit.runtime.masters import OwnedUnit
from zerokit.runtime.memory import Heap
from zerokit.runtime.torch_internals import point_at

T = TypeVar("T", bound=OwnedUnit)
PAGE = 4096


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place: byte `offset` of the store, and byte `at` of a buffer."""

    tensor: Tensor
    offset: int
    at: int
    stride: tuple[int, ...]
    """That of the tensor's dimensions: products of matrices that lie otherwise have other bits."""

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes

    def view(self, memory: Tensor) -> Tensor:
        """The tensor in a buffer."""
        own = memory[self.at : self.at + self.nbytes].view(self.tensor.dtype)
        return own.as_strided(self.tensor.shape, self.stride)


class Moving(Protocol):
    """Bytes on their way: `wait` raises what went wrong."""

    def wait(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Slot:
    """A unit's parts of the store, each from one byte to another, and the places in them."""

    parts: Sequence[tuple[int, int]] = ()
    places: Sequence[Place] = ()

    @property
    def size(self) -> int:
        """Bytes of a buffer for the unit."""
        return max((place.at + _to_page(place.nbytes) for place in self.places), default=0)

    @property
    def room(self) -> int:
        """Bytes of a buffer for the unit and for what a first step makes."""
        return max(self.size, sum(stop - start for start, stop in self.parts[:1]))


class Elsewhere(Home, ABC):
    """What homes have in common whose states move; where to is theirs: `buffer`, `fetch`, `put` and `grow`."""

    def __init__(self, rooms: Mapping[int, int]) -> None:
        """`rooms`: bytes that each unit will probably need, by index."""
        self._inner: Optimizer | None = None
        self._slots: dict[int, _Slot] = {}
        self._nothing: dict[torch.dtype, Tensor] = {}
        self._heap = Heap(torch.device("cpu"), settles=False)
        for index, room in rooms.items():
            end = self._end
            self._slots[index] = _Slot([(end, end + room)])
            self.grow(end, end + room)

    # ---- what a home of this kind does

    @abstractmethod
    def buffer(self, nbytes: int) -> Tensor:
        """Memory on the device for a unit that visits."""

    @abstractmethod
    def fetch(self, places: Sequence[Place], memory: Tensor, after: Moving | None) -> Moving:
        """Start to bring tensors into a buffer, once its last content has left, which is `after`."""

    @abstractmethod
    def put(self, places: Sequence[Place], memory: Tensor) -> Moving:
        """Start to bring tensors from a buffer into the store. The buffer may be fetched into `after` that."""

    @abstractmethod
    def grow(self, start: int, end: int) -> None:
        """Let the store have bytes from `start`, before which all are used, to `end`. Raises a `ZerokitError`."""

    # ---- what is where

    def attach(self, inner: Optimizer) -> None:
        self._inner = inner

    def away(self, unit: OwnedUnit) -> Sequence[Tensor]:
        found: list[Tensor] = []
        for master in unit.masters:
            if master.separate and master.tensor.numel():
                found.append(master.tensor)
            if self._inner is not None:
                found += states_of(master, self._inner)
        return found

    @property
    def most(self) -> int:  # type: ignore[override]
        sizes = [sum(place.nbytes for place in slot.places) for slot in self._slots.values()]
        return min(len(sizes), 2) * max(sizes, default=0)

    @property
    def _end(self) -> int:
        """The end of what units have."""
        return max((stop for slot in self._slots.values() for _, stop in slot.parts), default=0)

    def reserve(self, nbytes: int) -> None:
        self.grow(self._end, self._end + nbytes)

    def forget(self, unit: OwnedUnit) -> None:
        self._slots.pop(unit.index, None)

    def move_in(self, unit: OwnedUnit, room: int) -> None:
        self.forget(unit)
        size = max(room, sum(_to_page(tensor.nbytes) for tensor in self.away(unit)))
        start = self._gap(size)
        self.grow(start, start + size)
        self._slots[unit.index] = _Slot([(start, start + size)])
        self.leave(unit)

    def _gap(self, size: int) -> int:
        """The first byte of the store from which so many are no unit's."""
        end = 0
        for start, stop in sorted(part for slot in self._slots.values() for part in slot.parts):
            if start - end >= size:
                break
            end = max(end, stop)
        return end

    def place_of(self, unit: OwnedUnit, tensor: Tensor) -> Place | None:
        """Where a tensor of a unit is, if it is away."""
        slot = self._slots.get(unit.index)
        return next((place for place in slot.places if place.tensor is tensor), None) if slot else None

    def _arranged(self, unit: OwnedUnit) -> _Slot:
        """Places for all that the unit has now, in the parts that it has and, beyond these, at the end of the store."""
        parts = list(self._slots.get(unit.index, _Slot()).parts)
        free = [start for start, _ in parts]
        end = beyond = self._end
        at, places = 0, list[Place]()
        for tensor in self.away(unit):
            size = _to_page(tensor.nbytes)
            fitting = [number for number, (_, stop) in enumerate(parts) if free[number] + size <= stop]
            if fitting:
                offset = free[fitting[0]]
                free[fitting[0]] += size
            else:
                offset, beyond = beyond, beyond + size
            places.append(Place(tensor, offset, at, dense_stride(tensor)))
            at += size
        if beyond > end:
            self.grow(end, beyond)
            parts.append((end, beyond))
        return _Slot(parts, places)

    # ---- coming and leaving

    def leave(self, unit: OwnedUnit) -> None:
        self._leave(unit, None).wait()

    def _leave(self, unit: OwnedUnit, memory: Tensor | None) -> Moving:
        """Start to write a unit's tensors, which lie in this buffer or elsewhere, and let them be away."""
        slot = self._arranged(unit)
        strangers = [
            place
            for place in slot.places
            if memory is None or place.tensor.data_ptr() != memory.data_ptr() + place.at
        ]
        if strangers:
            # Behind what lies in the buffer, if they come from outside of it: new states of a first step.
            fits = memory is not None and slot.size <= memory.nbytes
            if memory is None or not fits or any(_lies_in(memory, place.tensor) for place in strangers):
                memory, strangers = self.buffer(slot.size), list(slot.places)
            for place in strangers:
                place.view(memory).copy_(place.tensor.detach())
        leaving = self.put(slot.places, self.buffer(0) if memory is None else memory)
        self._slots[unit.index] = slot  # not before: what could not be put is here
        self._send_away(slot)
        if strangers:
            # What was made outside: freed blocks among small ones that stay would grow the heap from unit to unit.
            self._heap.return_freed_memory()
        return leaving

    def _send_away(self, slot: _Slot) -> None:
        for place in slot.places:
            kind = place.tensor.dtype
            if kind not in self._nothing:
                value = float("nan") if kind.is_floating_point or kind.is_complex else -1
                self._nothing[kind] = torch.full((), value, dtype=kind, device=place.tensor.device)
            point_at(place.tensor, self._nothing[kind].expand(place.tensor.shape))

    def tour(
        self,
        units: Sequence[T],
        work: Callable[[Sequence[T]], None],
        *,
        writes: bool,
        agree: Callable[[bool], None] | None = None,
    ) -> None:
        if not units:
            work(units)
            return
        with closing(self._visits(units, work, writes)) as visits:
            going = True
            while going:
                error: Exception | None = None
                try:
                    going = next(visits)
                except ScheduleError:
                    raise  # the others have gone, or wait elsewhere
                except Exception as raised:
                    error = raised
                try:
                    if agree is not None:
                        agree(error is not None)
                finally:
                    if error is not None:
                        raise error

    def _visits(
        self, units: Sequence[T], work: Callable[[Sequence[T]], None], writes: bool
    ) -> Generator[bool, None, None]:
        """Yields before each unit's work and at the end: where this rank may learn that another one has failed.

        True says that there is more to do.
        """
        slots = [self._slots.get(unit.index, _Slot()) for unit in units]
        size = max(slot.room for slot in slots)
        buffers = [self.buffer(size) for _ in units[:2]]
        coming, leaving = [self.fetch(slots[0].places, buffers[0], None)], list[Moving]()
        try:
            for number, unit in enumerate(units):
                _wait_for([*leaving[:-1], coming.pop()])
                del leaving[:-1]
                yield True
                if number + 1 < len(units):
                    # Into the memory of the unit before, behind its last bytes on their way out.
                    last = leaving[-1] if leaving else None
                    coming.append(self.fetch(slots[number + 1].places, buffers[(number + 1) % 2], last))
                with self._shown(slots[number], buffers[number % 2]):
                    work([unit])
                    if writes:
                        leaving.append(self._leave(unit, buffers[number % 2]))
            _wait_for(leaving)
            yield False
        finally:
            with suppress(Exception):
                _wait_for([*leaving, *coming])

    @contextmanager
    def visiting(self, unit: OwnedUnit, *, writes: bool) -> Iterator[None]:
        slot = self._slots.get(unit.index, _Slot())
        memory = self.buffer(slot.room)
        self.fetch(slot.places, memory, None).wait()
        with self._shown(slot, memory):
            yield
            if writes:
                self._leave(unit, memory).wait()

    @contextmanager
    def _shown(self, slot: _Slot, memory: Tensor) -> Iterator[None]:
        """A context in which a unit's tensors are those in a buffer; after an exception they are as they were."""
        for place in slot.places:
            point_at(place.tensor, place.view(memory))
        try:
            yield
        finally:
            self._send_away(slot)

    def elements(self, unit: OwnedUnit, tensor: Tensor) -> Elements:
        place = self.place_of(unit, tensor)
        return tensor.detach() if place is None else self.stored(place)

    @abstractmethod
    def stored(self, place: Place) -> Elements:
        """What is at a place of the store."""


def _wait_for(moving: Sequence[Moving]) -> None:
    """Wait for all that is on its way, and raise the first error."""
    errors = []
    for one in moving:
        try:
            one.wait()
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _to_page(nbytes: int) -> int:
    """Bytes as far as their last page ends."""
    return -(-nbytes // PAGE) * PAGE


def _lies_in(memory: Tensor, tensor: Tensor) -> bool:
    return memory.data_ptr() <= tensor.data_ptr() < memory.data_ptr() + memory.nbytes


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's strides, if it leaves no holes; else those of a contiguous one."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return torch.empty(tensor.shape, device="meta").stride()
            expected *= size
    return tensor.stride()
