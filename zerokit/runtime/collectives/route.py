"""The seam between the mesh and what moves elements: a `Route` joins the ranks of one axis.

A stretch of a unit has a cut there, piece r that of rank r. A route moves elements from piece to whole (a gather), from
whole to piece (a reduction), or from rank to rank (an exchange). A `Wire` is the form in which pieces of a sum travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.layout import Cut, Interval, Unit
from zerokit.runtime.collectives.stalls import StallReporter
from zerokit.runtime.shards import Shards


class Kind(IntEnum):
    """The kinds of collectives on units; at most one of a kind and unit is in flight at a time."""

    ALL_GATHER = 0
    REDUCE_SCATTER = 1
    TO_OWNERS = 2
    FROM_OWNERS = 3

    def of(self, unit: int) -> str:
        """The collective's name in messages."""
        return f"{self.name.lower().replace('_', '-')} of unit {unit}"


@dataclass(frozen=True, slots=True)
class Parcels:
    """What one rank sends in an exchange of pieces, and what it receives, in an order that both ends have.

    `sends`: for each piece the rank that gets it, and its elements in `memory`, which is contiguous. `receives`: the
    rank that it comes from, its first element in that rank's `memory`, and the contiguous tensor that it fills.
    """

    memory: Tensor
    sends: Sequence[tuple[int, Interval]]
    receives: Sequence[tuple[int, int, Tensor]]

    def outgoing(self) -> list[tuple[int, Tensor]]:
        """The rank that gets it and the tensor, of each piece that is sent."""
        return [(peer, self.memory[piece.start : piece.stop]) for peer, piece in self.sends]


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> None:
        """Wait until work issued after this call may use the result. Call it once."""


class Done:
    """The work of a collective that moves nothing."""

    def wait(self) -> None:
        pass


DONE = Done()
Hop = Callable[[Work | None], Any]
"""Starts a collective over one axis behind another one."""


class Wire:
    """The wire format of the terms of a sum: their own dtype, or a narrower one.

    `unpack` of all ranks' terms, in rank order, gives the sum in the dtype of what it is added to.
    """

    every_hop = True  # whether sums over the inner axis travel so too, on a mesh of two
    block = 1
    """Terms are packed in blocks of so many elements, the last of a piece may be shorter."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def pack(self, pieces: Tensor, share: float = 1.0, out: Tensor | None = None) -> Tensor:
        """Pack `pieces` [size, piece], times `share`, for the wire [size, packed piece], in `out` if it is given."""
        if share != 1.0:
            out = torch.empty_like(pieces, dtype=self.dtype) if out is None else out
            return torch.mul(pieces, share, out=out)
        return pieces.to(self.dtype) if out is None else out.copy_(pieces)

    def pack_cut(self, bucket: Shards, cut: Cut, share: float = 1.0) -> tuple[Tensor, list[int]]:
        """The packed pieces of a cut, one behind the other, and the number of elements of each."""
        sizes = [self.packed_numel(cut.piece(index).numel) for index in range(len(cut))]
        if cut.is_equal:
            return self.pack(bucket.rows(cut), share).flatten(), sizes
        packed = torch.empty(sum(sizes), dtype=self.dtype, device=bucket.device)
        for piece, into in zip(bucket.pieces(cut), packed.split(sizes), strict=True):
            self.pack(piece[None], share, into[None])
        return packed, sizes

    def packed_numel(self, numel: int) -> int:
        """The number of elements on the wire for `numel` elements of a piece."""
        return numel

    def unpack(self, packed: Tensor, out: Tensor, *, add: bool) -> None:
        """Write (or add) the received term `packed` to `out`."""
        out.add_(packed) if add else out.copy_(packed)

    def nbytes(self, unit: Unit) -> int:
        """The bytes on the wire for the payload of a whole unit."""
        return unit.payload_numel * self.dtype.itemsize


class Route:
    """The ranks of one axis of the mesh, and how elements travel between them. By default not at all."""

    name = "nowhere"  # how they travel, in records

    def __init__(self, group: dist.ProcessGroup, reporter: StallReporter) -> None:
        self.group, self.reporter = group, reporter
        self.rank, self.size = group.rank(), group.size()

    def gather(self, whole: Shards, cut: Cut, own: Tensor | None) -> Hop:
        """What fills `whole` with the pieces of `cut`, again and again; this rank's is `own`, or there already."""
        place = self.placing(whole, cut, own)

        def start(after: Work | None) -> Done:
            place()
            return DONE

        return start

    def reduction(self, bucket: Shards, cut: Cut, out: Tensor, wire: Wire) -> Hop:
        """What writes the ranks' sum of this rank's piece of `cut` in `bucket` to `out`, which may be that piece.

        Pieces travel on `wire`. The other pieces are lost.
        """
        own = bucket.at(cut.piece(self.rank))

        def start(after: Work | None) -> Done:
            out.copy_(own)
            return DONE

        return start

    def exchange(self, kind: Kind, unit: int, parcels: Parcels) -> Hop:
        """What moves pieces of a unit from rank to rank, once. What is sent stays as it is until `wait_for_readers`."""

        def start(after: Work | None) -> Done:
            for _, _, into in parcels.receives:
                into.zero_()
            return DONE

        return start

    def wait_for_readers(self, unit: int | None = None) -> None:
        """Wait until this rank's pieces of gathered units, or of one unit, may be changed or dropped."""

    def placing(self, whole: Shards, cut: Cut, own: Tensor | None) -> Callable[[], object]:
        """What copies `own` to this rank's piece of `whole`, if that is needed."""
        return DONE.wait if own is None else partial(whole.at(cut.piece(self.rank)).copy_, own)
