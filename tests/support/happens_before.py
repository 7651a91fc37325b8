"""Happens-before on a host: `CudaStream` over fake streams, every operation followed, and races found without a GPU.

torch's sanitizer for CUDA keeps the clocks: which stream has waited for what, and who touched memory last. It is driven
here by fakes in place of `torch.cuda`, and by a dispatch mode over CPU tensors, whose storages get addresses as CUDA's
caching allocator would give them: what a stream frees, the next allocation of that stream takes, at once.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.cuda import _sanitizer
from torch.cuda._sanitizer import EventHandler, SynchronizationError, UnsynchronizedAccessError
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.streams import device_way
from zerokit.runtime.collectives import nccl as streams
from zerokit.runtime.collectives.nccl import NcclCollectives

COMPUTE = 0
"""The computation's stream."""
HOST = -1
"""Stands for the host among the streams: what it reads, and the memory that it has pinned."""
_GRANULE = 128
"""Bytes that are followed as one: 64 elements of bf16, so that no two shards meet in one."""
_EVERY = 8
"""A tensor's first granule and every eighth one of the memory are followed: what races does so in all of them."""
_ALIGNMENT = 512  # CUDA's caching allocator


# --- memory --------------------------------------------------------------------------------------------------


@dataclass
class _Block:
    start: int
    size: int
    stream: int
    storage: StorageWeakRef


class Heap:
    """Addresses of storages, reused as a caching allocator does: by the stream that they were allocated on."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._free: dict[int, list[tuple[int, int]]] = {}
        self._end = _ALIGNMENT

    def granules(self, tensor: Tensor, stream: int) -> set[int]:
        """What is followed of what the tensor lies in; a storage that is new here is allocated on `stream`."""
        storage = tensor.untyped_storage()
        if not tensor.numel() or not storage.nbytes():
            return set()
        start = self._place(storage, stream).start + tensor.storage_offset() * tensor.element_size()
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        first, end = start // _GRANULE, -(-(start + span * tensor.element_size()) // _GRANULE)
        return {first, *range(-(-first // _EVERY) * _EVERY, end, _EVERY)}

    def _place(self, storage: torch.UntypedStorage, stream: int) -> _Block:
        # What is known lives: a weak reference holds the number of a storage that is gone.
        if (block := self._blocks.get(storage._cdata)) is not None:
            return block
        self._sweep()
        size = -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        pool = self._free.setdefault(stream, [])
        fitting = [place for place in pool if place[1] >= size]
        start, room = min(fitting, key=lambda place: place[1], default=(self._end, size))
        if fitting:
            pool.remove((start, room))
            if room > size:
                pool.append((start + size, room - size))
        else:
            self._end += size
        block = self._blocks[storage._cdata] = _Block(start, size, stream, StorageWeakRef(storage))
        return block

    def _sweep(self) -> None:
        for key in [key for key, block in self._blocks.items() if block.storage.expired()]:
            self.release(key)

    def release(self, key: int) -> None:
        """Give the address of a storage back to its stream, whoever still uses it."""
        block = self._blocks.pop(key, None)
        if block is not None and block.stream != HOST:  # pinned memory is given back behind events of its own
            self._free.setdefault(block.stream, []).append((block.start, block.size))


# --- torch.cuda ----------------------------------------------------------------------------------------------


class FakeCuda:
    """`torch.cuda` as far as `CudaStream` knows it. Calls from a thread that has set no device are refused."""

    def __init__(self) -> None:
        self.handler = EventHandler()
        self._numbers = itertools.count(1)
        self._here = threading.local()
        self.set_device(0)
        self.host_waits = False
        self.faults: list[str] = []
        self.computed = 0
        """Operations of the computation's stream so far."""
        self.overlaps: list[int] = []
        """By wait of the computation: its operations between the event and the first wait for it."""
        self.handler._handle_stream_creation(HOST)

    def set_device(self, device: Any) -> None:
        self._here.device = device

    def require_device(self) -> None:
        """A thread without one would make a context on the first GPU, from every rank."""
        assert hasattr(self._here, "device"), (
            f"{threading.current_thread().name} calls CUDA without set_device"
        )

    @property
    def current(self) -> FakeStream:
        if not hasattr(self._here, "stream"):
            self._here.stream = FakeStream(self, COMPUTE)
        stream: FakeStream = self._here.stream
        return stream

    def Stream(self, device: Any = None, priority: int = 0) -> FakeStream:
        self.require_device()
        return FakeStream(self, next(self._numbers))

    def current_stream(self, device: Any = None) -> FakeStream:
        self.require_device()
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.require_device()
        before, self._here.stream = self.current, stream
        try:
            yield
        finally:
            self._here.stream = before

    def make_event(self) -> FakeEvent:
        return FakeEvent(self, next(self._numbers))


class FakeEvent:
    """An event that has happened only once the host waits for it, so that nothing is ordered by chance."""

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self._cuda, self.number, self.computed, self.waited_for = cuda, number, cuda.computed, False
        cuda.handler._handle_event_creation(number)

    def query(self) -> bool:
        self._cuda.require_device()
        if self._cuda.host_waits:
            self._cuda.handler._handle_event_synchronization(self.number)
        return self._cuda.host_waits


class FakeStream:
    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self._cuda, self.number = cuda, number
        cuda.handler._handle_stream_creation(number)

    def record_event(self) -> FakeEvent:
        self._cuda.require_device()
        event = self._cuda.make_event()
        self._cuda.handler._handle_event_record(event.number, self.number)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self._cuda.require_device()
        if self.number == COMPUTE and not event.waited_for:
            event.waited_for = True
            self._cuda.overlaps.append(self._cuda.computed - event.computed)
        self._cuda.handler._handle_event_wait(event.number, self.number)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())


class _Torch:
    """torch for the module of streams: with the fake `cuda`, and no pinned memory."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        with self.cuda.stream(FakeStream(self.cuda, HOST) if pin_memory else self.cuda.current):
            return torch.empty(*size, **options)


# --- operations ----------------------------------------------------------------------------------------------


_Follow = Callable[[str, int, Sequence[Tensor], Sequence[Tensor]], None]
"""Takes an operation, its stream, and what it reads and writes."""


class _Follower(TorchDispatchMode):
    """Tells what each operation reads and writes, and on which stream."""

    def __init__(self, cuda: FakeCuda, heap: Heap, follow: _Follow) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._cuda, self._heap, self._follow = cuda, heap, follow

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        out = func(*args, **given)
        stream = self._cuda.current.number
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self._heap.granules(made, stream)  # allocated now, whoever writes it
        self._follow(str(func), stream, *_accesses(func, args, given, out))
        return out


def _accesses(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation reads, and those that it writes."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    schema = func._schema
    operation = schema.name.partition("::")[2]
    only_shape = operation.startswith(("empty", "new_")) or operation.endswith("_like")
    for place, argument in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        alias = argument.alias_info
        if schema.name.startswith("c10d::"):
            # What arrives, and what is summed in place, is not marked as written there.
            (reads if "input" in argument.name else writes).extend(tensors)
        elif alias is not None and alias.is_write:
            writes += tensors
        elif alias is None and not only_shape:  # else a view is made
            reads += tensors
    known = {
        leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
    }
    fresh = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
    fresh = [tensor for tensor in fresh if tensor.untyped_storage()._cdata not in known]
    return reads, writes if operation.startswith(("empty", "new_empty")) else writes + fresh


def _describe(error: SynchronizationError) -> str:
    assert isinstance(error, UnsynchronizedAccessError)
    now, before = error.current_access, error.previous_access
    return (
        f"{now.operator} on stream {now.stream} does not wait for {before.operator} on stream "
        f"{before.stream}, which is {before.type} the same memory"
    )


class _NoTraceback:
    """In place of `traceback` in the sanitizer, which would walk the whole stack at each operation."""

    class StackSummary:
        @staticmethod
        def extract(frames: Any, **options: Any) -> list[Any]:
            return []

    @staticmethod
    def walk_stack(frame: Any) -> None:
        pass


@contextmanager
def followed() -> Iterator[FakeCuda]:
    """Inside, optimizers take the device's way over fake streams; yields these, with the races that were found."""
    cuda, heap = FakeCuda(), Heap()
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> Any:
        before = storage.nbytes()
        done = resize(storage, size)
        if storage.nbytes() != before:
            heap.release(storage._cdata)
        return done

    until = NcclCollectives.until

    def wait_on_host(route: NcclCollectives, arrived: Callable[[], Tensor | None]) -> Tensor:
        cuda.host_waits = True
        try:
            values = until(route, arrived)
        finally:
            cuda.host_waits = False
        follow("what the host reads", HOST, [values], [])
        return values

    def follow(operation: str, stream: int, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        read, written = (
            {granule for tensor in tensors for granule in heap.granules(tensor, stream)}
            for tensors in (reads, writes)
        )
        cuda.computed += stream == COMPUTE
        names: dict[int, list[str]] = {granule: [] for granule in read | written}
        errors = cuda.handler._handle_kernel_launch(stream, read - written, written, set(), operation, names)
        cuda.faults.extend(map(_describe, errors[:1]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NcclCollectives, "until", wait_on_host)
        patch.setattr(streams, "torch", _Torch(cuda))
        patch.setattr(_sanitizer, "traceback", _NoTraceback)
        patch.setattr(torch.UntypedStorage, "resize_", resize_and_tell)
        with device_way(streams.CudaStream), _Follower(cuda, heap, follow):
            yield cuda
