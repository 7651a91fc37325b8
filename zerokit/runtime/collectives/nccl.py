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
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.errors import UsageError
from zerokit.layout import Cut
from zerokit.patience import Patience
from zerokit.placement import Axis, Mesh
from zerokit.runtime.collectives.base import Collectives, Sums
from zerokit.runtime.collectives.groups import clone
from zerokit.runtime.collectives.observer import Flight
from zerokit.runtime.collectives.route import Hop, Kind, Parcels, Route, Wire, Work
from zerokit.runtime.collectives.stalls import StallReporter
from zerokit.runtime.shards import Shards, same_place

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5e-6, 1e-3
# torch 2.13 renamed both and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_REHEARSED_NUMEL = 4 << 20  # 16 MiB, the default size of a large model's buckets


@dataclass(frozen=True, slots=True)
class Operation:
    """Work on a side stream; its tensors must not change until it has been waited for."""

    name: str
    run: Callable[[], None]
    reads: Sequence[Tensor] = ()
    writes: Sequence[Tensor] = ()


class CudaEvent:
    """Work on a side stream: waiting makes the current stream wait, not the host.

    It keeps the operation's tensors: the allocator would hand out memory that is dropped while the stream uses it.
    """

    def __init__(self, event: torch.cuda.Event, device: torch.device, operation: Operation) -> None:
        self.event, self._device, self._operation = event, device, operation

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)


class CudaStream:
    """A queue on a device that runs collectives one after the other, at a higher priority than the computation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._launched: deque[tuple[str, torch.cuda.Event]] = deque()

    def launch(self, operation: Operation, after: Work | None = None) -> Work:
        """Run the work after everything issued by the computation so far, or only after `after`."""
        if isinstance(after, CudaEvent):
            self.stream.wait_event(after.event)
        else:
            self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            operation.run()
            event = self.stream.record_event()
        while self._launched and self._launched[0][1].query():
            self._launched.popleft()
        self._launched.append((operation.name, event))
        return CudaEvent(event, self._device, operation)

    def join(self) -> None:
        """Make the computation wait for everything that was launched."""
        torch.cuda.current_stream(self._device).wait_stream(self.stream)

    def fetch(self, values: Tensor) -> Callable[[], Tensor | None]:
        """Start copying `values`, the last operation's result, to the host; None until they have arrived."""
        arrived = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        with torch.cuda.stream(self.stream):
            arrived.copy_(values, non_blocking=True)
            event = self.stream.record_event()
        return lambda: arrived if event.query() else None

    def unfinished(self) -> str | None:
        """The name of the first operation that has not ended."""
        return next((name for name, event in self._launched if not event.query()), None)


@dataclass(frozen=True, slots=True)
class Launch:
    """A hop: an operation for a stream."""

    stream: CudaStream
    operation: Operation

    def __call__(self, after: Work | None) -> Work:
        return self.stream.launch(self.operation, after)

    def watched(self, flight: Flight) -> Launch:
        """The hop, which tells `flight` on the stream."""

        def run() -> None:
            flight.begin()
            self.operation.run()
            flight.end()

        return Launch(self.stream, replace(self.operation, run=run))


class NcclRoute(Route):
    """One axis: communicators and streams for gathers and reductions, which average where they know `ReduceOp.AVG`."""

    name = "nccl"

    def __init__(
        self,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        streams: tuple[CudaStream, CudaStream],
        reporter: StallReporter,
        *,
        averages: bool = True,
    ) -> None:
        super().__init__(groups[0], reporter)
        self._reduce_group = groups[1]
        self._gathers, self._reductions = streams
        self._averages = averages

    def wait_for_readers(self, unit: int | None = None) -> None:
        if unit is None:  # a unit has arrived when all has been sent, too
            self._gathers.join()
            self._reductions.join()

    def gather(self, whole: Shards, cut: Cut, own: Tensor | None) -> Hop:
        flat, pieces = whole.at(cut.whole), whole.pieces(cut)
        arrives = [flat]
        if own is None:
            own, arrives = pieces[self.rank], [*pieces[: self.rank], *pieces[self.rank + 1 :]]
        if cut.is_equal:
            run = partial(_all_gather, flat, own, group=self.group)
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
                _reduce_scatter(out, flat, op=op, group=self._reduce_group)
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


@dataclass(frozen=True, slots=True)
class Communicators:
    """The communicators for control values, and for gathers and reductions over each axis (outer: one for both)."""

    control: dist.ProcessGroup
    axes: tuple[tuple[dist.ProcessGroup, dist.ProcessGroup], ...]


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


_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Communicators]] = weakref.WeakKeyDictionary()
"""Those of each process group that lives, by mesh and time-out: later optimizers take them over."""


def communicators_of(
    group: dist.ProcessGroup,
    mesh: Mesh,
    device: torch.device,
    timeout: datetime.timedelta | None,
    reporter: StallReporter,
    *,
    backend: str = "nccl",
) -> Communicators:
    """Communicators over the ranks of `group`, ready for use; made once a group. Another backend serves tests."""
    made = _MADE.setdefault(group, {})
    if (mesh, timeout) in made:
        return made[mesh, timeout]
    # Before any of them: devices then keep the host's order of launches, also beside collectives of the program.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    make = partial(clone, group, backend, timeout, device if backend == "nccl" else None)
    with reporter.waiting("creation of communicators"):
        control = make()
        inner = mesh.members(Axis.INNER, group.rank()) if mesh.outer > 1 else None
        axes = [] if inner is None else [(make(mesh.members(Axis.OUTER, group.rank())),) * 2]
        axes.append((make(inner), make(inner)))
        if backend == "nccl":
            _rehearse(control, axes, device)
    made[mesh, timeout] = Communicators(control, tuple(axes))
    return made[mesh, timeout]


def _rehearse(
    control: dist.ProcessGroup,
    axes: Sequence[tuple[dist.ProcessGroup, dist.ProcessGroup]],
    device: torch.device,
) -> None:
    """Let NCCL make its connections now, which depend on kind and size: not in the middle of a step."""
    dist.all_reduce(torch.zeros(1, device=device), group=control)
    for gather, reduce in axes:
        size = gather.size()
        whole = torch.zeros(size * (_REHEARSED_NUMEL // size), device=device)
        own = whole.chunk(size)[gather.rank()]
        _all_gather(whole, own, group=gather)
        _reduce_scatter(own, whole, group=reduce)
        dist.all_to_all_single(torch.empty_like(whole), whole, group=reduce)
    torch.cuda.synchronize(device)


def require_current_device(device: torch.device) -> None:
    """Raise `UsageError` unless `device` is the process's current CUDA device."""
    if device.type != "cuda" or device.index != torch.cuda.current_device():
        raise UsageError(
            f"the model lies on {device}, but NCCL works on this process's current device: call "
            "torch.cuda.set_device(local_rank) at the start and model.to('cuda') before ZeroOptimizer, or initialise "
            "the process group with 'gloo'"
        )
