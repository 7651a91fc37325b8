"""A few shared pages through which the ranks of a node announce the memory that they offer.

A rank *offers* what others may read, and under which number they find it (an address, or an offset in its window); a
reader marks it as *taken*, and until all have, the offered memory stays as it is. Counts are per operation
and unit, so ranks that do things in another order cannot swap contents.

[Note: locks show who is alive] Each rank holds a lock on its byte of the board's file. The system drops it when the
process ends, however that comes; asking for it needs no rights over the other process, and its number may mean
another process in another container. Such locks (POSIX's) belong to the process: children do not keep them.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import weakref
from enum import IntEnum

_FIELDS = 3
_LOCK = struct.Struct("hhqqi0q")
"""fcntl(2)'s struct flock: type, whence, start, length, process."""


class Kind(IntEnum):
    """Operations that others read for; at most one of a kind and unit at a time."""

    GATHER = 0
    REDUCE = 1


class Board:
    """For each rank, kind and unit: how often it offered, under what number, how often it took.

    Args:
        descriptor: the file that the node's ranks share; it is closed with the board.
        me: this rank's position among the node's ranks.
        ranks: how many there are.
        units: how many units there are.
    """

    def __init__(self, descriptor: int, me: int, ranks: int, units: int) -> None:
        weakref.finalize(self, os.close, descriptor)
        self._me, self._units, self._descriptor = me, units, descriptor
        self._others = [position for position in range(ranks) if position != me]
        self._cells = memoryview(mmap.mmap(descriptor, _size(ranks, units))).cast("q")
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, me)

    def offer(self, kind: Kind, unit: int, number: int) -> int:
        """Let the others read what `number` names. Returns which offer of this unit it is."""
        cell = self._cell(self._me, kind, unit)
        count = self._cells[cell] + 1
        self._cells[cell + 1] = number
        self._cells[cell] = count  # last: who sees the count sees the number (x86 keeps stores in order)
        return count

    def offered(self, kind: Kind, unit: int, count: int) -> list[int] | None:
        """The numbers that all ranks offered, this one's too, once the others have made offer `count`."""
        for position in self._others:
            if self._cells[self._cell(position, kind, unit)] < count:
                return None
        return [
            self._cells[self._cell(position, kind, unit) + 1] for position in range(len(self._others) + 1)
        ]

    def take(self, kind: Kind, unit: int, count: int) -> None:
        """Mark offer `count` as read by this rank."""
        self._cells[self._cell(self._me, kind, unit) + 2] = count

    def taken(self, kind: Kind, unit: int, count: int) -> bool:
        """Whether all others have read what this rank offered."""
        return all(self._cells[self._cell(position, kind, unit) + 2] >= count for position in self._others)

    def is_alive(self, position: int) -> bool:
        """Whether another rank still has its board; see [Note: locks show who is alive]."""
        query = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, position, 1, 0)
        held: int = _LOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_GETLK, query))[0]
        return held != fcntl.F_UNLCK

    def _cell(self, position: int, kind: Kind, unit: int) -> int:
        return ((position * len(Kind) + kind) * self._units + unit) * _FIELDS


def new_board(ranks: int, units: int) -> int:
    """The file of a board for so many ranks; raises `OSError`."""
    descriptor = os.memfd_create("zerokit-board", os.MFD_CLOEXEC)
    os.truncate(descriptor, _size(ranks, units))
    return descriptor


def _size(ranks: int, units: int) -> int:
    return max(ranks * len(Kind) * units * _FIELDS, 1) * 8
