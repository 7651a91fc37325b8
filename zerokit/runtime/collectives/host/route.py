"""The base of routes on hosts, and the collectives over them."""

from __future__ import annotations

import atexit
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.layout import Cut
from zerokit.runtime.collectives.base import Collectives
from zerokit.runtime.collectives.host.progress import HostHop, HostWork, Progress
from zerokit.runtime.collectives.route import DONE, Hop, Kind, Route, Wire, Work
from zerokit.runtime.shards import Shards


class HostCollectives(Collectives):
    """Collectives on hosts: gloo carries control values, and CUDA tensors pass through host memory."""

    others_answer = True

    def __init__(self, *arguments: Any, progress: Progress) -> None:
        super().__init__(*arguments)
        self._progress = progress
        _pause_at_exit()

    def wait_at_most(self, seconds: float) -> None:
        self._progress.wait_at_most(seconds)

    def wait_for_readers(self) -> None:
        # A unit that this rank did not use is still to be read, so that the others may go on.
        for work in list(self._progress.pending):
            if work.kind is Kind.ALL_GATHER:
                work.finish()
        super().wait_for_readers()

    def _chain(self, kind: Kind, hops: Sequence[Hop], after: Work | None) -> Work:
        if after is not None:
            after.wait()
        if kind is Kind.REDUCE_SCATTER and self._progress.pending:
            with self.reporter.waiting("other ranks' pieces"):
                self._progress.attempt_all()
        return HostWork(self._progress, kind, hops) if hops else DONE


class HostRoute(Route, ABC):
    """The base of routes on hosts: tensors of a device are copied to the host and back."""

    def __init__(self, group: dist.ProcessGroup, progress: Progress) -> None:
        super().__init__(group, progress.reporter)
        self.progress = progress
        self.peers = [rank for rank in range(self.size) if rank != self.rank]

    def gather(self, whole: Shards, cut: Cut, own: Tensor | None) -> Hop:
        unit, place, pieces = whole.unit.index, self.placing(whole, cut, own), whole.pieces(cut)

        def start(after: Work | None) -> HostHop:
            place()
            return self._gather(pieces, unit, DONE.wait)

        def start_by_host(after: Work | None) -> HostHop:
            place()
            memory = torch.empty(cut.whole.numel, dtype=whole.dtype, pin_memory=True)
            arriving = memory.split([piece.numel() for piece in pieces])
            arriving[self.rank].copy_(pieces[self.rank])

            def take_others() -> None:
                for rank in self.peers:
                    pieces[rank].copy_(arriving[rank], non_blocking=True)

            return self._gather(arriving, unit, take_others)

        return start if whole.device.type == "cpu" else start_by_host

    def reduction(self, bucket: Shards, cut: Cut, out: Tensor, add: bool, wire: Wire) -> Hop:
        unit = bucket.unit.index
        if wire.dtype == bucket.dtype and bucket.device.type == "cpu":
            pieces = bucket.pieces(cut)
            return lambda after: self._reduce(pieces, out, unit, add, wire)
        rows = bucket.rows(cut)
        return lambda after: self._reduce(list(wire.pack(rows).cpu()), out, unit, add, wire)

    @abstractmethod
    def _gather(self, pieces: Sequence[Tensor], unit: int, finish: Callable[[], None]) -> HostHop:
        """Fill the ranks' `pieces` on the host, of which this rank's is there, and then `finish`."""

    @abstractmethod
    def _reduce(self, pieces: Sequence[Tensor], out: Tensor, unit: int, add: bool, wire: Wire) -> HostHop:
        """Sum what the ranks' packed `pieces`, one behind the other on the host, stand for into `out`."""


@functools.cache
def _pause_at_exit() -> None:
    """Let gloo's threads drop the tensors of the last collectives before Python shuts down.

    They take Python's lock for it. From its shutdown on Python ends the threads that ask, which aborts the process
    (seen with torch 2.13 in 2 of 10 runs on a busy machine, also under DDP).
    """
    atexit.register(time.sleep, 0.05)
