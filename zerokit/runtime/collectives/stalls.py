"""Reports of stalls: a rank that waits long publishes what it waits for, and an error names both sides."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from zerokit.errors import ScheduleError

PUBLISH_AFTER_S = 1.0

_SAME_CALLS = (
    "Ranks must make the same calls in the same order: between two steps as many backward passes, at stage 3 also as "
    "many forwards, and of the model itself, not of its blocks. A rank with less data runs another batch with its "
    "loss times 0. Ranks may leave units out, but must otherwise follow rank 0's first forward pass or all leave it "
    "together. Otherwise look for the first error of the rank named last."
)


class StallReporter:
    """Reports what one rank waits for; the thread starts with the first wait."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world = group.rank(), group.size()
        self._store = dist.distributed_c10d._get_process_group_store(group) if self.world > 1 else None
        self._prefix = f"zerokit/{group.group_name}"
        self._sequence = 0
        self._since: float | None = None
        self._wait: str | Callable[[], str] = ""
        self._published = -1
        self.waited_s = 0.0
        """Seconds spent waiting so far, for measurements of communication."""
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    def distinguish(self, number: int) -> None:
        """Set a name that all ranks agreed on, so that entries of earlier optimizers in the store are ignored."""
        self._prefix = f"{self._prefix}/{number}"

    @contextmanager
    def waiting(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Mark a wait for `what`; errors inside become `ScheduleError`s that name what each rank waits for."""
        self._sequence += 1
        around, start = (self._wait, self._since), time.monotonic()
        self._wait, self._since = what, start
        if self._thread is None and self._store is not None:
            self._thread = threading.Thread(
                target=_publish_long_waits, args=(self._wake, weakref.ref(self)), daemon=True
            )
            self._thread.start()
            # A thread inside a call to the store when the interpreter ends would abort the process.
            weakref.finalize(self, _stop, self._wake, self._thread)
        try:
            yield
        except RuntimeError as error:
            raise ScheduleError(self._explain(error)) from error
        finally:
            self._wait, self._since = around
            if self._since is None:
                self.waited_s += time.monotonic() - start

    def note(self, what: str) -> None:
        """Publish `what` for the others if the store is reachable; no rank waits for it."""
        if self._store is not None:
            with suppress(RuntimeError):
                self._store.set(f"{self._prefix}/{what}", "")

    def noted(self, what: str) -> bool:
        """Whether a rank has noted this. Raises `ScheduleError` if the store does not answer."""
        if self._store is None:
            return False
        with self.waiting("process group's store"):
            return bool(self._store.check([f"{self._prefix}/{what}"]))

    @property
    def _what(self) -> str:
        return self._wait if isinstance(self._wait, str) else self._wait()

    def _look_up(self, rank: int) -> str | None:
        key = f"{self._prefix}/{rank}"
        assert self._store is not None
        return self._store.get(key).decode() if self._store.check([key]) else None

    def publish_if_long(self) -> None:
        since, sequence = self._since, self._sequence
        if since is None or time.monotonic() - since < PUBLISH_AFTER_S or sequence == self._published:
            return
        self._publish(f"waits for the {self._what} (wait {sequence})")
        self._published = sequence

    def _publish(self, text: str) -> None:
        if self._store is not None:
            self._store.set(f"{self._prefix}/{self.rank}", text)

    def _explain(self, error: RuntimeError) -> str:
        lines = [
            f"rank {self.rank} of {self.world} did not get through its {self._what} (wait {self._sequence}): {error}"
        ]
        try:
            self._publish(f"gave up waiting for the {self._what} (wait {self._sequence})")
            for rank in range(self.world):
                if rank != self.rank and self._store is not None:
                    text = self._look_up(rank)
                    lines.append(
                        f"  rank {rank} {text or 'is not known to wait: it failed, stopped, or is busy elsewhere'}"
                    )
        except RuntimeError as unreachable:
            lines.append(f"  the store cannot be asked about the others: {unreachable}")
        lines.append(f"  {_SAME_CALLS}")
        return "\n".join(lines)


def _stop(wake: threading.Event, thread: threading.Thread) -> None:
    wake.set()
    if thread is not threading.current_thread():
        thread.join(timeout=5.0)


def _publish_long_waits(wake: threading.Event, reference: weakref.ref[StallReporter]) -> None:
    # A weak reference: the thread must not keep the optimizer's memory alive.
    while not wake.wait(PUBLISH_AFTER_S / 2):
        reporter = reference()
        if reporter is None:
            return
        with suppress(RuntimeError):  # the store may answer again, or is gone for good
            reporter.publish_if_long()
        del reporter
