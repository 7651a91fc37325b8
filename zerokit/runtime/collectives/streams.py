"""Work on a device's side streams, ordered by events: the host issues it and never waits."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zerokit.runtime.collectives.observer import Flight
from zerokit.runtime.collectives.route import Work


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
    """A queue on a device that runs collectives one after the other, at a higher priority than the computation.

    It is dropped with its optimizer. The memory of work that nobody has waited for, such as the last step's control
    values, is then handed out again, so that the computation waits for it.
    """

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

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.join()

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
