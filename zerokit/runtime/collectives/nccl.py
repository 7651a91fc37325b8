"""NCCL's all-gather and reduce-scatter, on separate streams.

On a narrower wire a reduction is an all-to-all of rounded pieces and sums of our own, in rank order. The host issues
and never waits: it looks at a step's control values in the next step. Streams are ordered by events alone.

[Note: order on the device] Kernels of two communicators may wait for each other where a device cannot hold both. All
ranks issue all collectives in one order (see schedule's [Note: one order]), and `NCCL_LAUNCH_ORDER_IMPLICIT=1` (NCCL
2.26 and later) makes devices keep it. There are four communicators at most, each with one stream: control values,
gathers and reductions over the inner axis, and one for both over the outer axis. A second hop waits for an event of
a first hop that was issued before it, never the other way round. So the collective that was issued first on all ranks
can always run.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.errors import UsageError
from zerokit.layout import Cut
from zerokit.patience import Patience
from zerokit.placement import Mesh
from zerokit.runtime.collectives.base import Collectives, Sums
from zerokit.runtime.collectives.communicators import Communicators, all_gather, reduce_scatter
from zerokit.runtime.collectives.observer import Flight
from zerokit.runtime.collectives.route import Hop, Kind, Parcels, Route, Wire, Work
from zerokit.runtime.collectives.stalls import StallReporter
from zerokit.runtime.collectives.streams import CudaStream, Launch, Operation
from zerokit.runtime.shards import Shards, same_place

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5e-6, 1e-3


class StreamRoute(Route):
    """One axis of a device, with streams for gathers and reductions."""

    name = "nccl"

    def __init__(
        self, group: dist.ProcessGroup, streams: tuple[CudaStream, CudaStream], reporter: StallReporter
    ) -> None:
        super().__init__(group, reporter)
        self._gathers, self._reductions = streams

    def wait_for_readers(self, unit: int | None = None) -> None:
        if unit is None:  # a unit has arrived when all has been sent, too
            self._gathers.join()
            self._reductions.join()


class NcclRoute(StreamRoute):
    """Communicators for gathers and reductions, which average where they know `ReduceOp.AVG`."""

    def __init__(
        self,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        streams: tuple[CudaStream, CudaStream],
        reporter: StallReporter,
        *,
        averages: bool = True,
    ) -> None:
        super().__init__(groups[0], streams, reporter)
        self._reduce_group = groups[1]
        # The mean of one is itself. NCCL before 2.29.7 leaves out the end of a small AVG over one rank (nccl#1950).
        self._averages = averages and self.size > 1

    def gather(self, whole: Shards, cut: Cut, own: Tensor | None) -> Hop:
        flat, pieces = whole.at(cut.whole), whole.pieces(cut)
        arrives = [flat]
        if own is None:
            own, arrives = pieces[self.rank], [*pieces[: self.rank], *pieces[self.rank + 1 :]]
        if cut.is_equal:
            run = partial(all_gather, flat, own, group=self.group)
        else:
            run = partial(self._gather_unequal, pieces, own)
        name = Kind.ALL_GATHER.of(whole.unit.index)
        return Launch(self._gathers, Operation(name, run, [own], arrives))

    def _gather_unequal(self, pieces: Sequence[Tensor], own: Tensor) -> None:
        """Sends and receives in one group, as NCCL's documentation has them for pieces of different sizes."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        send, receive = partial(dist.P2POp, dist.isend), partial(dist.P2POp, dist.irecv)
        messages = [receive(pieces[p], group=self.group, group_peer=p) for p in peers if pieces[p].numel()]
        messages += [send(own, group=self.group, group_peer=peer) for peer in peers if own.numel()]
        if not same_place(own, pieces[self.rank]):
            pieces[self.rank].copy_(own)
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()

    def reduction(self, bucket: Shards, cut: Cut, out: Tensor, wire: Wire) -> Hop:
        flat = bucket.at(cut.whole)

        def reduce() -> None:
            if wire.dtype == flat.dtype and cut.is_equal:
                op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
                reduce_scatter(out, flat, op=op, group=self._reduce_group)
            else:
                # Each rank's share of the mean is what is rounded: then it is the same by every route. Allocated and
                # freed on this stream: the allocator cannot hand it to another one too early.
                packed, sizes = wire.pack_cut(bucket, cut, 1.0 / self.size if self._averages else 1.0)
                own = sizes[self.rank]
                arrived = packed.new_empty(self.size * own)
                dist.all_to_all_single(arrived, packed, [own] * self.size, sizes, group=self._reduce_group)
                for rank, term in enumerate(arrived.split(own) if own else ()):
                    wire.unpack(term, out, add=rank > 0)

        name = Kind.REDUCE_SCATTER.of(bucket.unit.index)
        return Launch(self._reductions, Operation(name, reduce, [flat], [out, flat]))

    def exchange(self, kind: Kind, unit: int, parcels: Parcels) -> Hop:
        # Peer by peer in one buffer each way: a device copies faster than NCCL starts messages.
        peers = range(self.size)
        leaving = sorted(parcels.outgoing(), key=lambda piece: piece[0])
        arriving = sorted(((peer, into) for peer, _, into in parcels.receives), key=lambda piece: piece[0])

        def move() -> None:
            memory = parcels.memory
            packed = torch.cat([piece for _, piece in leaving]) if leaving else memory.new_empty(0)
            arrived = memory.new_empty(sum(piece.numel() for _, piece in arriving))
            dist.all_to_all_single(
                arrived,
                packed,
                output_split_sizes=[sum(p.numel() for to, p in arriving if to == peer) for peer in peers],
                input_split_sizes=[sum(p.numel() for to, p in leaving if to == peer) for peer in peers],
                group=self._reduce_group,
            )
            into = [piece for _, piece in arriving]
            if into:
                torch._foreach_copy_(into, arrived.split([piece.numel() for piece in into]))

        reads, writes = [piece for _, piece in leaving], [piece for _, piece in arriving]
        return Launch(self._reductions, Operation(kind.of(unit), move, reads, writes))


class _Watched:
    """Work whose wait others measure."""

    __slots__ = ("_around", "_work")

    def __init__(self, work: Work, around: Callable[[Callable[[], None]], None]) -> None:
        self._work, self._around = work, around

    def wait(self) -> None:
        self._around(self._work.wait)


class NcclCollectives(Collectives):
    """Collectives on a device: the host never waits. The last of the `streams` carries control values."""

    runs_ahead = others_answer = True

    def __init__(self, *arguments: Any, streams: Sequence[CudaStream], averages: bool = True) -> None:
        super().__init__(*arguments)
        self._streams, self._control = streams, streams[-1]
        self.averages = averages

    def _chain(self, kind: Kind, hops: Sequence[Hop]) -> Work:
        return self._watched(super()._chain(kind, hops))

    def _watch_hop(self, hop: Hop, flight: Flight) -> Hop:
        assert isinstance(hop, Launch)
        return hop.watched(flight)

    def wait_for_readers(self) -> None:
        self._around(super().wait_for_readers)

    def _watched(self, work: Work) -> Work:
        return _Watched(work, self._around) if self.around_waits else work

    def _around(self, wait: Callable[[], None]) -> None:
        """Make the computation wait, inside of what is to be around it."""
        for around in self.around_waits:
            wait = partial(around, wait)
        wait()

    def sum_soon(self, values: Sequence[float | Tensor]) -> Sums:
        control = torch.empty(len(values), dtype=torch.float64, device=self.device)
        tensors = {at: value for at, value in enumerate(values) if isinstance(value, Tensor)}

        def reduce() -> None:
            numbers = [0.0 if isinstance(value, Tensor) else value for value in values]
            control.copy_(self._on_host(numbers), non_blocking=True)
            for at, value in tensors.items():
                control[at].copy_(value)
            self.all_reduce(control, dist.ReduceOp.SUM)
            if not self._asks:
                control.mul_(self.world)

        reads = list(tensors.values())
        work = self._control.launch(Operation("control values of a step", reduce, reads, [control]))
        return Sums(control, self._watched(work), partial(self._get, self._control.fetch(control), reads))

    def _get(self, fetch: Callable[[], Tensor | None], keep: Sequence[Tensor]) -> list[float]:
        """The numbers that `fetch` gives once they have arrived; the device reads what we `keep`."""
        numbers: list[float] = self.until(fetch).tolist()
        return numbers

    def until(self, arrived: Callable[[], Tensor | None]) -> Tensor:
        """Wait for the device. Raises `ScheduleError` after the time-out, naming the unfinished operation."""
        name, timeout_s = "computation of a step", self._timeout.total_seconds()
        patience, pause = Patience(timeout_s), _FIRST_PAUSE_S
        with self.reporter.waiting(lambda: name):
            while (values := arrived()) is None:
                if patience.over:
                    name = next(filter(None, (stream.unfinished() for stream in self._streams)), name)
                    raise RuntimeError(f"timed out after {timeout_s:g} s")
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        return values

    def _on_host(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, pin_memory=self.device.type == "cuda")


def make_nccl(
    communicators: Communicators,
    mesh: Mesh,
    device: torch.device,
    reporter: StallReporter,
    timeout: datetime.timedelta,
    *,
    make_stream: Callable[[torch.device], CudaStream] = CudaStream,
    averages: bool = True,
) -> NcclCollectives:
    """Collectives over these communicators, each with its own stream; tests use another kind of stream."""
    control, axes = communicators.control, communicators.axes
    streams = {group: make_stream(device) for group in (*(group for pair in axes for group in pair), control)}
    routes = [
        NcclRoute((gather, reduce), (streams[gather], streams[reduce]), reporter, averages=averages)
        for gather, reduce in axes
    ]
    between_all = None
    if mesh.outer > 1:
        between_all = NcclRoute((control, control), (streams[control],) * 2, reporter)
    return NcclCollectives(
        control,
        mesh,
        routes,
        device,
        reporter,
        timeout,
        between_all,
        streams=list(streams.values()),
        averages=averages,
    )


def require_current_device(device: torch.device) -> None:
    """Raise `UsageError` unless `device` is the process's current CUDA device."""
    if device.type != "cuda" or device.index != torch.cuda.current_device():
        raise UsageError(
            f"the model lies on {device}, but NCCL works on this process's current device: call "
            "torch.cuda.set_device(local_rank) at the start and model.to('cuda') before ZeroOptimizer, or initialise "
            "the process group with 'gloo'"
        )
