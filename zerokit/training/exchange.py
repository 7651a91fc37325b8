"""What crosses between islands: means and gathers of regions over a slow link, at an even pace if there is time.

Everything goes over gloo, through host memory: sockets between sites are no faster any other way, a device is not kept
waiting, and small messages can be spaced. A region [islands × piece] is averaged into this rank's piece, the outer
optimizer steps on that, and the pieces are gathered. Sums are in island order, so all islands have equal bits.
"""

from __future__ import annotations

import datetime
import threading
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from zerokit.errors import LayoutMismatch, ScheduleError
from zerokit.placement import Axis
from zerokit.runtime.collectives.base import as_bytes
from zerokit.training.differences import Differences
from zerokit.training.islands import Islands

_T = TypeVar("_T")

FP32 = 4
"""Bytes of an element of what is kept, and of what crosses on a wide wire."""

CHUNK_NUMEL = 1 << 18
"""Elements of a piece in one message without a pace: a MiB."""

TICK_S = 0.01
"""Seconds between messages at a pace: ten in each 100 ms keep the link even; twice as many cost 3 % of a short step."""

_SMALLEST = 1 << 10
"""Elements of a piece in a paced message, at least: below that the headers count."""

_LATE = 0.93
"""The time between messages, at least, to make up for a delay: an even link at the price of a short wait."""

_ENDING_S = 5.0

AGREEMENT_BYTES = 16
"""What every island sends to every other before a synchronisation: two integers."""


class Synchronisation:
    """One fragment on its way: `buffer` is the region, replaced by the new values of all pieces.

    Args:
        name: for errors.
        buffer: [islands × piece], fp32, on the host.
        update: makes the new values of this rank's piece, in place, from their mean; with `differences`, from their
            mean movement.
        seconds: to spread the messages over, as island 0 sees it; None for as fast as the link goes.
        differences: on a narrow wire; `buffer` becomes what all islands know then.
    """

    def __init__(
        self,
        name: str,
        buffer: Tensor,
        update: Callable[[Tensor], None],
        seconds: float | None,
        differences: Differences | None = None,
    ) -> None:
        self.name, self.buffer, self.update, self.seconds = name, buffer, update, seconds
        self.differences = differences
        self.done = threading.Event()
        self.error: Exception | None = None
        self.wanted_at: float | None = None
        """Since when the training waits for it, on the monotonic clock."""
        self.message_numel = CHUNK_NUMEL
        """Elements of a piece in a message."""
        self._messages_left = 1
        self._begun = 0.0

    def begin(self, piece: int, ticks: int) -> None:
        """The messages of a piece start now, spread over so many ticks in each of both directions; 0 for no pace."""
        self._begun = time.monotonic()
        self._deadline = self._begun + (self.seconds or 0.0)
        if ticks:
            numel = min(max(-(-piece // ticks), _SMALLEST), CHUNK_NUMEL)
            block = 1 if self.differences is None else self.differences.block
            self.message_numel = -(-numel // block) * block
            self._messages_left = max(2 * -(-piece // self.message_numel), 1)
        self._late = _LATE * (self.seconds or 0.0) / self._messages_left

    def pause(self) -> float:
        """Seconds to wait before the next message, which is counted as begun then."""
        now = time.monotonic()
        if now < self._deadline:
            # What a busy processor has delayed is made up for evenly.
            interval = max(self._late, (self._deadline - self._begun) / max(self._messages_left, 1))
        elif now < self._deadline + (self.seconds or 0.0) / 4 or self.wanted_at is None:
            interval = self._late
        else:
            interval = 0.0
        self._messages_left -= 1
        pause = max(0.0, self._begun + interval - now)
        self._begun = now + pause
        return pause


class Exchange:
    """The ranks of one number in all islands. A thread exists from the first paced synchronisation on.

    All of them make it together, and submit the same synchronisations in the same order.
    """

    def __init__(self, islands: Islands) -> None:
        self.islands = islands
        self.count, self.index = islands.count, islands.index
        self._group = islands.group(Axis.OUTER, "gloo", self)
        self._members = dist.get_process_group_ranks(self._group)
        self._store = dist.distributed_c10d._get_process_group_store(self._group)
        self._timeout: datetime.timedelta = islands.timeout
        self._queue: SimpleQueue[Synchronisation | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self.waited_s = 0.0
        """Seconds that the training has waited for other islands so far."""

    def start(self, one: Synchronisation) -> None:
        """Begin it; one without a pace is over when this returns."""
        if one.seconds is None and self._thread is None:
            _carry_out(self, one)
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=_work, args=(weakref.ref(self), self._queue), name="zerokit islands", daemon=True
            )
            self._thread.start()
            # A thread inside a message when the interpreter ends would abort the process.
            weakref.finalize(self, _end, self._queue, self._stopping, self._thread)
        self._queue.put(one)

    def finish(self, one: Synchronisation) -> None:
        """Wait for it. Raises `ScheduleError` where some island did not come, or failed."""
        began = time.monotonic()
        one.wanted_at = began
        one.done.wait()
        self.waited_s += time.monotonic() - began
        if one.error is not None:
            raise ScheduleError(self._explain(one.name, one.error)) from one.error

    def sum(self, name: str, buffer: Tensor) -> None:
        """Let this rank's piece of the region `buffer` be the sum over islands, and the rest zero. Raises
        `ScheduleError`.
        """
        pieces = self._pieces(buffer)
        own = torch.zeros_like(pieces[self.index])

        def add() -> None:
            for start, stop in self._paced(own.numel()):
                for term in self._swap(pieces[:, start:stop].contiguous()):
                    own[start:stop] += term

        self._guarded(name, add)
        buffer.zero_()
        pieces[self.index] = own

    def gather(self, name: str, buffer: Tensor) -> None:
        """Fill the region `buffer` from all islands' pieces, now. Raises `ScheduleError`."""
        self._guarded(name, lambda: self._gather(buffer))

    def broadcast(self, name: str, values: Tensor) -> None:
        """Send island 0's `values`, on any device, to all, in place. Raises `ScheduleError`."""
        here = values.cpu()
        with as_bytes(here) as sent:
            self._guarded(name, lambda: dist.broadcast(sent, group=self._group, group_src=0))
        if here is not values:
            values.copy_(here)

    def all(self, name: str, value: _T) -> list[_T]:
        """Every island's `value`, in order. Raises `ScheduleError`."""
        values: list[_T] = [value] * self.count
        self._guarded(name, lambda: dist.all_gather_object(values, value, group=self._group))
        return values

    def require_equal(self, name: str, settings: Mapping[str, str]) -> None:
        """Raise `LayoutMismatch`, which names the differences, where another island has other settings."""
        for index, other in enumerate(self.all(name, settings)):
            different = [
                f"{key} is {other.get(key)}, not {value}"
                for key, value in settings.items()
                if other.get(key) != value
            ]
            if different:
                raise LayoutMismatch(
                    f"island {index} and island {self.index} cannot be synchronised: on island {index} "
                    f"{'; '.join(different)}: pass the same model and the same settings on all islands"
                )

    def _pieces(self, region: Tensor) -> Tensor:
        """The equal pieces of a region, [islands, elements of each]."""
        return region.view(self.count, -1)

    def _guarded(self, name: str, call: Callable[[], object]) -> None:
        try:
            self._publish(name)
            call()
        except RuntimeError as error:
            raise ScheduleError(self._explain(name, error)) from error

    # ---- in the thread

    def carry_out(self, one: Synchronisation) -> None:
        """Average, update and gather."""
        self._publish(one.name)
        pieces, narrow = self._pieces(one.buffer), one.differences
        own = pieces[self.index]
        self._agree_on_pace(one, own.numel())
        for start, stop in self._paced(own.numel(), one):
            stretch = pieces[:, start:stop]
            if narrow is not None:
                received = self._swap(narrow.pack_movement(stretch, start, stop))
                own[start:stop] = narrow.mean_movement(received, stop - start)
                continue
            received = self._swap(stretch.contiguous())
            mean = received[0]
            for term in received[1:]:
                mean += term
            torch.div(mean, self.count, out=own[start:stop])
        one.update(own)
        self._gather(one.buffer, one)

    def _gather(self, buffer: Tensor, one: Synchronisation | None = None) -> None:
        pieces = self._pieces(buffer)
        own = pieces[self.index]
        for start, stop in self._paced(own.numel(), one):
            if one is None or one.differences is None:
                pieces[:, start:stop] = self._to_all(own[start:stop])
            else:
                packed = one.differences.pack_result(own[start:stop], self.index, start, stop)
                pieces[:, start:stop] = one.differences.learn(self._to_all(packed[0]), start, stop)

    def _to_all(self, sent: Tensor) -> Tensor:
        return self._swap(sent.expand(self.count, -1).contiguous())

    def _paced(self, numel: int, one: Synchronisation | None = None) -> Iterator[tuple[int, int]]:
        """Stretches of a piece, one for each message, when it is time for it."""
        size = CHUNK_NUMEL if one is None else one.message_numel
        for start in range(0, numel, size):
            if one is not None and self._stopping.wait(one.pause()):
                raise RuntimeError("the training has ended")
            yield start, min(start + size, numel)

    def _swap(self, sent: Tensor) -> Tensor:
        """What every island has for this one, in the shape of `sent` [islands, …]: a row for each."""
        received = torch.empty_like(sent)
        received[self.index] = sent[self.index]
        others = [index for index in range(self.count) if index != self.index]
        # Receives come first: gloo may receive nothing while it sends, so that the two directions of a link take turns.
        # Its all-to-all sends first.
        works = [self._group.recv([received[index]], index, 0) for index in others]
        works += [self._group.send([sent[index]], index, 0) for index in others]
        for work in works:
            work.wait()
        return received

    def _agree_on_pace(self, one: Synchronisation, piece: int) -> None:
        """Island 0's measure of time, for all: the pieces must be cut alike.

        Raises `RuntimeError` where some island has come to another synchronisation.
        """
        ticks = 0 if one.seconds is None else max(1, int(one.seconds / 2 / TICK_S))
        numbers = self._to_all(torch.tensor([zlib.crc32(one.name.encode()), ticks]))
        if (numbers[:, 0] != numbers[0, 0]).any():
            raise RuntimeError("islands have come to different synchronisations")
        one.begin(piece, int(numbers[0, 1]))

    # ---- errors

    def _publish(self, name: str) -> None:
        self._store.set(f"zerokit/islands/{self.index}", name)

    def _explain(self, name: str, error: Exception) -> str:
        mine = f"island {self.index} (rank {self._members[self.index]})"
        lines = [f"{mine} did not get through the {name} within {self._timeout.total_seconds():g} s: {error}"]
        with suppress(RuntimeError):
            for index in range(self.count):
                if index != self.index:
                    key = f"zerokit/islands/{index}"
                    there = self._store.get(key).decode() if self._store.check([key]) else "nothing"
                    where = "is there too" if there == name else f"came last to the {there}"
                    lines.append(f"  island {index} (rank {self._members[index]}) {where}")
        lines.append(
            "  Islands make equally many steps. This one has taken over nothing of the synchronisation: look for the "
            "first error of the other, or go on from the last checkpoint with the islands that are left."
        )
        return "\n".join(lines)


def _carry_out(exchange: Exchange, one: Synchronisation) -> None:
    try:
        exchange.carry_out(one)
    except Exception as error:  # raised where the training waits for it
        one.error = error
    one.done.set()


def _work(reference: weakref.ref[Exchange], queue: SimpleQueue[Synchronisation | None]) -> None:
    # A weak reference: the thread must not keep the optimizer's memory alive.
    while (one := queue.get()) is not None:
        exchange = reference()
        if exchange is None:
            return
        _carry_out(exchange, one)
        del exchange, one


def _end(
    queue: SimpleQueue[Synchronisation | None], stopping: threading.Event, thread: threading.Thread
) -> None:
    stopping.set()
    queue.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout=_ENDING_S)
