"""gloo: point-to-point messages, in place.

gloo's all-gather copies through scratch memory and its reduce-scatter is an all-reduce plus a slice; sending each piece
straight to its owner takes a half to a third of their time, and sums can go in rank order, so that results do not
depend on how the line is bucketed. The tag of a message names the unit and its turn: ranks that disagree time out,
they cannot swap contents.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.runtime.collectives.base import Collectives, Work
from zerokit.runtime.watch import Watch

_TURNS = 1 << 15
_UNITS = 1 << 14


class GlooCollectives(Collectives):
    """Point-to-point messages in place; CUDA tensors travel through host memory."""

    route = "sockets"

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, watch: Watch, timeout: datetime.timedelta
    ) -> None:
        super().__init__(group, device, watch, timeout)
        # Ranks may interleave gathers and reductions differently; each kind keeps its own order.
        self._turns = [0, 0]
        self._peers = [rank for rank in range(self.world) if rank != self.rank]

    def _tag(self, kind: int, unit: int) -> int:
        self._turns[kind] = (self._turns[kind] + 1) % _TURNS
        return (self._turns[kind] * _UNITS + unit % _UNITS) * 2 + kind

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        host = values.cpu()
        super().all_reduce(host, op)
        if host is not values:
            values.copy_(host)

    def broadcast(self, values: Tensor) -> None:
        host = values.cpu()
        super().broadcast(host)
        if host is not values:
            values.copy_(host)

    def own_on_host(self, whole: Tensor) -> Tensor:
        """`whole` itself, or a host tensor of its form that holds this rank's piece."""
        if whole.device.type == "cpu":
            return whole
        host = torch.empty(whole.shape, dtype=whole.dtype, pin_memory=True)
        host.view(self.world, -1)[self.rank].copy_(whole.view(self.world, -1)[self.rank])
        return host

    def take_others(self, host: Tensor, whole: Tensor) -> None:
        """Copy the other ranks' pieces from `host` to `whole`, where they do not lie in it."""
        if host is not whole:
            size = whole.numel() // self.world
            for others in (slice(0, self.rank * size), slice((self.rank + 1) * size, None)):
                whole[others].copy_(host[others], non_blocking=True)

    def _all_gather(self, whole: Tensor, unit: int) -> Work:
        host = self.own_on_host(whole)
        pieces = host.view(self.world, -1)
        tag = self._tag(0, unit)
        name = f"all-gather of unit {unit}"
        with self.watch.waiting(name):
            receives = [self.group.recv([pieces[peer]], peer, tag) for peer in self._peers]
            sends = [self.group.send([pieces[self.rank]], peer, tag) for peer in self._peers]

        finish = partial(self.take_others, host, whole)
        return _Messages(self.watch, name, [*receives, *sends], finish, host)

    def _reduce_scatter(self, bucket: Tensor, out: Tensor, unit: int, add: bool, wire: torch.dtype) -> Work:
        host = bucket.to("cpu", wire)
        pieces = host.view(self.world, -1)
        own = pieces[self.rank]
        tag = self._tag(1, unit)
        # The first two pieces may be added in either order, so one of them, the first peer's, arrives directly
        # in the memory of the sum: with two ranks nothing else is allocated.
        in_place = not add and host is bucket and out.data_ptr() != own.data_ptr()
        arrived = {peer: torch.empty_like(own) for peer in self._peers}
        if in_place and self._peers:
            arrived[self._peers[0]] = out
        name = f"reduce-scatter of unit {unit}"
        with self.watch.waiting(name):
            receives = [self.group.recv([arrived[peer]], peer, tag) for peer in self._peers]
            sends = [self.group.send([pieces[peer]], peer, tag) for peer in self._peers]

        def finish() -> None:
            arrived[self.rank] = own
            total = arrived[0].to(out.dtype)
            if wire != out.dtype:
                for rank in range(1, self.world):
                    total.add_(arrived[rank])
            elif self.world > 1:
                # Never into a piece that is still to be added.
                if in_place or (self.rank < 2 and out.data_ptr() == own.data_ptr()):
                    total = out
                torch.add(arrived[0], arrived[1], out=total)
                for rank in range(2, self.world):
                    total.add_(arrived[rank])
            if add:
                out.add_(total)
            elif total.data_ptr() != out.data_ptr():
                out.copy_(total)

        return _Messages(self.watch, name, [*receives, *sends], finish, host)


class _Messages:
    """Point-to-point messages of one collective, and what is to be done when all have arrived."""

    def __init__(
        self, watch: Watch, name: str, works: Sequence[dist.Work], finish: object, keep: Tensor
    ) -> None:
        self._watch, self._name, self._works, self._finish, self._keep = watch, name, works, finish, keep

    def wait(self) -> None:
        with self._watch.waiting(self._name):
            for work in self._works:
                work.wait()
        assert callable(self._finish)
        self._finish()
