"""NCCL: its own all-gather and reduce-scatter, on a stream and a communicator each.

On a narrower wire a reduction is an all-to-all of rounded pieces and sums of our own, which go in rank order.

The host issues and never waits: it looks at a step's control values in the next step, when they have long arrived.

[Note: order on the device] Kernels of two communicators may wait for each other where a device cannot hold both. All
ranks issue all collectives in one order (see order's [Note: one order]), and `NCCL_LAUNCH_ORDER_IMPLICIT=1` (NCCL 2.26
and later) makes devices keep the order in which the host issues them, for programs that run other collectives beside.
"""

from __future__ import annotations

import datetime
import os
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.errors import UsageError
from zerokit.runtime.collectives.base import Collectives, Reading, Work, clone
from zerokit.runtime.collectives.streams import CudaStream, Operation, SideStream
from zerokit.runtime.watch import Watch

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 5e-6, 1e-3
# torch 2.13 renamed both and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_REHEARSED_NUMEL = 4 << 20
"""16 MiB, the default size of a large model's buckets."""


@dataclass(frozen=True, slots=True)
class Communicators:
    """One for control values, one for gathers, one for reductions."""

    control: dist.ProcessGroup
    gather: dist.ProcessGroup
    reduce: dist.ProcessGroup


class NcclCollectives(Collectives):
    """Gathers on one stream and reductions on another, ordered by events alone.

    Args:
        communicators: over the same ranks.
        make_stream: makes a side stream; another kind serves tests.
        averages: whether reductions divide by the number of ranks, for which communicators must know `ReduceOp.AVG`.
    """

    route = "nccl"
    runs_ahead = True

    def __init__(
        self,
        communicators: Communicators,
        device: torch.device,
        watch: Watch,
        timeout: datetime.timedelta,
        *,
        make_stream: Callable[[torch.device], SideStream] = CudaStream,
        averages: bool = True,
    ) -> None:
        super().__init__(communicators.control, device, watch, timeout)
        self._gather_group, self._reduce_group = communicators.gather, communicators.reduce
        self._gathers, self._reductions = make_stream(device), make_stream(device)
        self._control = make_stream(device)
        self.averages = averages
        self._sum = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM

    def wait_for_readers(self) -> None:
        self._gathers.join()
        self._reductions.join()

    def agree_soon(self, values: Sequence[float], flag: Tensor | None = None) -> Reading:
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
        streams = (self._gathers, self._reductions, self._control)

        # Looked up in this thread: another one would begin a context on the first device by asking an event.
        name = "computation of a step"
        start, pause = time.monotonic(), _FIRST_PAUSE_S
        with self.watch.waiting(lambda: name):
            while (values := arrived()) is None:
                late = time.monotonic() - start > self._timeout_s
                if late or pause >= _LONGEST_PAUSE_S:
                    names = (stream.unfinished() for stream in streams)
                    name = next(filter(None, names), "computation of a step")
                if late:
                    raise RuntimeError(f"timed out after {self._timeout_s:g} s")
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        return values

    def _on_host(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, pin_memory=self.device.type == "cuda")

    def _gather_piece(self, whole: Tensor, unit: int, own: Tensor | None, after: Work | None) -> Work:
        size = whole.numel() // self.world
        if own is None or self._in_place(own, whole):
            start = self.rank * size
            own = whole[start : start + size]
            arrives = [whole[:start], whole[start + size :]]
        else:
            arrives = [whole]
        run = partial(_all_gather, whole, own, group=self._gather_group)
        return self._gathers.launch(Operation(f"all-gather of unit {unit}", run, [own], arrives), after)

    def _reduce_scatter(self, bucket: Tensor, out: Tensor, unit: int, add: bool, wire: torch.dtype) -> Work:
        def reduce() -> None:
            # Allocated and freed on this stream: the allocator cannot hand it to another one too early.
            result = torch.empty_like(out) if add else out
            if wire == bucket.dtype:
                _reduce_scatter(result, bucket, op=self._sum, group=self._reduce_group)
            else:
                # Each rank's share of the mean is what is rounded: then it is the same by every route. One kernel.
                share = 1.0 / self.world if self.averages else 1.0
                rounded = torch.mul(bucket, share, out=torch.empty_like(bucket, dtype=wire))
                first, *others = self._exchange(rounded)
                result.copy_(first)
                for piece in others:
                    result.add_(piece)
            if add:
                out.add_(result)

        name = f"reduce-scatter of unit {unit}"
        return self._reductions.launch(Operation(name, reduce, [bucket], [out, bucket]))

    def expect_exchanges(self) -> None:
        if self.world > 1:
            self._exchange(_rehearsal(self.world, self.device))

    def _exchange(self, sent: Tensor) -> Sequence[Tensor]:
        """Every rank's piece for this one, in rank order, from what each of them has for all [world × shard]."""
        arrived = torch.empty_like(sent)
        dist.all_to_all_single(arrived, sent, group=self._reduce_group)
        return arrived.view(self.world, -1).unbind()


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

_MADE: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[datetime.timedelta | None, Communicators]] = (
    weakref.WeakKeyDictionary()
)
"""Those of each process group that lives, by their time-out: later optimizers take them over."""


def communicators_of(
    group: dist.ProcessGroup, device: torch.device, timeout: datetime.timedelta | None, watch: Watch
) -> Communicators:
    """Communicators over the ranks of `group`, ready for use; made once a group, gone with it.

    Raises `UsageError` where `device` cannot serve this rank.
    """
    require_own_device(group, device)
    made = _MADE.setdefault(group, {})
    if timeout in made and all(map(_lives, _members(made[timeout]))):
        return made[timeout]
    # Before any of them: devices then keep the host's order of launches, also beside collectives of the program.
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    with watch.waiting("creation of communicators"):
        communicators = Communicators(*(clone(group, "nccl", timeout, device) for _ in range(3)))
        # The first of its kind and size still makes connections: not in the middle of a step.
        whole = _rehearsal(group.size(), device)
        own = whole.view(group.size(), -1)[group.rank()]
        dist.all_reduce(torch.zeros(1, device=device), group=communicators.control)
        _all_gather(whole, own, group=communicators.gather)
        _reduce_scatter(own, whole, group=communicators.reduce)
        torch.cuda.synchronize(device)
    made[timeout] = communicators
    weakref.finalize(group, _destroy, _members(communicators)).atexit = False
    return communicators


def require_own_device(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise `UsageError` unless `device` is this process's current CUDA device, and no other rank's."""
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
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" or group in _MADE:
        return
    store = dist.distributed_c10d._get_process_group_store(group)
    uuid = torch.cuda.get_device_properties(device).uuid
    _claim(store, f"zerokit/device/{group.group_name}/{socket.gethostname()}/{uuid}", group.rank(), device)


def _claim(store: Any, key: str, rank: int, device: torch.device) -> None:
    """Raise `UsageError` where another rank has claimed what `key` stands for."""
    if store.add(key, 1) == 1:
        store.set(f"{key}/rank", str(rank))
        return
    other = store.get(f"{key}/rank").decode()
    if other != str(rank):
        raise UsageError(
            f"ranks {other} and {rank} share one GPU ({device} of {socket.gethostname()}), which NCCL refuses: call "
            "torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the model is built, start as many ranks as "
            "there are GPUs, or initialise the process group with 'gloo'"
        )


def _rehearsal(world: int, device: torch.device) -> Tensor:
    """Zeros [world × piece] of about the size that a unit has: NCCL chooses its algorithm by size."""
    return torch.zeros(world * (_REHEARSED_NUMEL // world), device=device)


def _members(communicators: Communicators) -> tuple[dist.ProcessGroup, ...]:
    return communicators.control, communicators.gather, communicators.reduce


def _lives(group: dist.ProcessGroup) -> bool:
    return group in dist.distributed_c10d._world.pg_map


def _destroy(groups: Sequence[dist.ProcessGroup]) -> None:
    for group in groups:
        if _lives(group):
            dist.destroy_process_group(group)
