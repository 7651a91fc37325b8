"""Streams beside the computation's, on which collectives run; ordered by events alone, so that the host never waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from zerokit.runtime.collectives.base import Work


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
