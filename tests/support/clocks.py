"""States that visit a device, on hosts: who touches memory, and whether the device's order and its events allow it.

Each stream and each thread has a vector clock. What a stream is given comes after what its thread did before; an event
that is waited for brings the clock of where it was recorded. Two accesses of the same bytes, of which one writes, are
a fault unless one of them is known to come first: on a device either might, however prompt this host is.

Copies are made at once. What the computation touches is seen by a dispatch mode, files where they are read and written.
"""

from __future__ import annotations

import mmap
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zerokit.checkpoint import landing, reading, requests, staged
from zerokit.errors import StorageError
from zerokit.runtime import homes, host_copy
from zerokit.runtime.homes import disk, pinned, staging
from zerokit.runtime.homes.copies import CopyStream, Issued, Pairs
from zerokit.runtime.homes.disk import DiskHome, File
from zerokit.runtime.homes.pinned import PinnedHome
from zerokit.runtime.homes.staging import Staging

Clock = dict[str, int]
COMPUTATION = "the computation"
PIECE = 4096
"""Bytes of a staging piece: each unit takes several."""


def _joined(clock: Clock, other: Clock) -> None:
    for actor, tick in other.items():
        clock[actor] = max(clock.get(actor, 0), tick)


@dataclass(frozen=True)
class _Access:
    start: int
    stop: int
    actor: str
    tick: int
    writes: bool

    def meets(self, start: int, stop: int) -> bool:
        return self.start < stop and start < self.stop


@dataclass(eq=False)
class _Memory:
    """Memory of the host or of the device that is watched."""

    name: str
    start: int
    stop: int
    of_device: bool
    accesses: list[_Access] = field(default_factory=list)


class Clocks:
    """What has happened before what."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.seen: Counter[str] = Counter()
        """Accesses by actor."""
        self.waits = 0
        """How often the thread of the training loop waited for a device."""
        self.without = "", ""
        """What is left out: a method and the function that calls it, or the stream that it is about."""
        self.reads_left: int | None = None
        """After so many reads of files one fails."""
        self._clocks: dict[str, Clock] = {}
        self._memories: list[_Memory] = []
        self._lock = threading.RLock()

    # ---- actors

    def thread(self) -> str:
        name = threading.current_thread().name
        return "the host" if name == "MainThread" else f"thread {name}"

    def clock(self, actor: str) -> Clock:
        return self._clocks.setdefault(actor, {})

    def now(self, actor: str) -> Clock:
        """Everything that comes before what follows in an actor."""
        with self._lock:
            if actor == COMPUTATION:
                _joined(self.clock(actor), self.clock(self.thread()))
            return dict(self.clock(actor))

    def join(self, actor: str, *others: Clock) -> None:
        with self._lock:
            for other in others:
                _joined(self.clock(actor), other)

    # ---- memory

    def watch(self, memory: Tensor, owner: object, name: str, *, of_device: bool) -> Tensor:
        """Watch memory that is handed out now, and given back with its `owner`; returns it."""
        start = memory.data_ptr()
        watched = _Memory(name, start, start + memory.nbytes, of_device)
        with self._lock:
            self._memories.append(watched)
        self._touch(watched, start, watched.stop, COMPUTATION if of_device else self.thread(), True)
        weakref.finalize(owner, self._given_back, watched).atexit = False
        return memory

    def _given_back(self, memory: _Memory) -> None:
        """A device's allocator may hand it out at once, in the order of the stream it is from."""
        with self._lock:
            actor = COMPUTATION if memory.of_device else self.thread()
            self._touch(memory, memory.start, memory.stop, actor, True, "gives back")
            self._memories.remove(memory)

    def touch(self, start: int, nbytes: int, actor: str | None, *, writes: bool) -> None:
        """An access; without an actor by the stream or the thread that the memory belongs to."""
        with self._lock:
            for memory in self._memories:
                if nbytes and memory.start < start + nbytes and start < memory.stop:
                    who = actor or (COMPUTATION if memory.of_device else self.thread())
                    self._touch(memory, start, start + nbytes, who, writes)

    def _touch(
        self, memory: _Memory, start: int, stop: int, actor: str, writes: bool, verb: str = ""
    ) -> None:
        with self._lock:
            if actor == COMPUTATION:
                _joined(self.clock(actor), self.clock(self.thread()))
            clock = self.clock(actor)
            clock[actor] = tick = clock.get(actor, 0) + 1
            self.seen[actor] += 1
            kept = []
            for each in memory.accesses:
                known = clock.get(each.actor, 0) >= each.tick
                if each.meets(start, stop) and (writes or each.writes) and not known:
                    does, did = (
                        verb or ("writes" if writes else "reads"),
                        "writes" if each.writes else "reads",
                    )
                    self.faults.append(f"{actor} {does} {memory.name}, which {each.actor} still {did}")
                if not (known and writes and start <= each.start and each.stop <= stop):
                    kept.append(each)
            memory.accesses[:] = [*kept, _Access(start, stop, actor, tick, writes)]


class ClockedIssued(Issued):
    """An event that a stream has recorded."""

    def __init__(self, clocks: Clocks, by: str, at: Clock, keep: object = None) -> None:
        self.clocks, self.by, self.at, self._keep = clocks, by, at, keep

    def wait(self) -> None:
        if self.clocks.without != ("wait", self.by):
            self.clocks.join(COMPUTATION, self.at)

    def arrive(self) -> None:
        if self.clocks.without == ("arrive", _caller()):
            return
        thread = self.clocks.thread()
        self.clocks.waits += thread == "the host"
        self.clocks.join(thread, self.at)


def _caller() -> str:
    """The function that calls a method of a stream or an event."""
    frame: Any = sys._getframe(2)
    while frame.f_code.co_name == "arrive":
        frame = frame.f_back
    return str(frame.f_code.co_name)


class ClockedStream(CopyStream):
    """A `CopyStream`."""

    def __init__(self, clocks: Clocks, name: str) -> None:
        self.clocks, self.name, self.device = clocks, name, torch.device("cpu")

    def mark(self) -> ClockedIssued:
        nothing = self.clocks.without == ("mark", _caller())
        return ClockedIssued(self.clocks, COMPUTATION, {} if nothing else self.clocks.now(COMPUTATION))

    def copy(self, pairs: Pairs, after: Sequence[Issued]) -> ClockedIssued:
        clocks = self.clocks
        clocks.join(self.name, clocks.now(clocks.thread()))
        for one in after:
            assert isinstance(one, ClockedIssued)
            if clocks.without != ("after", one.by):
                clocks.join(self.name, one.at)
        for into, source in pairs:
            clocks.touch(source.data_ptr(), source.nbytes, self.name, writes=False)
            clocks.touch(into.data_ptr(), into.nbytes, self.name, writes=True)
            np.copyto(into.numpy(), source.numpy())  # which no dispatch mode sees
        return ClockedIssued(clocks, self.name, clocks.now(self.name), pairs)

    def arrive(self) -> None:
        ClockedIssued(self.clocks, self.name, self.clocks.now(self.name)).arrive()


class _Computation(TorchDispatchMode):
    """Notes what operations touch; views touch nothing."""

    def __init__(self, clocks: Clocks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._clocks = clocks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            writes = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
            for one in tree_leaves((args, kwargs)):
                if isinstance(one, Tensor) and one.numel() and 0 not in one.stride():
                    self._clocks.touch(one.data_ptr(), one.nbytes, None, writes=writes)
        return func(*args, **(kwargs or {}))


class _Executor:
    """A `ThreadPoolExecutor` of one thread whose requests carry clocks."""

    def __init__(self, clocks: Clocks, workers: int, name: str) -> None:
        self._clocks, self._executor = clocks, ThreadPoolExecutor(workers, name)

    def shutdown(self, *, wait: bool) -> None:
        self._executor.shutdown(wait=wait)

    def submit(self, call: Callable[..., Any], *arguments: Any) -> _Future:
        clocks, before = self._clocks, self._clocks.now(self._clocks.thread())
        after: Clock = {}

        def run() -> Any:
            clocks.join(clocks.thread(), before)
            try:
                return call(*arguments)
            finally:
                after.update(clocks.now(clocks.thread()))

        return _Future(clocks, self._executor.submit(run), after, arguments)


class _Future:
    def __init__(self, clocks: Clocks, future: Any, after: Clock, keep: object) -> None:
        """Keeps a request's memory: who drops it last comes after the thread that has dropped it."""
        self._clocks, self._future, self._after, self._keep = clocks, future, after, keep

    def result(self) -> Any:
        try:
            return self._future.result()
        finally:
            self._clocks.join(self._clocks.thread(), self._after)


@contextmanager
def clocked() -> Iterator[Clocks]:
    """Inside, states that live elsewhere go the way of a GPU, and each access of their memory is checked.

    So do saves and loads; what the thread of a save beside the training writes has come to the host before.
    """
    clocks = Clocks()
    read, write = File.read, File.write

    def noted_read(self: File, memory: memoryview, offset: int) -> None:
        clocks.touch(np.frombuffer(memory, np.uint8).ctypes.data, memory.nbytes, None, writes=True)
        if clocks.reads_left is not None:
            clocks.reads_left = clocks.reads_left - 1 if clocks.reads_left else None
            if clocks.reads_left is None:
                raise StorageError("a short read")
        read(self, memory, offset)

    def noted_write(self: File, memory: memoryview, offset: int) -> None:
        clocks.touch(np.frombuffer(memory, np.uint8).ctypes.data, memory.nbytes, None, writes=False)
        write(self, memory, offset)

    def buffer(home: object, nbytes: int) -> Tensor:
        memory = np.empty(nbytes, np.uint8)
        return clocks.watch(torch.from_numpy(memory), memory, "a visiting unit", of_device=True)

    def pin(memory: Tensor, purpose: str) -> Tensor:
        return clocks.watch(memory, memory, f"memory for {purpose}", of_device=False)

    with pytest.MonkeyPatch.context() as patch, _Computation(clocks):
        streams = ClockedStream(clocks, "the stream in"), ClockedStream(clocks, "the stream out")
        saves = "zerokit-save"
        patch.setattr(
            homes,
            "streams_for",
            lambda device: None if threading.current_thread().name == saves else streams,
        )
        patch.setattr(homes, "Staging", partial(Staging, piece_bytes=PIECE))
        for module in (host_copy, landing, pinned, staging):
            patch.setattr(module, "pin", pin)
        for module in (landing, reading, requests, staged):
            patch.setattr(module, "VECTOR_BYTES", PIECE)
        patch.setattr(host_copy, "_PIECE", 2 * mmap.PAGESIZE)
        for home in (PinnedHome, DiskHome):
            patch.setattr(home, "buffer", buffer)
        patch.setattr(File, "read", noted_read)
        patch.setattr(File, "write", noted_write)
        for module in (disk, host_copy):
            patch.setattr(module, "ThreadPoolExecutor", partial(_Executor, clocks))
        yield clocks
