"""Reports of stalls: a rank that gives up waiting publishes what for, and its error names what others waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from zerokit.errors import ScheduleError
from zerokit.runtime.torch_internals import store_of

OTHERS_S = 2.0
"""Ranks that wait for each other give up together, but for as long as they began apart: others may still publish."""

_SAME_CALLS = (
    "Ranks must make the same calls in the same order: between two steps as many backward passes, at stage 3 also as "
    "many forwards, and of the model itself, not of its blocks, and all of them state_dict() and gathered(). A rank "
    "with less data runs another batch with its loss times 0. Ranks may leave units out, but must otherwise follow "
    "rank 0's first forward pass or all leave it together. Otherwise look for the first error of the rank named last."
)


class StallReporter:
    """Reports what one rank waited for."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.world = group.rank(), group.size()
        self._store = store_of(group) if self.world > 1 else None
        self._prefix = f"zerokit/{group.group_name}"
        self._waits = 0
        self.waited_s = 0.0  # seconds spent waiting so far, for measurements of communication
        self.watchers: list[Callable[[str], Callable[[], None]]] = []
        """Called with what is waited for as a wait begins; what they return is called as it ends."""

    def distinguish(self, number: int) -> None:
        """Set a name that all ranks agreed on, so that entries of earlier optimizers in the store are ignored."""
        self._prefix = f"{self._prefix}/{number}"

    @contextmanager
    def waiting(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Mark a wait for `what`; errors inside become `ScheduleError`s that name what each rank waited for."""
        ends = [watch(what if isinstance(what, str) else what()) for watch in self.watchers]
        start, before = time.monotonic(), self.waited_s
        self._waits += 1
        try:
            yield
        except RuntimeError as error:
            raise ScheduleError(self._explain(what if isinstance(what, str) else what(), error)) from error
        finally:
            for end in ends:
                end()
            self.waited_s = before + time.monotonic() - start  # waits inside are part of this one

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

    def _explain(self, what: str, error: RuntimeError) -> str:
        lines = [
            f"rank {self.rank} of {self.world} did not get through its {what} (wait {self._waits}): {error}"
        ]
        try:
            if self._store is not None:
                text = f"gave up waiting for the {what} (wait {self._waits})"
                self._store.set(f"{self._prefix}/{self.rank}", text)
                time.sleep(OTHERS_S)
            for rank in range(self.world):
                if rank != self.rank and self._store is not None:
                    key, text = f"{self._prefix}/{rank}", "failed, stopped, or is busy elsewhere"
                    if self._store.check([key]):
                        text = self._store.get(key).decode()
                    lines.append(f"  rank {rank} {text}")
        except RuntimeError as unreachable:
            lines.append(f"  the store cannot be asked about the others: {unreachable}")
        lines.append(f"  {_SAME_CALLS}")
        return "\n".join(lines)
