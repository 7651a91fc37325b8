"""The device's way on a host: `NcclCollectives` over gloo, with side streams that bring results late on purpose.

Where one GPU serves one rank, NCCL's collectives are copies that end at once, so a missing wait stays unseen. Here what
a collective writes is nan until it has been waited for, and what it reads must not change until then.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from zerokit.errors import ScheduleError
from zerokit.layout import Interval, Unit
from zerokit.placement import Mesh
from zerokit.runtime import build, unit
from zerokit.runtime.collectives import Collectives, Work
from zerokit.runtime.collectives.communicators import communicators_of
from zerokit.runtime.collectives.nccl import NcclRoute, make_nccl
from zerokit.runtime.collectives.predicted import predict_nccl
from zerokit.runtime.collectives.stalls import StallReporter
from zerokit.runtime.collectives.streams import CudaEvent, CudaStream, Operation
from zerokit.runtime.memory import ResizedMemory, UnitMemory, unit_memory
from zerokit.runtime.shards import Shards
from zerokit.runtime.torch_internals import outside_transforms, transforming


def poison(tensor: Tensor) -> None:
    """Fill with what nobody takes for a result."""
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min if tensor.dtype != torch.bool else True)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


class PromptStream(CudaStream):
    """Results are there at once: the run that the others are compared with."""

    def __init__(self, device: torch.device) -> None:
        pass

    def __del__(self) -> None:
        """Nothing: no allocator hands out again here what work that was dropped has written to."""

    def launch(self, operation: Operation, after: Work | None = None) -> Work:
        operation.run()
        return _Nothing()

    def join(self) -> None:
        pass

    def fetch(self, values: Tensor) -> Callable[[], Tensor | None]:
        arrived = values.clone()
        return lambda: arrived

    def unfinished(self) -> str | None:
        return None


class _Nothing:
    def wait(self) -> None:
        pass


class LaggingStream(PromptStream):
    """Results arrive when they are waited for, and not before.

    Who touches what a collective is at work on is told so at the end of `device_way`. At once would not do: whether
    freed memory is touched depends on addresses, so one rank would stop where the others go on and wait for it.

    A collective that other ranks do not join never ends, and nothing does behind it: the host goes on until it waits.
    """

    faults: ClassVar[list[str]] = []
    stuck: ClassVar[list[str]] = []
    """The operation that never ends, and why."""

    def __init__(self, device: torch.device) -> None:
        self._late: list[_Late] = []

    def launch(self, operation: Operation, after: Work | None = None) -> Work:
        for late in self._late:
            late.require_untouched([*operation.reads, *operation.writes])
        earlier = after.late if isinstance(after, Awaited) else None
        if earlier is not None:
            earlier.restore()  # the side stream sees what the computation does not see yet
        if not self._ends(operation):
            return _Nothing()
        late = _Late(self, operation)
        if earlier is not None:
            earlier.give_way(late)
        self._late.append(late)
        return Awaited(late, operation)

    def _ends(self, operation: Operation) -> bool:
        """Run it, if it is not behind one that never ends; whether it ended."""
        if not self.stuck:
            try:
                self._run(operation)
                return True
            except (RuntimeError, ScheduleError) as error:
                self.stuck.append(f"{operation.name}: {error}")
        for tensor in operation.writes:
            poison(tensor)
        return False

    def _run(self, operation: Operation) -> None:
        operation.run()

    def join(self) -> None:
        for late in list(self._late):
            late.wait()

    def forget(self, late: _Late) -> None:
        if late in self._late:
            self._late.remove(late)

    def fetch(self, values: Tensor) -> Callable[[], Tensor | None]:
        self.join()
        arrives = super().fetch(values)
        return lambda: None if self.stuck else arrives()

    def unfinished(self) -> str | None:
        late = [self._late[0].name] if self._late else []
        return next(iter(self.stuck or late), None)


class ComparingStream(LaggingStream):
    """Ranks compare what they launch: gloo ends processes whose messages differ in size, where a device hangs."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._group: dist.ProcessGroup | None = None

    def compare_over(self, group: dist.ProcessGroup) -> None:
        """Compare from now on; what this stream launches goes over `group`."""
        self._group = group

    def _run(self, operation: Operation) -> None:
        if self._group is not None:
            size = sum(tensor.numel() for tensor in (*operation.reads, *operation.writes))
            own = torch.tensor([crc32(operation.name.encode()), size])
            everyone = [torch.empty_like(own) for _ in range(self._group.size())]
            dist.all_gather(everyone, own, group=self._group)
            each = torch.stack(everyone).numpy()
            if (each != each[0]).any(axis=0).all():  # NCCL does not notice other work of equal size
                raise RuntimeError("other ranks are at other work")
        super()._run(operation)


class Awaited:
    """What is waited for: it keeps the operation's tensors, as `CudaEvent` does, and nothing else here does."""

    def __init__(self, late: _Late, operation: Operation) -> None:
        self.late, self._operation = late, operation

    def wait(self) -> None:
        # On a device a wait touches no tensor, so that it may stand inside of torch.func.
        with outside_transforms():
            self.late.wait()


class _Place:
    """Where a tensor lies; its memory goes when others drop it, and a device's allocator would hand it out again."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._form = tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()

    def tensor(self) -> Tensor | None:
        """The tensor; None where its memory was dropped."""
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        dtype, *form = self._form
        return None if storage is None else torch.empty(0, dtype=dtype).set_(storage, *form)


class _Late:
    """One collective's results, kept back; notes a fault if somebody changes what it reads or writes meanwhile."""

    def __init__(self, stream: LaggingStream, operation: Operation) -> None:
        self.name, writes = operation.name, [tensor for tensor in operation.writes if tensor.numel()]
        self._stream = stream
        self._results = [tensor.clone() for tensor in writes]
        self._writes = [_Place(tensor) for tensor in writes]
        self._before: list[_Late] = []
        for tensor in writes:
            poison(tensor)
        self._used = [*(_Place(tensor) for tensor in operation.reads if tensor.numel()), *self._writes]
        self._remember()
        self._done = False

    def restore(self) -> None:
        """Let the results be seen, without the computation having waited; those that it began with first."""
        for earlier in self._before:
            earlier.restore()
        if not self._before:
            self._check()
        self._show_results()

    def give_way(self, following: _Late) -> None:
        """`following` began with these results and poisons what it writes: ours stay poisoned too."""
        following._before.append(self)
        self._hide()
        following._remember()

    def _hide(self) -> None:
        for earlier in self._before:
            earlier._hide()
        for place in self._writes:
            tensor = place.tensor()
            if tensor is not None and _has_memory(tensor):
                poison(tensor)
        self._remember()

    def require_untouched(self, tensors: Sequence[Tensor]) -> None:
        """Before work on the same memory begins: afterwards one poison could not be told from the other."""
        used = [tensor for place in self._used if (tensor := place.tensor()) is not None]
        mine = {tensor.untyped_storage().data_ptr() for tensor in used}
        if not self._before and mine & {tensor.untyped_storage().data_ptr() for tensor in tensors}:
            self._check()

    def _remember(self) -> None:
        now = [place.tensor() for place in self._used]
        self._state = [one.clone() if one is not None and _has_memory(one) else None for one in now]

    def _check(self) -> None:
        for place, state in zip(self._used, self._state, strict=True):
            tensor = place.tensor()
            if tensor is None or not _has_memory(tensor):
                self._stream.faults.append(
                    f"something gave back the memory that the {self.name} was at work on"
                )
            elif state is not None and not same_bytes(tensor, state):
                self._stream.faults.append(f"something changed what the {self.name} was at work on")

    def _show_results(self) -> None:
        for place, result in zip(self._writes, self._results, strict=True):
            tensor = place.tensor()
            if tensor is not None and _has_memory(tensor):
                tensor.copy_(result)

    def wait(self) -> None:
        if self._done:
            return
        for earlier in self._before:
            earlier.wait()
        if not self._before:
            self._check()
        self._done = True
        self._stream.forget(self)
        self._show_results()


def _has_memory(tensor: Tensor) -> bool:
    return not tensor.numel() or tensor.untyped_storage().nbytes() > 0


class LaggingCudaStream(CudaStream):
    """On a GPU: nan until a side stream that has slept first has written the results."""

    cycles = 10_000_000
    """5 ms: longer than the host needs from one unit to the next."""

    def launch(self, operation: Operation, after: Work | None = None) -> Work:
        if isinstance(after, CudaEvent):
            after.wait()  # a chain is compared with the other way, through the computation's stream
        kept = [tensor.clone() for tensor in operation.writes]
        for tensor in operation.writes:
            poison(tensor)

        def late() -> None:
            torch.cuda._sleep(self.cycles)
            for tensor, before in zip(operation.writes, kept, strict=True):
                tensor.copy_(before)
                before.record_stream(torch.cuda.current_stream())
            operation.run()

        return super().launch(replace(operation, run=late))


StreamMaker = Callable[[torch.device], CudaStream]


@contextmanager
def device_way(
    make_stream: StreamMaker, memory: Callable[[Shards, Interval], UnitMemory] = ResizedMemory
) -> Iterator[None]:
    """Inside, optimizers take the route of a device, with these side streams, and this memory for units that are freed.

    Raises:
        AssertionError: at the end, if a `LaggingStream` saw what it was at work on change, or has not ended.
    """
    LaggingStream.faults.clear()
    LaggingStream.stuck.clear()

    def make(
        group: dist.ProcessGroup,
        device: torch.device,
        timeout: datetime.timedelta | None,
        *,
        units: int,
        mesh: Mesh | None = None,
        packs: bool = False,
    ) -> Collectives:
        backend = "nccl" if device.type == "cuda" else "gloo"
        shape = mesh or Mesh(1, group.size())
        if dist.get_backend(group) == "fake":
            patience = timeout or datetime.timedelta(seconds=60)
            return predict_nccl(group, shape, device, StallReporter(group), patience, make_stream=make_stream)
        if timeout is None:
            timeout = group._get_backend(device).options._timeout
        reporter = StallReporter(group)
        made = make_nccl(
            communicators_of(group, shape, device, timeout, reporter, packs=packs, backend=backend),
            shape,
            device,
            reporter,
            timeout or datetime.timedelta(seconds=60),
            make_stream=make_stream,
            averages=backend == "nccl",
        )
        for route in made.routes.values():
            assert isinstance(route, NcclRoute)
            streams = (route._gathers, route.group), (route._reductions, route._reduce_group)
            for stream, communicator in streams:
                if isinstance(stream, ComparingStream):
                    stream.compare_over(communicator)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_collectives", make)
        patch.setattr(unit, "unit_memory", partial(_memory, memory))
        yield
    # A program that waited for its device would end with the time-out of NCCL's watchdog.
    assert not LaggingStream.stuck, f"never ended: {LaggingStream.stuck[0]}"
    assert not LaggingStream.faults, LaggingStream.faults[0]


def _memory(
    make: Callable[[Shards, Interval], UnitMemory],
    unit: Unit,
    kept: Interval,
    dtype: torch.dtype,
    device: torch.device,
    *,
    comes_and_goes: bool,
) -> UnitMemory:
    """A unit's memory as on a device, where the shard lies elsewhere."""
    if not comes_and_goes:
        return unit_memory(unit, kept, dtype, device, comes_and_goes=False)
    return make(Shards(unit, torch.zeros(unit.numel, dtype=dtype, device=device)), kept)


class LastingMemory(ResizedMemory):
    """A device's memory whose freed elements read as nan: reading an emptied storage would end a host's process."""

    def grow(self) -> None:
        pass

    def shrink(self) -> None:
        poison(self.whole.tensor)


_NODES = 10_000
"""More than the backward passes of a test make with `create_graph=True`."""


@contextmanager
def backward_in_a_thread() -> Iterator[None]:
    """Inside, autograd runs all nodes and their hooks in a thread of its own, as it does where they lie on CUDA."""
    run = torch.autograd.graph._engine_run_backward
    # Each thread counts its nodes, and the highest number goes first. This thread's are always higher then, as in a
    # training that is not at its beginning: else sums over gradients of gradients would change their order there.
    counted = torch.ones((), requires_grad=True)
    while (counted * 1).grad_fn._sequence_nr() < _NODES:  # type: ignore[union-attr]
        pass
    with ThreadPoolExecutor(1, "autograd") as autograd, pytest.MonkeyPatch.context() as patch:

        def run_there(*arguments: Any, **options: Any) -> Any:
            inside = threading.current_thread().name.startswith("autograd")
            if inside or transforming():  # what torch.func is at work on belongs to its thread here
                return run(*arguments, **options)
            return autograd.submit(run, *arguments, **options).result()

        patch.setattr(torch.autograd, "_engine_run_backward", run_there)
        yield
