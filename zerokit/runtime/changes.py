"""What the user changes where whole values are shown: alike on all ranks, or as one of them says.

Ranks compare checksums of what any of them has changed; only what differs is sent.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zerokit.errors import ScheduleError, UsageError
from zerokit.runtime.collectives import Collectives
from zerokit.runtime.unit import UnitState

_CHUNK = 1 << 20
"""Elements that are widened to 8 bytes at a time."""
_FACTOR = 1_000_003
_INTEGERS = {2: torch.int16, 4: torch.int32}  # by size, for the bits of an element; bytes for all others

ONE_RANK_SAYS = "changes inside gathered(source=...) take effect at its end: leave the context first"
"""Why steps are refused inside."""


def checksum(values: Tensor) -> Tensor:
    """A checksum of the bits of `values` and of their places, 0-d int64; the same on every device."""
    bits = values.detach().contiguous().view(-1).view(_INTEGERS.get(values.element_size(), torch.uint8))
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for chunk in bits.split(_CHUNK):
        # Odd weights: one changed element changes the sum, and so do two that change places.
        weights = torch.arange(chunk.numel(), device=values.device) * 2 + 1
        total = total * _FACTOR + (chunk.long() * weights).sum()
    return total


def checksums(values: Sequence[Tensor | None]) -> list[int | None]:
    """The checksum of each tensor, read from the device at once."""
    there = [checksum(value) for value in values if value is not None]
    numbers = iter(torch.stack(there).tolist() if there else ())
    return [None if value is None else next(numbers) for value in values]


def require_rank(source: int | None, world: int) -> None:
    """Raise `UsageError` for a `source` that is no rank of `world`."""
    if source is not None and not (type(source) is int and 0 <= source < world):
        raise UsageError(
            f"source={source!r}: expected None or a rank of the optimizer's group, 0 to {world - 1}"
        )


_END = "end of gathered() or load_state_dict()"


def exchange(collectives: Collectives, source: int | None, mine: Any, place: str) -> list[Any]:
    """Every rank's `mine`. Raises `UsageError`, on every rank, where they do not name the same `source`.

    `place` names the call that all of them make.
    """
    everyone = collectives.all_gather_objects((source, mine), place)
    if len({theirs for theirs, _ in everyone}) > 1:
        named = ", ".join(f"{theirs} on rank {rank}" for rank, (theirs, _) in enumerate(everyone))
        raise UsageError(f"source= differs by rank ({named}): all ranks must name the same one")
    return [each for _, each in everyone]


def differing(records: Sequence[Mapping[int, Any]]) -> list[int]:
    """The keys under which not all ranks have the same."""
    return [key for key, first in records[0].items() if any(other[key] != first for other in records)]


class Changes:
    """The user's changes to whole parameters inside `gathered()`.

    While `source` is a rank, changes wait for the end of its context: those of all other ranks are to be dropped.
    """

    def __init__(self, units: Sequence[UnitState], collectives: Collectives) -> None:
        self._units, self._collectives = units, collectives
        self._written: dict[int, set[int]] = {}
        """Positions of the parameters that this rank has changed since `begin`, by unit."""
        self.source: int | None = None

    def begin(self) -> None:
        """Count changes from now on."""
        self._written.clear()
        for unit in self._units:
            unit.note_versions()

    def note(self) -> None:
        """Take note of changes, before their traces go."""
        for unit in self._units:
            if written := unit.written():
                self._written.setdefault(unit.index, set()).update(written)

    def wait_for(self, source: int) -> None:
        """Leave masters as they are until `source` has had its say. Raises `UsageError` inside another such context."""
        if self.source is not None:
            raise UsageError(
                "gathered(source=...) inside another one: leave that first, or omit the inner source"
            )
        self.source = source
        for unit in self._units:
            unit.keep_exact(kept=True)

    def agree(self) -> None:
        """Let all ranks have the same changes: those of `source`, or those that all have made alike. Collective.

        Raises `UsageError`, on every rank, for others; rank 0's values are on all ranks then.
        """
        self.note()
        source, collectives = self.source, self._collectives
        try:
            asked = exchange(collectives, source, sorted(self._written), _END)
            mine = {index: self._record(index) for index in sorted(set().union(*asked))}
            records = exchange(collectives, source, mine, _END)
        except ScheduleError:  # other ranks are elsewhere, and have not made these changes
            self.end_alone()
            raise
        apart = differing(records)
        for index in records[0]:
            exact = () if source is None else records[source][index][1]
            self._units[index].take_shown(source, exact if index in apart else None)
        self._end()
        if apart and source is None:
            raise UsageError(
                f"ranks left gathered() or load_state_dict() with different values in "
                f"{', '.join(self._units[index].unit.name for index in apart[:4])}{' …' if len(apart) > 4 else ''}: "
                "change weights alike on all ranks, or let one rank say, `with optimizer.gathered(source=0):`. All "
                "ranks have rank 0's values of these units now"
            )

    def end_alone(self) -> None:
        """End without the other ranks; their agreement before the next step shows whether all did the same."""
        self.note()
        for index in sorted(self._written):
            self._collectives.note_path(zlib.crc32(repr(self._record(index)).encode()))
        self._end()

    def _end(self) -> None:
        self._written.clear()
        if self.source is not None:
            self.source = None
            for unit in self._units:
                unit.keep_exact(kept=False)

    def _record(self, index: int) -> tuple[Any, ...]:
        """What tells ranks that unit `index` differs, and the exact values that it was given, if they are kept."""
        unit = self._units[index]
        unit.complete()
        if self.source is not None:
            exact = unit.exact or {}
            sums = checksums(list(exact.values()))
            given = [(at, one.dtype, total) for (at, one), total in zip(exact.items(), sums, strict=True)]
            return checksums(unit.whole.views()), given
        # Forward renormalises some by what it looks up, on each rank by itself. Where masters are wider, checksums may
        # be equal although one rank alone was given other values.
        views = [view for at, view in enumerate(unit.whole.views()) if at not in unit.renormed]
        written = self._written.get(index, set()) - unit.renormed if unit.separate else set()
        return checksums(views), sorted(written)


@contextmanager
def buffers_from(source: int, model: nn.Module, collectives: Collectives) -> Iterator[None]:
    """A context after which all ranks have the buffers that rank `source` has changed inside. Collective."""
    before = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
    yield
    buffers: dict[str, Tensor | None] = dict(model.named_buffers())
    changed = []
    for name, buffer in model.named_buffers():
        known, version = before.get(name, (None, 0))
        if buffer is not known or buffer._version != version:
            changed.append((name, buffer.shape, buffer.dtype))
    for name, shape, dtype in collectives.all_gather_objects(changed, "end of gathered(source=)")[source]:
        own = buffers.get(name)
        if own is None or (own.shape, own.dtype) != (shape, dtype):
            path, _, last = name.rpartition(".")
            own = torch.empty(shape, dtype=dtype, device=collectives.device)
            model.get_submodule(path)._buffers[last] = own
        with torch.no_grad():
            collectives.broadcast(own, source)
