"""A home in pinned memory of the host, from which a GPU copies on one stream and to which it does on another.

The host never waits in a step. Streams are ordered by events:

    in          … | unit 2 | waits for `out` to have sent unit 1 | unit 3 …    into the memory that unit 1 had
    compute     … | unit 1 | waits for `in` | unit 2 | waits | unit 3 …
    out         … | unit 0 | waits for `compute` | unit 1 | waits | unit 2 …
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from zerokit.errors import UsageError
from zerokit.runtime.homes.copies import CopyStream, Issued
from zerokit.runtime.homes.elsewhere import Elsewhere, Moving, Place
from zerokit.runtime.masters import OwnedUnit
from zerokit.runtime.pinning import pages, pin

T = TypeVar("T", bound=OwnedUnit)


class PinnedHome(Elsewhere):
    """Pinned memory, a piece for each unit and one for what came later."""

    name = "host"

    def __init__(self, rooms: Mapping[int, int], come: CopyStream, leave: CopyStream) -> None:
        """`rooms`: bytes of each unit, by index; the streams serve one direction each."""
        self._come, self._go = come, leave
        self._pieces: dict[int, Tensor] = {}
        """By the first byte of the store that they are."""
        for stream in (come, leave):  # before the memory that they use is given back
            weakref.finalize(self, stream.arrive).atexit = False
        super().__init__(rooms)

    def grow(self, start: int, end: int) -> None:
        if end == start or any(at <= start and end <= at + one.nbytes for at, one in self._pieces.items()):
            return
        try:
            memory = pages(end - start)
        except OSError as error:
            raise UsageError(
                f"states='host': {(end - start) / 1e6:,.1f} MB of memory for masters and states cannot be had "
                f"({error.strerror}): take fewer ranks a node or states=PATH on a disk"
            ) from error
        self._pieces[start] = pin(memory, "states on the host")

    def forget(self, unit: OwnedUnit) -> None:
        super().forget(unit)
        self._come.arrive()
        self._go.arrive()
        used = [start for slot in self._slots.values() for start, _ in slot.parts]
        for at, piece in list(self._pieces.items()):
            if not any(at <= start < at + piece.nbytes for start in used):
                del self._pieces[at]

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._come.device)

    def fetch(self, places: Sequence[Place], memory: Tensor, after: Moving | None) -> Issued:
        left = [after] if isinstance(after, Issued) else []
        pairs = list(zip(_in_buffer(places, memory), self._in_store(places), strict=True))
        return self._come.copy(pairs, [self._come.mark(), *left])

    def put(self, places: Sequence[Place], memory: Tensor) -> Issued:
        pairs = list(zip(self._in_store(places), _in_buffer(places, memory), strict=True))
        return self._go.copy(pairs, [self._go.mark()])

    def _in_store(self, places: Sequence[Place]) -> list[Tensor]:
        """The bytes of places. None lies in two pieces: what does not fit into one begins another."""
        starts = sorted(self._pieces)
        found = []
        for place in places:
            start = starts[bisect_right(starts, place.offset) - 1]
            found.append(self._pieces[start][place.offset - start :][: place.nbytes])
        return found

    def tour(
        self,
        units: Sequence[T],
        work: Callable[[Sequence[T]], None],
        *,
        writes: bool,
        agree: Callable[[bool], None] | None = None,
    ) -> None:
        # Copies do not fail on one rank alone, so that ranks need not ask each other, and wait.
        super().tour(units, work, writes=writes)

    def stored(self, place: Place) -> Tensor:
        self._go.arrive()
        (content,) = self._in_store([place])
        return content.view(place.tensor.dtype).as_strided(place.tensor.shape, place.stride)


def _in_buffer(places: Sequence[Place], memory: Tensor) -> list[Tensor]:
    return [memory[place.at : place.at + place.nbytes] for place in places]
