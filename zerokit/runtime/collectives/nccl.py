"""NCCL: its own all-gather and reduce-scatter, on streams beside the computation's.

On a narrower wire a reduction is an all-to-all of rounded pieces and sums of our own, which go in rank order.

The host issues and never waits: it looks at a step's control values in the next step, when they have long arrived.
Streams are ordered by events alone.

[Note: order on the device] Kernels of two communicators may wait for each other where a device cannot hold both. All
ranks issue all collectives in one order (see schedule's [Note: one order]), and `NCCL_LAUNCH_ORDER_IMPLICIT=1` (NCCL
2.26 and later) makes devices keep the order in which the host issues them, for programs that run other collectives
beside. There are four communicators at most: control values, gathers and reductions over the inner axis, and one for
both over the outer axis. A communicator has one stream, so its collectives run in the order in which all ranks issue
them; a second hop waits for an event of a first hop that was issued before it, never the other way round. So the
collective that was issued first on all ranks can always run, and no order of theirs can deadlock.
"""

from __future__ import annotations

import datetime
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.errors import UsageError
from zerokit.placement import Axis, Mesh
from zerokit.runtime.collectives.base import Collectives, PendingNumbers, Route, Work, clone
from zerokit.runtime.collectives.stalls import StallReporter

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5e-6, 1e-3
# torch 2.13 renamed both and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_REHEARSED_NUMEL = 4 << 20
"""16 MiB, the default size of a large model's buckets."""


# ---- streams


@dataclass(frozen=True, slots=True)
class Operation:
    """What a side stream runs; the tensors that it uses stay as they are until it has been waited for."""

    name: str
    run: Callable[[], None]
    reads: Sequence[Tensor] = ()
    writes: Sequence[Tensor] = ()


class SideStream(Protocol):
    """Where a device runs collectives beside the computation, one after the other."""

    def launch(self, operation: Operation, after: Work | None = None) -> Work:
        """Run it behind what the computation has issued so far, or only behind `after`."""

    def join(self) -> None:
        """Let the computation wait for everything that was launched."""

    def fetch(self, values: Tensor) -> Callable[[], Tensor | None]:
        """Start to copy `values`, made by the last operation, to the host; None until they have arrived."""

    def unfinished(self) -> str | None:
        """The name of the first operation that has not ended."""


class CudaEvent:
    """Work on a side stream: waiting makes the current stream wait, not the host."""

    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self.event, self._device = event, device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self.event)


class CudaStream:
    """A stream of high priority: what it runs is on the way to other ranks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._launched: deque[tuple[str, torch.cuda.Event]] = deque()

    def launch(self, operation: Operation, after: Work | None = None) -> Work:
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
        return CudaEvent(event, self._device)

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self.stream)

    def fetch(self, values: Tensor) -> Callable[[], Tensor | None]:
        arrived = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        with torch.cuda.stream(self.stream):
            arrived.copy_(values, non_blocking=True)
            event = self.stream.record_event()
        return lambda: arrived if event.query() else None

    def unfinished(self) -> str | None:
        return next((name for name, event in self._launched if not event.query()), None)


# ---- collectives


class NcclRoute(Route):
    """One axis: a communicator and a stream for gathers, and for reductions the same or others.

    Args:
        groups: over the ranks of the axis, for gathers and for reductions.
        streams: theirs.
        averages: whether reductions divide by the number of ranks, for which communicators must know `ReduceOp.AVG`.
    """

    name = "nccl"

    def __init__(
        self,
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup],
        streams: tuple[SideStream, SideStream],
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

    def all_gather(self, whole: Tensor, unit: int, own: Tensor | None, after: Work | None) -> Work:
        size = whole.numel() // self.size
        if own is None or self.in_place(own, whole):
            start = self.rank * size
            own = whole[start : start + size]
            arrives = [whole[:start], whole[start + size :]]
        else:
            arrives = [whole]
        run = partial(_all_gather, whole, own, group=self.group)
        return self._gathers.launch(Operation(f"all-gather of unit {unit}", run, [own], arrives), after)

    def reduce_scatter(
        self, bucket: Tensor, out: Tensor, unit: int, *, add: bool, wire: torch.dtype, after: Work | None
    ) -> Work:
        def reduce() -> None:
            # Allocated and freed on this stream: the allocator cannot hand it to another one too early.
            result = torch.empty_like(out) if add else out
            if wire == bucket.dtype:
                op = dist.ReduceOp.AVG if self._averages else dist.ReduceOp.SUM
                _reduce_scatter(result, bucket, op=op, group=self._reduce_group)
            else:
                # Each rank's share of the mean is what is rounded: then it is the same by every route. One kernel.
                share = 1.0 / self.size if self._averages else 1.0
                rounded = torch.mul(bucket, share, out=torch.empty_like(bucket, dtype=wire))
                first, *others = self._exchange(rounded)
                result.copy_(first)
                for piece in others:
                    result.add_(piece)
            if add:
                out.add_(result)

        operation = Operation(f"reduce-scatter of unit {unit}", reduce, [bucket], [out, bucket])
        return self._reductions.launch(operation, after)

    def rehearse_exchange(self, device: torch.device) -> None:
        if self.size > 1:
            self._exchange(_rehearsal(self.size, device))

    def _exchange(self, sent: Tensor) -> Sequence[Tensor]:
        """Every rank's piece for this one, in rank order, from what each of them has for all [size × piece]."""
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=self._reduce_group)
        return arrived.view(self.size, -1).unbind()


class NcclCollectives(Collectives):
    """A device: the host issues and never waits.

    Args:
        streams: the routes', to name what a device has not got through, and the one of control values, which is last.
        averages: whether reductions divide by the number of ranks.
    """

    runs_ahead = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        mesh: Mesh,
        routes: Sequence[Route],
        device: torch.device,
        reporter: StallReporter,
        timeout: datetime.timedelta,
        streams: Sequence[SideStream],
        *,
        averages: bool = True,
    ) -> None:
        super().__init__(group, mesh, routes, device, reporter, timeout)
        self._streams, self._control = streams, streams[-1]
        self.averages = averages

    def agree_soon(self, values: Sequence[float], flag: Tensor | None = None) -> PendingNumbers:
        control = torch.empty(len(values) + 1, dtype=torch.float64, device=self.device)

        def reduce() -> None:
            control.copy_(self._on_host([*values, 0.0]), non_blocking=True)
            if flag is not None:
                control[-1:].copy_(flag)
            self.all_reduce(control, dist.ReduceOp.MAX)

        reads = [] if flag is None else [flag]
        self._control.launch(Operation("control values of a step", reduce, reads, [control]))
        return _Arriving(self, self._control.fetch(control), [control, *reads])

    def read(self, values: Tensor) -> list[float]:
        flattened = values.flatten()
        self._control.launch(Operation("numbers that the host reads", lambda: None, [flattened]))
        return _Arriving(self, self._control.fetch(flattened), [flattened]).get()

    def until(self, arrived: Callable[[], Tensor | None]) -> Tensor:
        """Wait for the device. Raises `ScheduleError` after the time-out, naming what it has not got through."""
        # Looked up in this thread: another one would begin a context on the first device by asking an event.
        name = "computation of a step"
        start, pause = time.monotonic(), _FIRST_PAUSE_S
        with self.reporter.waiting(lambda: name):
            while (values := arrived()) is None:
                late = time.monotonic() - start > self._timeout_s
                if late or pause >= _LONGEST_PAUSE_S:
                    names = (stream.unfinished() for stream in self._streams)
                    name = next(filter(None, names), "computation of a step")
                if late:
                    raise RuntimeError(f"timed out after {self._timeout_s:g} s")
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        return values

    def _on_host(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, pin_memory=self.device.type == "cuda")


class _Arriving:
    """Control values that a side stream copies to the host."""

    def __init__(
        self, collectives: NcclCollectives, arrived: Callable[[], Tensor | None], keep: Sequence[Tensor]
    ) -> None:
        self._collectives, self._fetched = collectives, arrived
        self._keep = keep  # the device still reads them

    def arrived(self) -> bool:
        return self._fetched() is not None

    def get(self) -> list[float]:
        numbers: list[float] = self._collectives.until(self._fetched).tolist()
        return numbers


# ---- communicators


@dataclass(frozen=True, slots=True)
class Communicators:
    """One for control values; for gathers and for reductions over each axis, the inner one last.

    Over the outer axis both share one.
    """

    control: dist.ProcessGroup
    axes: tuple[tuple[dist.ProcessGroup, dist.ProcessGroup], ...]

    def members(self) -> set[dist.ProcessGroup]:
        return {self.control, *(group for pair in self.axes for group in pair)}


def make_communicators(
    mesh: Mesh, rank: int, make: Callable[[Sequence[int] | None], dist.ProcessGroup]
) -> Communicators:
    """Made by `make` over given members, or all."""
    control = make(None)
    if mesh.outer == 1:
        return Communicators(control, ((make(None), make(None)),))
    outer = make(mesh.members(Axis.OUTER, rank))
    inner = mesh.members(Axis.INNER, rank)
    return Communicators(control, ((outer, outer), (make(inner), make(inner))))


def make_nccl(
    communicators: Communicators,
    mesh: Mesh,
    device: torch.device,
    reporter: StallReporter,
    timeout: datetime.timedelta,
    *,
    make_stream: Callable[[torch.device], SideStream] = CudaStream,
    averages: bool = True,
) -> NcclCollectives:
    """Collectives over these communicators, each with a stream of its own. Another kind of stream serves tests."""
    made = {group: make_stream(device) for group in sorted(communicators.members(), key=id)}
    routes = [
        NcclRoute((gather, reduce), (made[gather], made[reduce]), reporter, averages=averages)
        for gather, reduce in communicators.axes
    ]
    streams = [*(stream for group, stream in made.items() if group is not communicators.control)]
    streams.append(made[communicators.control])
    return NcclCollectives(
        communicators.control, mesh, routes, device, reporter, timeout, streams, averages=averages
    )


_MADE: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[Mesh, datetime.timedelta | None], Communicators]
] = weakref.WeakKeyDictionary()
"""Those of each process group that lives, by mesh and time-out: later optimizers take them over."""


def communicators_of(
    group: dist.ProcessGroup,
    mesh: Mesh,
    device: torch.device,
    timeout: datetime.timedelta | None,
    reporter: StallReporter,
) -> Communicators:
    """Communicators over the ranks of `group`, ready for use; made once a group, gone with it."""
    made = _MADE.setdefault(group, {})
    if (found := made.get((mesh, timeout))) is not None and all(map(_lives, found.members())):
        return found
    # Before any of them: devices then keep the host's order of launches, also beside collectives of the program.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    with reporter.waiting("creation of communicators"):
        communicators = make_communicators(
            mesh, group.rank(), lambda members: clone(group, "nccl", timeout, device, members)
        )
        # The first of its kind and size still makes connections: not in the middle of a step.
        dist.all_reduce(torch.zeros(1, device=device), group=communicators.control)
        for gather, reduce in communicators.axes:
            whole = _rehearsal(gather.size(), device)
            own = whole.view(gather.size(), -1)[gather.rank()]
            _all_gather(whole, own, group=gather)
            _reduce_scatter(own, whole, group=reduce)
        torch.cuda.synchronize(device)
    made[mesh, timeout] = communicators
    weakref.finalize(group, _destroy, communicators.members()).atexit = False
    return communicators


def require_current_device(device: torch.device) -> None:
    """Raise `UsageError` unless `device` is this process's current CUDA device."""
    if device.type != "cuda":
        raise UsageError(
            f"the model lies on {device.type}, but the process group is NCCL's: call model.to('cuda') before "
            "ZeroOptimizer, or initialise the process group with 'gloo'"
        )
    current = torch.cuda.current_device()
    if device.index != current:
        raise UsageError(
            f"the model lies on {device}, but this process's current device is cuda:{current}, on which NCCL would "
            f"work: call torch.cuda.set_device({device.index}) at the start"
        )


def _rehearsal(size: int, device: torch.device) -> Tensor:
    """Zeros [size × piece] of about the size that a unit has: NCCL chooses its algorithm by size."""
    return torch.zeros(size * (_REHEARSED_NUMEL // size), device=device)


def _lives(group: dist.ProcessGroup) -> bool:
    return group in dist.distributed_c10d._world.pg_map


def _destroy(groups: set[dist.ProcessGroup]) -> None:
    for group in groups:
        if _lives(group):
            dist.destroy_process_group(group)
